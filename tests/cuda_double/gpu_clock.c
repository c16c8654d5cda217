/* The GPUs' clock, and what streams and events see of it. In virtual time it is moved on where all wait (gpu_tasks.c); on
 * the wall it just passes. */
#include "gpu_time.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct sim_cuda_clock *time_clock(void) {
    struct sim_cuda_machine *machine = state_map();
    return machine == NULL ? NULL : &machine->clock;
}

int time_on(void) {
    struct sim_cuda_clock *clock = time_clock();
    return clock != NULL && clock->mode != SIM_CUDA_CLOCK_OFF;
}

void time_lock(struct sim_cuda_clock *clock) {
    if (pthread_mutex_lock((pthread_mutex_t *)clock->lock) == EOWNERDEAD) {
        pthread_mutex_consistent((pthread_mutex_t *)clock->lock); /* each step leaves figures that can be gone on with */
    }
}

void time_unlock(struct sim_cuda_clock *clock) {
    pthread_mutex_unlock((pthread_mutex_t *)clock->lock);
}

static uint64_t wall(const struct sim_cuda_clock *clock) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec - clock->origin_ns) / 1000 * clock->permille;
}

uint64_t time_now(void) {
    struct sim_cuda_clock *clock = time_clock();
    return clock->mode == SIM_CUDA_CLOCK_VIRTUAL ? __atomic_load_n(&clock->now_ns, __ATOMIC_ACQUIRE) : wall(clock);
}

/* Lock held: all GPUs are at the instant that it is. Work of processes that were killed is gone. */
static void catch_up(struct sim_cuda_clock *clock) {
    uint64_t now = time_now();
    static uint64_t looked;
    if (clock->mode == SIM_CUDA_CLOCK_WALL && now - looked > 10000000u) {
        looked = now;
        for (uint32_t number = 0; number < clock->tenant_high; number++) {
            if (clock->tenants[number].state == 1 && !state_slot_lives(clock->tenants[number].slot)) {
                slot_ended(clock->tenants[number].slot);
            }
        }
    }
    for (uint32_t device = 0; device < state_map()->device_count; device++) {
        if (clock->devices[device].now_ns < now) {
            device_advance(device, now);
        }
    }
}

static void nap(uint64_t nanoseconds) {
    struct timespec limit = {.tv_sec = (time_t)(nanoseconds / 1000000000u), .tv_nsec = (long)(nanoseconds % 1000000000u)};
    nanosleep(&limit, NULL);
}

static void wait_lane(uint32_t lane, uint64_t target) {
    struct sim_cuda_clock *clock = time_clock();
    if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        time_pass_turn(clock, UINT64_MAX, lane, target);
        return;
    }
    for (;;) {
        time_lock(clock);
        catch_up(clock);
        int reached = clock->lanes[lane - 1].done >= target;
        time_unlock(clock);
        if (reached) {
            return;
        }
        nap(200000);
    }
}

/* --- streams and events ------------------------------------------------------------------------------------ */

void time_push(struct stream *stream, uint64_t nanoseconds, uint32_t stamp, int copies) {
    struct sim_cuda_clock *clock = time_clock();
    if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        time_join(clock);
    }
    time_lock(clock);
    catch_up(clock);
    if (stream->lane == 0) {
        stream->lane = lane_make(state_slot_number(), stream->base.device);
    }
    while (stream->lane != 0 && clock->lanes[stream->lane - 1].pushed - clock->lanes[stream->lane - 1].done == SIM_CUDA_ITEMS) {
        uint64_t target = clock->lanes[stream->lane - 1].done + 1;
        time_unlock(clock);
        wait_lane(stream->lane, target); /* as the driver: its queue is full */
        time_lock(clock);
    }
    if (stream->lane != 0) {
        struct sim_cuda_lane *lane = &clock->lanes[stream->lane - 1];
        lane->items[lane->pushed % SIM_CUDA_ITEMS] = (struct sim_cuda_item){
            .left_ns = nanoseconds, .stamp = stamp, .generation = stamp == 0 ? 0 : clock->stamps[stamp - 1].generation, .copies = (uint32_t)copies};
        lane->pushed++;
        if (nanoseconds == 0) {
            catch_up(clock);
            device_advance(stream->base.device, time_now()); /* at once, where nothing is before it */
        }
    }
    time_unlock(clock);
}

