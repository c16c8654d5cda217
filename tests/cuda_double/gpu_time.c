/* One process at a time has a GPU, in time slices where several have work; its streams run side by side. Copies run
 * beside all kernels. What a process had of the GPU is summed up; NVML's word of it goes by periods. */
#include "gpu_time.h"

#include <string.h>

static struct sim_cuda_clock *clock_(void) {
    return &state_map()->clock;
}

static struct sim_cuda_item *head_of(struct sim_cuda_lane *lane) {
    return lane->done < lane->pushed ? &lane->items[lane->done % SIM_CUDA_ITEMS] : NULL;
}

static uint32_t tenant_make(uint32_t slot, uint32_t device) {
    struct sim_cuda_clock *clock = clock_();
    uint32_t found = SIM_CUDA_TENANTS;
    for (uint32_t number = 0; number < clock->tenant_high; number++) {
        const struct sim_cuda_tenant *tenant = &clock->tenants[number];
        if (tenant->state == 1 && tenant->slot == slot && tenant->device == device) {
            return number;
        }
    }
    if (clock->tenant_high < SIM_CUDA_TENANTS) {
        found = clock->tenant_high++;
    }
    for (uint32_t number = 0; number < clock->tenant_high && found == SIM_CUDA_TENANTS; number++) {
        found = clock->tenants[number].state == 1 ? found : number;
    }
    if (found < SIM_CUDA_TENANTS) {
        clock->tenants[found] = (struct sim_cuda_tenant){.state = 1, .slot = slot, .device = device};
    }
    return found;
}

uint32_t lane_make(uint32_t slot, uint32_t device) {
    struct sim_cuda_clock *clock = clock_();
    uint32_t tenant = tenant_make(slot, device);
    for (uint32_t number = 0; number < SIM_CUDA_LANES && tenant < SIM_CUDA_TENANTS; number++) {
        struct sim_cuda_lane *lane = &clock->lanes[number];
        if (lane->tenant == 0) {
            lane->tenant = tenant + 1;
            lane->done = lane->pushed = 0;
            clock->lane_high = number >= clock->lane_high ? number + 1 : clock->lane_high;
            return number + 1;
        }
    }
    return 0;
}

void slot_ended(uint32_t slot) {
    struct sim_cuda_clock *clock = clock_();
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        struct sim_cuda_lane *lane = &clock->lanes[number];
        if (lane->tenant != 0 && clock->tenants[lane->tenant - 1].slot == slot) {
            lane->tenant = 0;
        }
    }
    for (uint32_t number = 0; number < clock->tenant_high; number++) {
        if (clock->tenants[number].state == 1 && clock->tenants[number].slot == slot) {
            clock->tenants[number].state = 2;
        }
    }
}

/* Which tenants of a GPU have kernels to run, as bits. */
struct wanting {
    uint64_t bits[SIM_CUDA_TENANTS / 64];
    uint32_t count;
};

static int wants(const struct wanting *wanting, uint32_t tenant) {
    return (wanting->bits[tenant / 64] >> tenant % 64) & 1;
}

static struct wanting look(uint32_t device) {
    struct sim_cuda_clock *clock = clock_();
    struct wanting found = {.count = 0};
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        struct sim_cuda_lane *lane = &clock->lanes[number];
        uint32_t tenant = lane->tenant - 1;
        const struct sim_cuda_item *head = lane->tenant == 0 || clock->tenants[tenant].device != device ? NULL : head_of(lane);
        if (head != NULL && !head->copies && !wants(&found, tenant)) {
            found.bits[tenant / 64] |= UINT64_C(1) << tenant % 64;
            found.count++;
        }
    }
    return found;
}

/* Gives the GPU to whose turn it is. */
static void choose(struct sim_cuda_time *time, const struct wanting *wanting) {
    uint32_t now = time->active;
    if (wanting->count == 0 || (now != 0 && wants(wanting, now - 1) && (wanting->count == 1 || time->now_ns < time->slice_end_ns))) {
        return;
    }
    for (uint32_t step = 0; step < SIM_CUDA_TENANTS; step++) {
        uint32_t next = (now + step) % SIM_CUDA_TENANTS; /* the one after it: `active` is a number plus one */
        if (wants(wanting, next)) {
            time->active = next + 1;
            time->slice_end_ns = time->now_ns + SIM_CUDA_SLICE_NS;
            return;
        }
    }
}

