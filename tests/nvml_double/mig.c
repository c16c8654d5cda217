/* Instances of a GPU in MIG mode, each with a compute instance that takes all of it. */
#include "sim.h"

#include <string.h>

static struct nvmlDevice_st parts[SIM_MAX_GPUS][SIM_MAX_INSTANCES];

int32_t sim_part_slot(nvmlDevice_t device) {
    for (uint32_t slot = 0; slot < SIM_MAX_GPUS; slot++) {
        if (device >= parts[slot] && device < parts[slot] + SIM_MAX_INSTANCES) {
            return (int32_t)slot;
        }
    }
    return -1;
}

nvmlReturn_t sim_part(nvmlDevice_t device, struct sim_gpu *gpu, struct sim_instance **part) {
    int32_t slot = sim_part_slot(device);
    *part = slot < 0 ? NULL : &gpu->instances[device - parts[slot]];
    return *part != NULL && (!gpu->mig_mode || !(*part)->used) ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

int sim_part_named(const char *uuid, uint32_t slot, nvmlDevice_t *found) {
    struct sim_gpu *gpu = &sim_machine()->gpus[slot];
    for (uint32_t number = 0; gpu->mig_mode && number < SIM_MAX_INSTANCES; number++) {
        struct sim_instance *part = &gpu->instances[number];
        if (part->used && strncmp(part->uuid, uuid, sizeof(part->uuid)) == 0) {
            *found = &parts[slot][number];
            return 1;
        }
    }
    return 0;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    SIM_NEED(count != NULL);
    SIM_GPU(nvmlDeviceGetMaxMigDeviceCount);
    *count = gpu->mig_capable ? SIM_MAX_INSTANCES : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *found) {
    SIM_NEED(found != NULL && index < SIM_MAX_INSTANCES);
    SIM_GPU(nvmlDeviceGetMigDeviceHandleByIndex);
    SIM_OFFERED(gpu->mig_capable);
    if (!gpu->mig_mode || !gpu->instances[index].used) {
        return NVML_ERROR_NOT_FOUND;
    }
    *found = &parts[sim_slot(device)][index];
    return NVML_SUCCESS;
}

/* Instances are made by other means here, so that no GPU names a profile. */
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile, nvmlGpuInstanceProfileInfo_t *info) {
    (void)profile;
    SIM_NEED(info != NULL && sim_slot(device) >= 0);
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *found) {
    SIM_NEED(found != NULL && sim_part_slot(device) >= 0);
    SIM_GPU(nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
    *found = sim_handle((uint32_t)sim_part_slot(device));
    return gpu->mig_mode ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    SIM_NEED(is_mig != NULL);
    SIM_GPU(nvmlDeviceIsMigDeviceHandle);
    *is_mig = sim_part_slot(device) >= 0 && gpu->mig_mode;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    SIM_NEED(id != NULL);
    SIM_GPU(nvmlDeviceGetGpuInstanceId);
    SIM_PART();
    SIM_OFFERED(part != NULL);
    *id = part->gpu_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    SIM_NEED(id != NULL);
    SIM_GPU(nvmlDeviceGetComputeInstanceId);
    SIM_PART();
    SIM_OFFERED(part != NULL);
    *id = part->compute_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    SIM_NEED(attributes != NULL);
    SIM_GPU(nvmlDeviceGetAttributes);
    SIM_PART();
    SIM_OFFERED(part != NULL);
    memset(attributes, 0, sizeof(*attributes));
    attributes->multiprocessorCount = part->multiprocessors;
    attributes->sharedJpegCount = attributes->sharedOfaCount = part->media;
    attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount = part->slices;
    attributes->memorySizeMB = part->memory_total >> 20;
    return NVML_SUCCESS;
}