uint32_t time_stamp(uint32_t stamp) {
    struct sim_cuda_clock *clock = time_clock();
    time_lock(clock);
    for (uint32_t number = 0; number < SIM_CUDA_STAMPS && stamp == 0; number++) {
        if (!clock->stamps[number].taken) {
            clock->stamps[number].taken = 1;
            stamp = number + 1;
        }
    }
    if (stamp != 0) {
        clock->stamps[stamp - 1].generation++;
        clock->stamps[stamp - 1].at_ns = 0;
    }
    time_unlock(clock);
    return stamp;
}

void time_stamp_free(uint32_t stamp) {
    struct sim_cuda_clock *clock = time_clock();
    time_lock(clock);
    clock->stamps[stamp - 1].generation++;
    clock->stamps[stamp - 1].taken = 0;
    time_unlock(clock);
}

uint64_t time_stamped(uint32_t stamp) {
    struct sim_cuda_clock *clock = time_clock();
    time_lock(clock);
    catch_up(clock);
    uint64_t at = clock->stamps[stamp - 1].at_ns;
    time_unlock(clock);
    return at;
}

int time_idle(const struct stream *stream) {
    struct sim_cuda_clock *clock = time_clock();
    if (stream->lane == 0) {
        return 1;
    }
    time_lock(clock);
    catch_up(clock);
    int idle = clock->lanes[stream->lane - 1].done == clock->lanes[stream->lane - 1].pushed;
    time_unlock(clock);
    return idle;
}

/* A lane with work in it stays until its process ends. */
void time_stream_gone(const struct stream *stream) {
    struct sim_cuda_clock *clock = time_clock();
    if (stream->lane != 0) {
        time_lock(clock);
        if (clock->lanes[stream->lane - 1].done == clock->lanes[stream->lane - 1].pushed) {
            clock->lanes[stream->lane - 1].tenant = 0;
        }
        time_unlock(clock);
    }
}

void time_wait_stream(const struct stream *stream) {
    if (stream->lane != 0 && !time_idle(stream)) {
        wait_lane(stream->lane, time_clock()->lanes[stream->lane - 1].pushed);
    }
}

void time_wait_stamp(uint32_t stamp) {
    struct sim_cuda_clock *clock = time_clock();
    while (time_stamped(stamp) == 0) {
        /* In virtual time: until the next thing of the GPUs ends, whichever it is. */
        if (clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
            time_lock(clock);
            uint64_t next = UINT64_MAX;
            for (uint32_t device = 0; device < state_map()->device_count; device++) {
                uint64_t ends = device_next(device);
                next = ends < next ? ends : next;
            }
            time_unlock(clock);
            time_pass_turn(clock, next, 0, 0);
        } else {
            nap(200000);
        }
    }
}

void time_wait_device(uint32_t device) {
    struct sim_cuda_clock *clock = time_clock();
    for (uint32_t number = 0; number < clock->lane_high; number++) {
        const struct sim_cuda_tenant *tenant = &clock->tenants[(clock->lanes[number].tenant + SIM_CUDA_TENANTS - 1) % SIM_CUDA_TENANTS];
        if (clock->lanes[number].tenant != 0 && tenant->slot == state_slot_number() && tenant->device == device) {
            wait_lane(number + 1, clock->lanes[number].pushed);
        }
    }
}

/* --- for the clock of the enforcement library, and for programs that want to sleep in the GPUs' time ---------- */

EXPORT uint64_t gna_sim_now(void);
EXPORT void gna_sim_wait(const uint32_t *word, uint32_t seen, uint64_t until);

EXPORT uint64_t gna_sim_now(void) {
    return time_on() ? time_now() : now_ns();
}

/* Until the instant; on the wall also until the word is another one and its futex is woken. */
EXPORT void gna_sim_wait(const uint32_t *word, uint32_t seen, uint64_t until) {
    struct sim_cuda_clock *clock = time_clock();
    uint64_t now = gna_sim_now();
    if (time_on() && clock->mode == SIM_CUDA_CLOCK_VIRTUAL) {
        time_pass_turn(clock, until, 0, 0);
    } else if (until > now) {
        uint64_t left = time_on() ? (until - now) / clock->permille * 1000 : until - now;
        struct timespec limit = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
    }
}
