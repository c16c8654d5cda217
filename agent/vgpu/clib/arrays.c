/* CUDA arrays: an estimate, since the driver says what one needs only where its memory is mapped later
 * (cuArrayGetMemoryRequirements: "not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING": invalid value). */
#include "caps.h"

/* Bytes of one channel of a format; where it is not known, the largest. Block-compressed formats have less than one
 * byte per texel and count as one. */
static uint64_t channel_bytes(unsigned format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    default: return 4;
    }
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX / 8 : product;
}

static uint64_t estimate(unsigned format, unsigned channels, uint64_t width, uint64_t height, uint64_t depth, unsigned levels) {
    uint64_t texel = channel_bytes(format) * (channels == 0 ? 1 : channels);
    uint64_t bytes = times(times(times(texel, width), height == 0 ? 1 : height), depth == 0 ? 1 : depth);
    if (bytes > UINT64_MAX / 8) {
        return UINT64_MAX / 8;
    }
    return levels > 1 ? bytes + bytes / 2 : bytes; /* all levels of a cube: 4/3, of a plane, and 8/7 of a solid */
}

/* Sparse and deferred arrays have no memory until some is mapped, and that is charged by cuMemCreate. */
static bool has_memory(const CUDA_ARRAY3D_DESCRIPTOR *array) {
    return !(array->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
}

static CUresult destroy(enum gna_kind kind, uint64_t handle) {
    return kind == GNA_ARRAY ? REAL(cuArrayDestroy)((CUarray)(uintptr_t)handle)
                             : REAL(cuMipmappedArrayDestroy)((CUmipmappedArray)(uintptr_t)handle);
}

static CUresult settle(CUresult result, enum gna_kind kind, int record, uint64_t charged, uint64_t handle) {
    CUcontext context = NULL;
    if (result != CUDA_SUCCESS) {
        gna_discharge(GNA_ARRAY, record, charged);
        return result;
    }
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = kind, .key = handle, .bytes = charged, .record = record, .other = (uintptr_t)context};
    if (!gna_put(&entry)) {
        destroy(kind, handle);
        gna_discharge(GNA_ARRAY, record, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

#define CREATE(symbol, kind, estimated, pHandle, ...)                              \
    int record;                                                                    \
    CUresult result = gna_current_record(&record);                                 \
    if (result != CUDA_SUCCESS) {                                                  \
        return result;                                                             \
    }                                                                              \
    uint64_t charged = estimated;                                                  \
    if (gna_charge(GNA_ARRAY, record, charged) != CUDA_SUCCESS) {                  \
        return CUDA_ERROR_OUT_OF_MEMORY;                                           \
    }                                                                              \
    result = REAL(symbol)(__VA_ARGS__);                                            \
    return settle(result, kind, record, charged, result == CUDA_SUCCESS ? (uintptr_t)*(pHandle) : 0)

HOOK(cuArrayCreate_v2)(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray) {
    const CUDA_ARRAY_DESCRIPTOR *array = pAllocateArray;
    if (pHandle == NULL || array == NULL) {
        return REAL(cuArrayCreate_v2)(pHandle, pAllocateArray);
    }
    CREATE(cuArrayCreate_v2, GNA_ARRAY, estimate(array->Format, array->NumChannels, array->Width, array->Height, 1, 1), pHandle, pHandle,
           pAllocateArray);
}

HOOK(cuArrayCreate)(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray) {
    const CUDA_ARRAY_DESCRIPTOR_v1 *array = pAllocateArray;
    if (pHandle == NULL || array == NULL) {
        return REAL(cuArrayCreate)(pHandle, pAllocateArray);
    }
    CREATE(cuArrayCreate, GNA_ARRAY, estimate(array->Format, array->NumChannels, array->Width, array->Height, 1, 1), pHandle, pHandle,
           pAllocateArray);
}

HOOK(cuArray3DCreate_v2)(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray) {
    const CUDA_ARRAY3D_DESCRIPTOR *array = pAllocateArray;
    if (pHandle == NULL || array == NULL || !has_memory(array)) {
        return REAL(cuArray3DCreate_v2)(pHandle, pAllocateArray);
    }
    CREATE(cuArray3DCreate_v2, GNA_ARRAY, estimate(array->Format, array->NumChannels, array->Width, array->Height, array->Depth, 1),
           pHandle, pHandle, pAllocateArray);
}

HOOK(cuArray3DCreate)(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray) {
    const CUDA_ARRAY3D_DESCRIPTOR_v1 *array = pAllocateArray;
    if (pHandle == NULL || array == NULL) {
        return REAL(cuArray3DCreate)(pHandle, pAllocateArray);
    }
    CREATE(cuArray3DCreate, GNA_ARRAY, estimate(array->Format, array->NumChannels, array->Width, array->Height, array->Depth, 1),
           pHandle, pHandle, pAllocateArray);
}

HOOK(cuMipmappedArrayCreate)(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int numMipmapLevels) {
    const CUDA_ARRAY3D_DESCRIPTOR *array = pMipmappedArrayDesc;
    if (pHandle == NULL || array == NULL || !has_memory(array)) {
        return REAL(cuMipmappedArrayCreate)(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    }
    CREATE(cuMipmappedArrayCreate, GNA_MIPMAP,
           estimate(array->Format, array->NumChannels, array->Width, array->Height, array->Depth, numMipmapLevels), pHandle, pHandle,
           pMipmappedArrayDesc, numMipmapLevels);
}

void gna_tiles_gone(uint64_t array);

static CUresult destroyed(CUresult result, bool known, const struct gna_entry *entry, uint64_t handle) {
    if (result == CUDA_SUCCESS) {
        gna_tiles_gone(handle);
        if (known) {
            gna_discharge(GNA_ARRAY, entry->record, entry->bytes);
        }
    } else if (known) {
        gna_put(entry);
    }
    return result;
}

HOOK(cuArrayDestroy)(CUarray hArray) {
    struct gna_entry entry;
    gna_attach();
    bool known = gna_take(GNA_ARRAY, (uintptr_t)hArray, &entry);
    return destroyed(REAL(cuArrayDestroy)(hArray), known, &entry, (uintptr_t)hArray);
}

HOOK(cuMipmappedArrayDestroy)(CUmipmappedArray hMipmappedArray) {
    struct gna_entry entry;
    gna_attach();
    bool known = gna_take(GNA_MIPMAP, (uintptr_t)hMipmappedArray, &entry);
    return destroyed(REAL(cuMipmappedArrayDestroy)(hMipmappedArray), known, &entry, (uintptr_t)hMipmappedArray);
}