static int runs(const struct sim_cuda_clock *clock, const struct sim_cuda_lane *lane, uint32_t device) {
    if (lane->tenant == 0 || lane->done == lane->pushed || clock->tenants[lane->tenant - 1].device != device) {
        return 0;
    }
    return lane->items[lane->done % SIM_CUDA_ITEMS].copies || clock->devices[device].active == lane->tenant;
}

/* How long nothing ends. */
static uint64_t quiet(uint32_t device, const struct wanting *wanting) {
    struct sim_cuda_clock *clock = clock_();
    struct sim_cuda_time *time = &clock->devices[device];
    uint64_t least = UINT64_MAX;
    if (wanting->count > 1) {
        least = time->slice_end_ns - time->now_ns;
    }
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        struct sim_cuda_lane *lane = &clock->lanes[number];
        if (runs(clock, lane, device) && head_of(lane)->left_ns < least) {
            least = head_of(lane)->left_ns;
        }
    }
    return least;
}

static void finish(struct sim_cuda_clock *clock, struct sim_cuda_lane *lane, uint64_t now) {
    struct sim_cuda_item *head;
    while ((head = head_of(lane)) != NULL && head->left_ns == 0) {
        if (head->stamp != 0 && clock->stamps[head->stamp - 1].generation == head->generation) {
            __atomic_store_n(&clock->stamps[head->stamp - 1].at_ns, now + 1, __ATOMIC_RELEASE); /* never 0 */
        }
        lane->done++;
    }
}

uint64_t device_next(uint32_t device) {
    struct sim_cuda_time *time = &clock_()->devices[device];
    struct wanting wanting = look(device);
    choose(time, &wanting);
    uint64_t least = quiet(device, &wanting);
    return least == UINT64_MAX ? least : time->now_ns + least;
}

/* As NVML was seen to do where contexts take turns (H200, driver 580): all that was done in a period is put down to one of
 * the processes that worked in it, here to the one that did most. Nothing is said of the others. */
static void close_window(struct sim_cuda_clock *clock, uint32_t device) {
    struct sim_cuda_time *time = &clock->devices[device];
    struct sim_cuda_window *window = &time->windows[time->closed % SIM_CUDA_WINDOWS];
    uint64_t sum = 0, most = 0;
    *window = (struct sim_cuda_window){.end_ns = time->window_end_ns};
    for (uint32_t number = 0; number < clock->tenant_high; number++) {
        struct sim_cuda_tenant *tenant = &clock->tenants[number];
        if (tenant->state != 0 && tenant->device == device) {
            if (tenant->window_ns > most) {
                most = tenant->window_ns;
                window->tenant = number + 1;
            }
            sum += tenant->window_ns;
            tenant->window_ns = 0;
            tenant->percent = 0;
        }
    }
    window->percent = (uint32_t)(sum * 100 / SIM_CUDA_WINDOW_NS);
    if (window->tenant != 0) {
        clock->tenants[window->tenant - 1].percent = window->percent;
    }
    time->closed++;
    time->window_end_ns += SIM_CUDA_WINDOW_NS;
}

static void step(uint32_t device, uint64_t nanoseconds, int is_busy) {
    struct sim_cuda_clock *clock = clock_();
    struct sim_cuda_time *time = &clock->devices[device];
    time->now_ns += nanoseconds;
    if (is_busy) {
        struct sim_cuda_tenant *tenant = &clock->tenants[time->active - 1];
        tenant->busy_ns += nanoseconds;
        tenant->window_ns += nanoseconds;
        tenant->last_ns = time->now_ns;
    }
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        struct sim_cuda_lane *lane = &clock->lanes[number];
        if (runs(clock, lane, device)) {
            head_of(lane)->left_ns -= nanoseconds;
            finish(clock, lane, time->now_ns);
        }
    }
}

void device_advance(uint32_t device, uint64_t to) {
    struct sim_cuda_clock *clock = clock_();
    struct sim_cuda_time *time = &clock->devices[device];
    time->window_end_ns = time->window_end_ns == 0 ? SIM_CUDA_WINDOW_NS : time->window_end_ns;
    while (time->now_ns < to || device_next(device) <= to) {
        struct wanting wanting = look(device);
        choose(time, &wanting);
        uint64_t least = quiet(device, &wanting), left = to - time->now_ns;
        least = least < left ? least : left;
        if (time->window_end_ns - time->now_ns <= least) {
            least = time->window_end_ns - time->now_ns;
        }
        step(device, least, wanting.count > 0);
        if (time->now_ns == time->window_end_ns) {
            close_window(clock, device);
        }
    }
}
