/* Who a GPU is. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    SIM_GPU(nvmlDeviceGetUUID);
    SIM_PART();
    return part != NULL ? sim_copy(part->uuid, sizeof(part->uuid), uuid, length) : sim_copy(gpu->uuid, sizeof(gpu->uuid), uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    SIM_GPU(nvmlDeviceGetName);
    SIM_PART();
    if (part != NULL) {
        char whole[128];
        snprintf(whole, sizeof(whole), "%.63s MIG %.31s", gpu->name, part->profile);
        return sim_copy(whole, sizeof(whole), name, length);
    }
    return sim_copy(gpu->name, sizeof(gpu->name), name, length);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    SIM_GPU(nvmlDeviceGetSerial);
    return sim_copy(gpu->serial, sizeof(gpu->serial), serial, length);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    SIM_NEED(minor != NULL);
    SIM_GPU(nvmlDeviceGetMinorNumber);
    *minor = gpu->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    uint32_t order[SIM_MAX_GPUS];
    SIM_NEED(index != NULL);
    SIM_GPU(nvmlDeviceGetIndex);
    uint32_t count = sim_enumerate(sim_machine(), order);
    for (*index = 0; *index < count; ++*index) {
        if (&sim_machine()->gpus[order[*index]] == gpu) {
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    SIM_NEED(pci != NULL);
    SIM_GPU(nvmlDeviceGetPciInfo);
    sim_pci(pci, gpu->domain, gpu->bus, gpu->device, gpu->pci_device_id, gpu->pci_subsystem_id);
    return NVML_SUCCESS;
}

struct memory {
    uint64_t total, reserved, used;
};

static struct memory read_memory(struct sim_gpu *gpu, const struct sim_instance *part) {
    struct memory memory;
    if (part != NULL) {
        return (struct memory){part->memory_total, 0, part->memory_used};
    }
    unsigned tries = 0;
    uint32_t begun;
    do {
        begun = sim_begin(sim_machine());
        memory = (struct memory){gpu->memory_total, gpu->memory_reserved, gpu->memory_used};
    } while (sim_torn(sim_machine(), begun, &tries));
    memory.used += sim_cuda_used(sim_cuda_gpu(gpu));
    uint64_t room = memory.total - memory.reserved;
    memory.used = memory.used < room ? memory.used : room; /* the two doubles may have been made with different sizes */
    return memory;
}

/* The older answer counts what the driver keeps as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info) {
    SIM_NEED(info != NULL);
    SIM_GPU(nvmlDeviceGetMemoryInfo);
    SIM_PART();
    struct memory memory = read_memory(gpu, part);
    info->total = memory.total;
    info->used = memory.used + memory.reserved;
    info->free = memory.total - info->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info) {
    SIM_NEED(info != NULL);
    if (info->version != nvmlMemory_v2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    SIM_GPU(nvmlDeviceGetMemoryInfo);
    SIM_PART();
    struct memory memory = read_memory(gpu, part);
    info->total = memory.total;
    info->reserved = memory.reserved;
    info->used = memory.used;
    info->free = memory.total - memory.reserved - memory.used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    SIM_NEED(major != NULL && minor != NULL);
    SIM_GPU(nvmlDeviceGetCudaComputeCapability);
    *major = (int)gpu->cc_major;
    *minor = (int)gpu->cc_minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture) {
    SIM_NEED(architecture != NULL);
    SIM_GPU(nvmlDeviceGetArchitecture);
    *architecture = gpu->architecture;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand) {
    SIM_NEED(brand != NULL);
    SIM_GPU(nvmlDeviceGetBrand);
    *brand = (nvmlBrandType_t)gpu->brand;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
    SIM_NEED(mode != NULL);
    SIM_GPU(nvmlDeviceGetPersistenceMode);
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode) {
    SIM_NEED(mode != NULL);
    SIM_GPU(nvmlDeviceGetComputeMode);
    *mode = (nvmlComputeMode_t)__atomic_load_n(&gpu->compute_mode, __ATOMIC_ACQUIRE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode) {
    SIM_NEED(mode < NVML_COMPUTEMODE_COUNT);
    SIM_GPU(nvmlDeviceSetComputeMode);
    SIM_OFFERED(mode != NVML_COMPUTEMODE_EXCLUSIVE_THREAD); /* dropped by the driver long ago */
    SIM_OFFERED(!gpu->mig_mode);
    __atomic_store_n(&gpu->compute_mode, (uint32_t)mode, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    SIM_NEED(current != NULL && pending != NULL);
    SIM_GPU(nvmlDeviceGetMigMode);
    SIM_OFFERED(gpu->mig_capable);
    *current = gpu->mig_mode;
    *pending = gpu->mig_pending;
    return NVML_SUCCESS;
}
