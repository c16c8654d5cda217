/* Making and destroying instances: profiles and places are in the shared state, written by Python. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

/* Handles: an instance's place in its GPU's table. A compute instance takes all of its GPU instance. */
struct nvmlGpuInstance_st {
    uint32_t slot;
};
struct nvmlComputeInstance_st {
    uint32_t slot;
};
static struct nvmlGpuInstance_st whole[SIM_MAX_GPUS][SIM_MAX_INSTANCES];
static struct nvmlComputeInstance_st computes[SIM_MAX_GPUS][SIM_MAX_INSTANCES];
static const uint32_t slices_of_kind[NVML_COMPUTE_INSTANCE_PROFILE_COUNT] = {1, 2, 3, 4, 7};

#define FIND(table, handle)                                                                                   \
    for (uint32_t slot = 0; slot < SIM_MAX_GPUS; slot++) {                                                     \
        if ((handle) >= (table)[slot] && (handle) < (table)[slot] + SIM_MAX_INSTANCES) {                       \
            *device = sim_handle(slot);                                                                        \
            return &sim_machine()->gpus[slot].instances[(handle) - (table)[slot]];                             \
        }                                                                                                      \
    }                                                                                                          \
    return NULL;

static struct sim_instance *instance_of(nvmlGpuInstance_t instance, nvmlDevice_t *device) {
    FIND(whole, instance)
}

static struct sim_instance *compute_of(nvmlComputeInstance_t compute, nvmlDevice_t *device) {
    FIND(computes, compute)
}

/* Declares `part`, `device` and `gpu` of an instance's handle, or returns from the function. */
#define SIM_INSTANCE(find, handle, name)                                 \
    nvmlDevice_t device = NULL;                                          \
    struct sim_instance *part = sim_ready() ? find(handle, &device) : NULL; \
    SIM_NEED(part != NULL);                                              \
    SIM_GPU(name);                                                       \
    SIM_NEED(gpu->mig_mode && (part->used || part->bare))

static void edit(void) {
    __atomic_add_fetch(&sim_machine()->sequence, 1, __ATOMIC_ACQ_REL);
}

int sim_busy(struct sim_gpu *gpu, uint32_t gpu_instance) {
    struct sim_machine *machine = sim_machine();
    for (uint32_t number = 0; number < machine->process_count; number++) {
        const struct sim_process *process = &machine->processes[number];
        if (process->slot == (uint32_t)(gpu - machine->gpus) &&
            (gpu_instance == 0 || process->gpu_instance == gpu_instance)) {
            return 1;
        }
    }
    return 0;
}

static struct sim_mig_profile *profile_of(struct sim_gpu *gpu, unsigned int number) {
    for (uint32_t at = 0; at < SIM_MAX_MIG_PROFILES; at++) {
        if (gpu->mig_profiles[at].slices && gpu->mig_profiles[at].number == number) {
            return &gpu->mig_profiles[at];
        }
    }
    return NULL;
}

