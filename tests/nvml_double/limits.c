/* Limits of a cgroup's memory on a GPU, as drivers have them from r615. Kept and reported; nothing enforces them. */
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_DRIVER 615

static struct sim_cuda_limit *find(int32_t number, const char *cgroup, int make) {
    struct sim_cuda_machine *machine = sim_cuda_machine();
    struct sim_cuda_limit *room = NULL;
    for (uint32_t place = 0; place < SIM_CUDA_LIMITS; place++) {
        struct sim_cuda_limit *limit = &machine->limits[place];
        if (limit->state && limit->device == (uint32_t)number && strcmp(limit->cgroup, cgroup) == 0) {
            return limit;
        }
        room = room == NULL && !limit->state ? limit : room;
    }
    if (room != NULL && make) {
        *room = (struct sim_cuda_limit){.device = (uint32_t)number};
        snprintf(room->cgroup, sizeof(room->cgroup), "%s", cgroup);
        return room;
    }
    return NULL;
}

/* What both calls refuse. */
static nvmlReturn_t check(const struct sim_gpu *gpu, const char *cgroup) {
    SIM_NEED(cgroup != NULL && strlen(cgroup) < sizeof(((struct sim_cuda_limit *)0)->cgroup));
    SIM_OFFERED(atoi(sim_machine()->driver_version) >= FIRST_DRIVER && !gpu->mig_mode && sim_cuda_gpu(gpu) >= 0);
    int folder = open(cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) {
        return NVML_ERROR_OPERATING_SYSTEM;
    }
    close(folder);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits) {
    SIM_NEED(limits != NULL);
    SIM_GPU(nvmlDeviceSetMemoryLimits);
    nvmlReturn_t refused = check(gpu, limits->nameSpace);
    if (refused != NVML_SUCCESS) {
        return refused;
    }
    if (geteuid() != 0) {
        return NVML_ERROR_NO_PERMISSION;
    }
    SIM_NEED(limits->softLimit <= limits->hardLimit && limits->softLimit <= gpu->memory_total);
    SIM_NEED(limits->hardLimit <= gpu->memory_total || limits->hardLimit == NVML_DEVICE_MEMORY_LIMIT_MAX);
    struct sim_cuda_limit *limit = find(sim_cuda_gpu(gpu), limits->nameSpace, 1);
    if (limit == NULL) {
        return NVML_ERROR_UNKNOWN;
    }
    limit->soft = limits->softLimit;
    limit->hard = limits->hardLimit;
    __atomic_store_n(&limit->state, !(limit->soft == 0 && limit->hard == NVML_DEVICE_MEMORY_LIMIT_MAX), __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

struct members {
    unsigned long long used;
    FILE *processes;
};

static void add_member(void *data, uint32_t pid, uint64_t bytes) {
    struct members *members = data;
    unsigned long member;
    rewind(members->processes);
    while (fscanf(members->processes, "%lu", &member) == 1) {
        if (member == pid) {
            members->used += bytes;
            return;
        }
    }
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits) {
    char path[1024];
    SIM_NEED(limits != NULL);
    SIM_GPU(nvmlDeviceGetMemoryLimits);
    nvmlReturn_t refused = check(gpu, limits->nameSpace);
    if (refused != NVML_SUCCESS) {
        return refused;
    }
    struct sim_cuda_limit *limit = find(sim_cuda_gpu(gpu), limits->nameSpace, 0);
    if (limit == NULL) {
        return NVML_ERROR_NOT_FOUND;
    }
    limits->softLimit = limit->soft;
    limits->hardLimit = limit->hard;
    snprintf(path, sizeof(path), "%s/cgroup.procs", limits->nameSpace);
    struct members members = {.processes = fopen(path, "re")};
    if (members.processes != NULL) {
        sim_cuda_each(sim_cuda_gpu(gpu), add_member, &members);
        fclose(members.processes);
    }
    limits->currentUsed = members.used;
    return NVML_SUCCESS;
}
