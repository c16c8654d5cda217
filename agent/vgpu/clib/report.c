/* The answers of CUDA in the container: its cap as the size of the GPU, and of it what is left. */
#include "caps.h"

static uint64_t lesser(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* `*free` and `*total` are the driver's; they are made the container's. */
static void capped(int record, uint64_t *free, uint64_t *total) {
    uint64_t used, limit;
    gna_pools_settle();
    gna_charged(record, &used, &limit);
    *total = lesser(*total, limit);
    *free = lesser(*free, used < *total ? *total - used : 0);
}

HOOK(cuMemGetInfo_v2)(size_t *free, size_t *total) {
    size_t real_free = 0, real_total = 0;
    int record;
    CUresult result = REAL(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result != CUDA_SUCCESS || (result = gna_current_record(&record)) != CUDA_SUCCESS) {
        return result;
    }
    uint64_t now_free = real_free, now_total = real_total;
    capped(record, &now_free, &now_total);
    if (free != NULL) {
        *free = now_free;
    }
    if (total != NULL) {
        *total = now_total;
    }
    return result;
}

static unsigned narrow(uint64_t bytes) {
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes;
}

HOOK(cuMemGetInfo)(unsigned int *free, unsigned int *total) {
    size_t now_free, now_total;
    CUresult result = cuMemGetInfo_v2(&now_free, &now_total);
    if (result == CUDA_SUCCESS && free != NULL) {
        *free = narrow(now_free);
    }
    if (result == CUDA_SUCCESS && total != NULL) {
        *total = narrow(now_total);
    }
    return result;
}

static uint64_t cap_of(CUdevice device) {
    struct gna_limit limit;
    int record = gna_record_of(device);
    return record < 0 || !gna_limit_of((unsigned)record, &limit) ? 0 : limit.memory_bytes;
}

HOOK(cuDeviceTotalMem_v2)(size_t *bytes, CUdevice dev) {
    CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, dev);
    if (result == CUDA_SUCCESS) {
        *bytes = lesser(*bytes, cap_of(dev));
    }
    return result;
}

HOOK(cuDeviceTotalMem)(unsigned int *bytes, CUdevice dev) {
    size_t all;
    CUresult result = bytes == NULL ? CUDA_ERROR_INVALID_VALUE : cuDeviceTotalMem_v2(&all, dev);
    if (result == CUDA_SUCCESS) {
        *bytes = narrow(all);
    }
    return result;
}
