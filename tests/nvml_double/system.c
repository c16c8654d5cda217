/* The system, and finding GPUs. */
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED:
        return "GPU requires reset";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    default:
        return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    SIM_GATE(nvmlSystemGetDriverVersion);
    return sim_copy(sim_machine()->driver_version, sizeof(sim_machine()->driver_version), version, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    SIM_GATE(nvmlSystemGetNVMLVersion);
    return sim_copy(sim_machine()->nvml_version, sizeof(sim_machine()->nvml_version), version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    SIM_NEED(version != NULL);
    SIM_GATE(nvmlSystemGetCudaDriverVersion);
    *version = (int)sim_machine()->cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    uint32_t order[SIM_MAX_GPUS];
    SIM_NEED(count != NULL);
    SIM_GATE(nvmlDeviceGetCount);
    *count = sim_enumerate(sim_machine(), order);
    return NVML_SUCCESS;
}

/* A lookup: `slot` is the GPU, or -1 where there is none, which NVML answers with `missing`. */
static nvmlReturn_t look_up(enum sim_call call, int32_t slot, nvmlReturn_t missing, nvmlDevice_t *found) {
    struct sim_machine *machine = sim_machine();
    nvmlReturn_t struck = sim_strike(machine, call, slot);
    if (struck != NVML_SUCCESS) {
        return struck;
    }
    if (slot < 0) {
        return missing;
    }
    if (!sim_present(machine, (uint32_t)slot)) {
        return NVML_ERROR_GPU_IS_LOST;
    }
    *found = sim_handle((uint32_t)slot);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *found) {
    uint32_t order[SIM_MAX_GPUS];
    SIM_NEED(found != NULL);
    if (!sim_ready()) {
        return NVML_ERROR_UNINITIALIZED;
    }
    int32_t slot = index < sim_enumerate(sim_machine(), order) ? (int32_t)order[index] : -1;
    return look_up(SIM_nvmlDeviceGetHandleByIndex, slot, NVML_ERROR_INVALID_ARGUMENT, found);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *found) {
    uint32_t order[SIM_MAX_GPUS];
    nvmlDevice_t part = NULL;
    int32_t slot = -1;
    int lost = 0;
    SIM_NEED(uuid != NULL && found != NULL);
    if (!sim_ready()) {
        return NVML_ERROR_UNINITIALIZED;
    }
    struct sim_machine *machine = sim_machine();
    uint32_t count = sim_enumerate(machine, order);
    for (uint32_t index = 0; index < count; index++) {
        struct sim_gpu *gpu = &machine->gpus[order[index]];
        lost |= !sim_present(machine, order[index]);
        if (strncmp(gpu->uuid, uuid, sizeof(gpu->uuid)) == 0 || sim_part_named(uuid, order[index], &part)) {
            slot = (int32_t)order[index];
        }
    }
    lost = lost && machine->lost_breaks_uuid_lookup; /* the search asks every GPU: see nvml.h */
    nvmlReturn_t missing = lost ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_NOT_FOUND;
    nvmlReturn_t result = look_up(SIM_nvmlDeviceGetHandleByUUID, slot, missing, found);
    if (result == NVML_SUCCESS && part != NULL) {
        *found = part;
    }
    return result == NVML_SUCCESS && lost ? NVML_ERROR_GPU_IS_LOST : result;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *found) {
    uint32_t order[SIM_MAX_GPUS];
    unsigned int domain, bus, device;
    int32_t slot = -1;
    SIM_NEED(bus_id != NULL && found != NULL);
    SIM_NEED(sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) == 3);
    if (!sim_ready()) {
        return NVML_ERROR_UNINITIALIZED;
    }
    struct sim_machine *machine = sim_machine();
    uint32_t count = sim_enumerate(machine, order);
    for (uint32_t index = 0; index < count; index++) {
        struct sim_gpu *gpu = &machine->gpus[order[index]];
        if (gpu->domain == domain && gpu->bus == bus && gpu->device == device) {
            slot = (int32_t)order[index];
        }
    }
    return look_up(SIM_nvmlDeviceGetHandleByPciBusId, slot, NVML_ERROR_NOT_FOUND, found);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level) {
    SIM_NEED(level != NULL && sim_slot(other) >= 0);
    SIM_GPU(nvmlDeviceGetTopologyCommonAncestor);
    if (!sim_present(sim_machine(), (uint32_t)sim_slot(other))) {
        return NVML_ERROR_GPU_IS_LOST;
    }
    *level = (nvmlGpuTopologyLevel_t)gpu->ancestor[sim_slot(other)];
    return NVML_SUCCESS;
}