static unsigned int there(const struct sim_gpu *gpu, unsigned int number) {
    unsigned int found = 0;
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        const struct sim_instance *part = &gpu->instances[at];
        found += (part->used || part->bare) && part->profile_number == number;
    }
    return found;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *status) {
    SIM_NEED(status != NULL && mode <= 1);
    SIM_GPU(nvmlDeviceSetMigMode);
    SIM_OFFERED(gpu->mig_capable);
    *status = NVML_SUCCESS;
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        if (gpu->instances[at].used || gpu->instances[at].bare) {
            *status = NVML_ERROR_IN_USE;
        }
    }
    if (sim_busy(gpu, 0)) {
        *status = NVML_ERROR_IN_USE;
    }
    edit();
    gpu->mig_pending = mode; /* what cannot be now comes with the next reset */
    if (*status == NVML_SUCCESS) {
        gpu->mig_mode = mode;
    }
    edit();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int kind,
                                                  nvmlGpuInstanceProfileInfo_v2_t *info) {
    SIM_NEED(info != NULL && kind < NVML_GPU_INSTANCE_PROFILE_COUNT);
    SIM_GPU(nvmlDeviceGetGpuInstanceProfileInfo);
    SIM_OFFERED(gpu->mig_capable);
    for (uint32_t at = 0; at < SIM_MAX_MIG_PROFILES; at++) {
        const struct sim_mig_profile *profile = &gpu->mig_profiles[at];
        if (profile->slices && profile->kind == kind) {
            info->id = profile->number;
            info->isP2pSupported = 0;
            info->sliceCount = profile->slices;
            info->instanceCount = profile->most;
            info->multiprocessorCount = profile->multiprocessors;
            info->copyEngineCount = profile->slices;
            info->decoderCount = info->encoderCount = 0;
            info->jpegCount = info->ofaCount = profile->media;
            info->memorySizeMB = profile->memory_total >> 20;
            snprintf(info->name, sizeof(info->name), "MIG %.32s", profile->name);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int number,
                                                           nvmlGpuInstancePlacement_t *places, unsigned int *count) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetGpuInstancePossiblePlacements);
    SIM_OFFERED(gpu->mig_mode);
    const struct sim_mig_profile *profile = profile_of(gpu, number);
    SIM_NEED(profile != NULL);
    *count = 0;
    for (uint32_t start = 0; start < 8; start++) {
        if (profile->starts >> start & 1) {
            if (places != NULL) {
                places[*count].start = start;
                places[*count].size = profile->eighths;
            }
            ++*count;
        }
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int number, unsigned int *count) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetGpuInstancePossiblePlacements);
    SIM_OFFERED(gpu->mig_mode);
    const struct sim_mig_profile *profile = profile_of(gpu, number);
    SIM_NEED(profile != NULL);
    uint32_t taken = 0;
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        const struct sim_instance *part = &gpu->instances[at];
        taken |= part->used || part->bare ? ((1u << part->eighths) - 1) << part->start : 0;
    }
    unsigned int room = 0;
    for (uint32_t start = 0; start < 8; start++) {
        uint32_t span = ((1u << profile->eighths) - 1) << start;
        if (profile->starts >> start & 1 && !(taken & span)) {
            taken |= span;
            room++;
        }
    }
    unsigned int alike = there(gpu, number), left = profile->most > alike ? profile->most - alike : 0;
    *count = room < left ? room : left;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int number, nvmlGpuInstance_t *found,
                                       unsigned int *count) {
    SIM_NEED(count != NULL && found != NULL);
    SIM_GPU(nvmlDeviceGetGpuInstances);
    SIM_OFFERED(gpu->mig_mode);
    SIM_NEED(profile_of(gpu, number) != NULL);
    *count = 0;
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        const struct sim_instance *part = &gpu->instances[at];
        if ((part->used || part->bare) && part->profile_number == number) {
            found[(*count)++] = &whole[sim_slot(device)][at];
        }
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *found) {
    SIM_NEED(found != NULL);
    SIM_GPU(nvmlDeviceGetGpuInstanceById);
    SIM_OFFERED(gpu->mig_mode);
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        const struct sim_instance *part = &gpu->instances[at];
        if ((part->used || part->bare) && part->gpu_instance == id) {
            *found = &whole[sim_slot(device)][at];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

/* As the driver does, the same again for one that is made again at its place. */
static void name(struct sim_gpu *gpu, struct sim_instance *part) {
    char text[sizeof(part->uuid)];
    snprintf(text, sizeof(text), "MIG-%.34s%02x", gpu->uuid + 4, part->gpu_instance & 0xFF);
    memcpy(part->uuid, text, sizeof(part->uuid));
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int number,
                                                      const nvmlGpuInstancePlacement_t *place,
                                                      nvmlGpuInstance_t *made) {
    SIM_NEED(place != NULL && made != NULL);
    SIM_GPU(nvmlDeviceCreateGpuInstanceWithPlacement);
    SIM_OFFERED(gpu->mig_mode);
    const struct sim_mig_profile *profile = profile_of(gpu, number);
    SIM_NEED(profile != NULL && place->start < 8 && profile->starts >> place->start & 1);
    uint32_t taken = 0, numbers = 1, slices = profile->slices, free = SIM_MAX_INSTANCES;
    for (uint32_t at = 0; at < SIM_MAX_INSTANCES; at++) {
        const struct sim_instance *part = &gpu->instances[at];
        if (part->used || part->bare) {
            taken |= ((1u << part->eighths) - 1) << part->start;
            numbers |= 1u << part->gpu_instance;
            slices += part->slices;
        } else if (free == SIM_MAX_INSTANCES) {
            free = at;
        }
    }
    if (free == SIM_MAX_INSTANCES || slices > 7 || there(gpu, number) >= profile->most ||
        taken & ((1u << profile->eighths) - 1) << place->start) {
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    }
    struct sim_instance *part = &gpu->instances[free];
    edit();
    part->gpu_instance = (uint32_t)__builtin_ctz(~numbers);
    part->compute_instance = 0;
    part->slices = profile->slices;
    part->start = place->start;
    part->eighths = profile->eighths;
    part->multiprocessors = profile->multiprocessors;
    part->media = profile->media;
    part->profile_number = number;
    part->memory_total = profile->memory_total;
    part->memory_used = 0;
    memcpy(part->profile, profile->name, sizeof(part->profile));
    name(gpu, part);
    part->bare = 1;
    edit();
    *made = &whole[sim_slot(device)][free];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance) {
    SIM_INSTANCE(instance_of, instance, nvmlGpuInstanceDestroy);
    if (part->used) {
        return NVML_ERROR_IN_USE;
    }
    edit();
    part->bare = 0;
    edit();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info) {
    SIM_NEED(info != NULL);
    SIM_INSTANCE(instance_of, instance, nvmlGpuInstanceGetInfo);
    info->device = device;
    info->id = part->gpu_instance;
    info->profileId = part->profile_number;
    info->placement.start = part->start;
    info->placement.size = part->eighths;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int kind,
                                                           unsigned int engines,
                                                           nvmlComputeInstanceProfileInfo_v2_t *info) {
    SIM_NEED(info != NULL && kind < NVML_COMPUTE_INSTANCE_PROFILE_COUNT && engines == 0);
    SIM_INSTANCE(instance_of, instance, nvmlGpuInstanceGetComputeInstanceProfileInfo);
    uint32_t slices = slices_of_kind[kind];
    SIM_OFFERED(slices && slices <= part->slices);
    uint32_t version = info->version;
    memset(info, 0, sizeof(*info));
    info->version = version;
    info->id = kind;
    info->sliceCount = slices;
    info->instanceCount = part->slices / slices;
    info->multiprocessorCount = part->multiprocessors / part->slices * slices;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int kind,
                                                nvmlComputeInstance_t *found, unsigned int *count) {
    SIM_NEED(found != NULL && count != NULL && kind < NVML_COMPUTE_INSTANCE_PROFILE_COUNT);
    SIM_INSTANCE(instance_of, instance, nvmlGpuInstanceGetComputeInstances);
    *count = 0;
    if (part->used && slices_of_kind[kind] == part->slices) {
        found[(*count)++] = &computes[sim_slot(device)][part - gpu->instances];
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int kind,
                                                  nvmlComputeInstance_t *made) {
    SIM_NEED(made != NULL && kind < NVML_COMPUTE_INSTANCE_PROFILE_COUNT);
    SIM_INSTANCE(instance_of, instance, nvmlGpuInstanceCreateComputeInstance);
    SIM_OFFERED(slices_of_kind[kind] == part->slices);
    if (part->used) {
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    }
    edit();
    part->used = 1;
    part->bare = 0;
    edit();
    *made = &computes[sim_slot(device)][part - gpu->instances];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t compute) {
    SIM_INSTANCE(compute_of, compute, nvmlComputeInstanceDestroy);
    SIM_NEED(part->used);
    if (sim_busy(gpu, part->gpu_instance)) {
        return NVML_ERROR_IN_USE;
    }
    edit();
    part->bare = 1;
    part->used = 0;
    edit();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info) {
    SIM_NEED(info != NULL);
    SIM_INSTANCE(compute_of, compute, nvmlComputeInstanceGetInfo);
    info->device = device;
    info->gpuInstance = &whole[sim_slot(device)][part - gpu->instances];
    info->id = part->compute_instance;
    for (uint32_t kind = 0; kind < NVML_COMPUTE_INSTANCE_PROFILE_COUNT; kind++) {
        if (slices_of_kind[kind] == part->slices) {
            info->profileId = kind;
        }
    }
    info->placement.start = 0;
    info->placement.size = part->slices;
    return NVML_SUCCESS;
}
