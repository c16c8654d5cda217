/* The CUDA double's file: whose memory is whose. It is only read here, but for the limits of cgroups. */
#define _GNU_SOURCE
#include "sim.h"

#include "living.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_cuda_machine *mapped;
static char mapped_path[512];
/* Stays open: to close any descriptor of the file drops the record locks of a CUDA double in this process. */
static int file = -1;

struct sim_cuda_machine *sim_cuda_machine(void) {
    const char *path = getenv(SIM_CUDA_STATE_VARIABLE);
    if (path == NULL || strlen(path) >= sizeof(mapped_path)) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    if (mapped == NULL || strcmp(path, mapped_path) != 0) {
        struct stat about;
        int descriptor = open(path, O_RDWR | O_CLOEXEC);
        if (descriptor >= 0 && fstat(descriptor, &about) == 0 && (size_t)about.st_size == sizeof(*mapped)) {
            struct sim_cuda_machine *found = mmap(NULL, sizeof(*found), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
            if (found != MAP_FAILED && found->magic == SIM_CUDA_MAGIC && found->version == SIM_CUDA_VERSION) {
                mapped = found;
                file = descriptor;
                strcpy(mapped_path, path);
            }
        }
    }
    struct sim_cuda_machine *machine = mapped != NULL && strcmp(path, mapped_path) == 0 ? mapped : NULL;
    pthread_mutex_unlock(&lock);
    return machine;
}

int32_t sim_cuda_gpu(const struct sim_gpu *gpu) {
    struct sim_cuda_machine *machine = sim_cuda_machine();
    for (uint32_t number = 0; machine != NULL && number < machine->device_count; number++) {
        if (strncmp(machine->devices[number].uuid, gpu->uuid, sizeof(gpu->uuid)) == 0) {
            return (int32_t)number;
        }
    }
    return -1;
}

/* The first living holder of shared memory, if that is not the one that it is counted for. */
static uint32_t heir(const struct sim_cuda_machine *machine, const struct sim_cuda_shared *entry) {
    for (uint32_t holder = 0; holder < SIM_CUDA_HOLDERS && entry->holders[holder] != 0; holder++) {
        if (cuda_slot_holder(machine, file, entry->holders[holder] - 1) != 0) {
            return holder > 0 ? entry->holders[holder] : 0;
        }
    }
    return 0;
}

void sim_cuda_each(int32_t number, void (*visit)(void *data, uint32_t pid, uint64_t bytes), void *data) {
    struct sim_cuda_machine *machine = sim_cuda_machine();
    if (machine == NULL || number < 0) {
        return;
    }
    uint32_t high = __atomic_load_n(&machine->slot_high, __ATOMIC_ACQUIRE);
    for (uint32_t slot = 0; slot < high && slot < SIM_CUDA_SLOTS; slot++) {
        uint64_t bytes = 0;
        uint32_t pid = machine->slots[slot].state ? cuda_slot_holder(machine, file, slot) : 0;
        for (uint32_t kind = 0; pid != 0 && kind < SIM_CUDA_KINDS; kind++) {
            bytes += machine->slots[slot].uses[number].bytes[kind];
        }
        for (uint32_t entry = 0; pid != 0 && entry < SIM_CUDA_SHARED; entry++) {
            const struct sim_cuda_shared *shared = &machine->shared[entry];
            if (shared->state && shared->device == (uint32_t)number && heir(machine, shared) == slot + 1) {
                bytes += shared->bytes;
            }
        }
        if (bytes > 0) {
            visit(data, pid, bytes);
        }
    }
}

static uint64_t clock_us(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000;
}

/* As the driver does: of each process the mean over all periods after `since_us`, those that were put down to others or
 * to nobody among them, with the time stamp of the last one that was its own. */
void sim_cuda_work(int32_t number, uint64_t since_us, void (*visit)(void *data, uint32_t pid, uint32_t percent, uint64_t sampled_us),
                   void *data) {
    const struct sim_cuda_machine *machine = sim_cuda_machine();
    if (machine == NULL || number < 0 || machine->clock.mode != SIM_CUDA_CLOCK_WALL) {
        return;
    }
    const struct sim_cuda_clock *clock = &machine->clock;
    const struct sim_cuda_time *time = &clock->devices[number];
    uint64_t behind = clock_us(CLOCK_REALTIME) - clock_us(CLOCK_MONOTONIC);
    uint32_t sums[SIM_CUDA_TENANTS] = {0}, periods = 0;
    uint64_t newest[SIM_CUDA_TENANTS] = {0};
    for (uint32_t place = 0; place < time->closed && place < SIM_CUDA_WINDOWS; place++) {
        const struct sim_cuda_window *window = &time->windows[place];
        uint64_t at = (clock->origin_ns / 1000 + window->end_ns / clock->permille + behind) / 10000 * 10000; /* the two clocks are not read at once */
        if (at <= since_us) {
            continue;
        }
        periods++;
        if (window->tenant > 0 && window->tenant <= SIM_CUDA_TENANTS) {
            sums[window->tenant - 1] += window->percent;
            newest[window->tenant - 1] = at > newest[window->tenant - 1] ? at : newest[window->tenant - 1];
        }
    }
    for (uint32_t place = 0; place < clock->tenant_high && place < SIM_CUDA_TENANTS; place++) {
        const struct sim_cuda_tenant *tenant = &clock->tenants[place];
        uint32_t pid = tenant->state == 1 && sums[place] >= periods && periods > 0 ? cuda_slot_holder(machine, file, tenant->slot) : 0;
        if (pid != 0) {
            visit(data, pid, sums[place] / periods, newest[place]);
        }
    }
}

static void sum(void *data, uint32_t pid, uint64_t bytes) {
    (void)pid;
    *(uint64_t *)data += bytes;
}

uint64_t sim_cuda_used(int32_t number) {
    uint64_t used = 0;
    sim_cuda_each(number, sum, &used);
    return used;
}
