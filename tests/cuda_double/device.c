/* The GPUs that this process sees, and who they are. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t visible[SIM_CUDA_DEVICES];
static uint32_t visible_count;

static int32_t named(const char *name) {
    char *end;
    long number = strtol(name, &end, 10);
    if (*name != '\0' && *end == '\0') {
        return number >= 0 && number < (long)cuda_machine->device_count ? (int32_t)number : -1;
    }
    for (uint32_t index = 0; *name != '\0' && index < cuda_machine->device_count; index++) {
        if (strncmp(cuda_machine->devices[index].uuid, name, strlen(name)) == 0) {
            return (int32_t)index;
        }
    }
    return -1;
}

/* As the driver reads it: a list of indexes or (beginnings of) UUIDs, which ends at the first unknown one. */
CUresult devices_find(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    char copy[1024], *rest = copy, *name;
    visible_count = 0;
    if (text == NULL) {
        for (uint32_t index = 0; index < cuda_machine->device_count; index++) {
            visible[visible_count++] = index;
        }
    } else {
        snprintf(copy, sizeof(copy), "%s", text);
        while ((name = strsep(&rest, ",")) != NULL && visible_count < SIM_CUDA_DEVICES) {
            int32_t index = named(name);
            if (index < 0) {
                break;
            }
            visible[visible_count++] = (uint32_t)index;
        }
    }
    return visible_count == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

uint32_t devices_count(void) {
    return visible_count;
}

CUresult device_index(CUdevice device, uint32_t *index) {
    if (device < 0 || (uint32_t)device >= visible_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *index = visible[device];
    return CUDA_SUCCESS;
}

CUdevice device_ordinal(uint32_t index) {
    for (uint32_t ordinal = 0; ordinal < visible_count; ordinal++) {
        if (visible[ordinal] == index) {
            return (CUdevice)ordinal;
        }
    }
    return -1;
}

CUresult location_index(const CUmemLocation *location, uint32_t *index, int *on_device) {
    *on_device = 1;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return device_index(location->id, index);
    }
#if CUDA_VERSION >= 12020
    if (location->type == CU_MEM_LOCATION_TYPE_HOST || location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
        location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
        *on_device = 0;
        *index = 0;
        return CUDA_SUCCESS;
    }
#endif
#ifdef HAVE_cuLogicalEndpointCreate /* the release that brought locality domains */
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN) {
        return device_index(location->localized.deviceId, index);
    }
#endif
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult model_cuDriverGetVersion(int *driverVersion) {
    NEED(driverVersion != NULL);
    *driverVersion = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetCount(int *count) {
    NEED(count != NULL);
    *count = (int)visible_count;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGet(CUdevice *device, int ordinal) {
    uint32_t index;
    NEED(device != NULL);
    TRY(device_index(ordinal, &index));
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetName(char *name, int len, CUdevice dev) {
    uint32_t index;
    NEED(name != NULL && len > 0);
    TRY(device_index(dev, &index));
    snprintf(name, (size_t)len, "%s", cuda_machine->devices[index].name);
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    uint32_t index;
    NEED(bytes != NULL);
    TRY(device_index(dev, &index));
    *bytes = cuda_machine->devices[index].total;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    size_t total;
    NEED(bytes != NULL);
    TRY(model_cuDeviceTotalMem_v2(&total, dev));
    *bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned int)total;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
    uint32_t index;
    NEED(uuid != NULL);
    TRY(device_index(dev, &index));
    const char *text = strchr(cuda_machine->devices[index].uuid, '-'); /* after "GPU" */
    for (int byte = 0; byte < 16; byte++) {
        unsigned int value = 0;
        while (text != NULL && *text == '-') {
            text++;
        }
        NEED(text != NULL && sscanf(text, "%2x", &value) == 1);
        uuid->bytes[byte] = (char)value;
        text += 2;
    }
    return CUDA_SUCCESS;
}

#ifdef HAVE_cuDeviceGetUuid_v2
CUresult model_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
    return model_cuDeviceGetUuid(uuid, dev);
}
#endif

CUresult model_cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    uint32_t index;
    NEED(pciBusId != NULL && len > 0);
    TRY(device_index(dev, &index));
    snprintf(pciBusId, (size_t)len, "%s", cuda_machine->devices[index].bus_id);
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId) {
    NEED(dev != NULL && pciBusId != NULL);
    for (uint32_t ordinal = 0; ordinal < visible_count; ordinal++) {
        if (strcasecmp(cuda_machine->devices[visible[ordinal]].bus_id, pciBusId) == 0) {
            *dev = (CUdevice)ordinal;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult model_cuDeviceComputeCapability(int *major, int *minor, CUdevice dev) {
    uint32_t index;
    NEED(major != NULL && minor != NULL);
    TRY(device_index(dev, &index));
    *major = (int)cuda_machine->devices[index].cc_major;
    *minor = (int)cuda_machine->devices[index].cc_minor;
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    uint32_t index;
    NEED(pi != NULL);
    TRY(device_index(dev, &index));
    const struct sim_cuda_device *device = &cuda_machine->devices[index];
    switch ((int)attrib) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *pi = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *pi = 2048;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *pi = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *pi = (int)device->processors;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *pi = (int)device->cc_major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *pi = (int)device->cc_minor;
        break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *pi = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
        *pi = (int)device->unified;
        break;
    default:
        *pi = 0;
    }
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetProperties(CUdevprop *prop, CUdevice dev) {
    uint32_t index;
    NEED(prop != NULL);
    TRY(device_index(dev, &index));
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {INT32_MAX, 65535, 65535},
                        .sharedMemPerBlock = 49152, .totalConstantMemory = 65536, .SIMDWidth = 32, .memPitch = INT32_MAX,
                        .regsPerBlock = 65536, .clockRate = 1980000, .textureAlign = 512};
    return CUDA_SUCCESS;
}
