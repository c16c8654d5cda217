/* Memory of other processes. What a process of this container made is charged there; what comes from anywhere else is
 * charged here, since it stays alive while it is open here. Which it is, the exporting process wrote down. */
#include "caps.h"

static uint64_t fingerprint(const void *handle, size_t bytes) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t index = 0; index < bytes; index++) {
        hash = (hash ^ ((const uint8_t *)handle)[index]) * UINT64_C(0x100000001b3);
    }
    return hash | 1;
}

void gna_exported(const void *handle, size_t bytes) {
    if (gna_attach() != NULL && gna_usage_sound() && gna_usage_back(offsetof(struct gna_usage, exported), sizeof(gna_usage->exported))) {
        uint64_t print = fingerprint(handle, bytes);
        __atomic_store_n(&gna_usage->exported[print % GNA_EXPORTS], print, __ATOMIC_RELAXED);
    }
}

bool gna_is_ours(const void *handle, size_t bytes) {
    uint64_t print = fingerprint(handle, bytes);
    return gna_attach() != NULL && gna_usage_sound() && gna_usage_back(offsetof(struct gna_usage, exported), sizeof(gna_usage->exported)) &&
           __atomic_load_n(&gna_usage->exported[print % GNA_EXPORTS], __ATOMIC_RELAXED) == print;
}

static int record_of_pointer(CUdeviceptr pointer) {
    int device = -1, record = -1;
    if (REAL(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) == CUDA_SUCCESS) {
        return gna_record_of(device);
    }
    return gna_current_record(&record) == CUDA_SUCCESS ? record : -1;
}

/* Charges what was opened just now; false where it does not fit. */
static bool charge_opened(CUdeviceptr pointer) {
    CUdeviceptr base;
    size_t bytes;
    CUcontext context = NULL;
    if (REAL(cuMemGetAddressRange_v2)(&base, &bytes, pointer) != CUDA_SUCCESS) {
        return true;
    }
    int record = record_of_pointer(pointer);
    if (gna_charge(GNA_FOREIGN, record, bytes) != CUDA_SUCCESS) {
        return false;
    }
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = GNA_FOREIGN, .key = pointer, .bytes = bytes, .record = record, .other = (uintptr_t)context};
    if (!gna_put(&entry)) {
        gna_discharge(GNA_FOREIGN, record, bytes);
        return false;
    }
    return true;
}

HOOK(cuIpcGetMemHandle)(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    CUresult result = REAL(cuIpcGetMemHandle)(pHandle, dptr);
    if (result == CUDA_SUCCESS) {
        gna_exported(pHandle, sizeof(*pHandle));
    }
    return result;
}

static CUresult opened(CUresult result, const CUdeviceptr *pointer, const CUipcMemHandle *handle) {
    struct gna_entry known;
    if (result == CUDA_SUCCESS && !gna_is_ours(handle, sizeof(*handle)) && !gna_get(GNA_FOREIGN, *pointer, &known) && !charge_opened(*pointer)) {
        REAL(cuIpcCloseMemHandle)(*pointer);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

HOOK(cuIpcOpenMemHandle)(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    return opened(REAL(cuIpcOpenMemHandle)(pdptr, handle, Flags), pdptr, &handle);
}

HOOK(cuIpcOpenMemHandle_v2)(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    return opened(REAL(cuIpcOpenMemHandle_v2)(pdptr, handle, Flags), pdptr, &handle);
}

HOOK(cuIpcCloseMemHandle)(CUdeviceptr dptr) {
    struct gna_entry entry;
    gna_attach();
    CUresult result = REAL(cuIpcCloseMemHandle)(dptr);
    if (result == CUDA_SUCCESS && gna_take(GNA_FOREIGN, dptr, &entry)) {
        gna_discharge(GNA_FOREIGN, entry.record, entry.bytes);
    }
    return result;
}

HOOK(cuMemPoolExportPointer)(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr) {
    CUresult result = REAL(cuMemPoolExportPointer)(shareData_out, ptr);
    if (result == CUDA_SUCCESS) {
        gna_exported(shareData_out, sizeof(*shareData_out));
    }
    return result;
}

HOOK(cuMemPoolImportPointer)(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData) {
    CUresult result = REAL(cuMemPoolImportPointer)(ptr_out, pool, shareData);
    if (result == CUDA_SUCCESS && !gna_is_ours(shareData, sizeof(*shareData)) && !charge_opened(*ptr_out)) {
        REAL(cuMemFree_v2)(*ptr_out);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

HOOK(cuImportExternalMemory)(CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc) {
    int record;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || extMem_out == NULL || memHandleDesc == NULL) {
        return result != CUDA_SUCCESS ? result : REAL(cuImportExternalMemory)(extMem_out, memHandleDesc);
    }
    uint64_t bytes = memHandleDesc->size;
    if (gna_charge(GNA_EXTERNAL, record, bytes) != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result = REAL(cuImportExternalMemory)(extMem_out, memHandleDesc);
    struct gna_entry entry = {.kind = GNA_EXTERNAL, .bytes = bytes, .record = record};
    if (result == CUDA_SUCCESS) {
        entry.key = (uintptr_t)*extMem_out;
        gna_put(&entry);
    } else {
        gna_discharge(GNA_EXTERNAL, record, bytes);
    }
    return result;
}

HOOK(cuDestroyExternalMemory)(CUexternalMemory extMem) {
    struct gna_entry entry;
    gna_attach();
    CUresult result = REAL(cuDestroyExternalMemory)(extMem);
    if (result == CUDA_SUCCESS && gna_take(GNA_EXTERNAL, (uintptr_t)extMem, &entry)) {
        gna_discharge(GNA_EXTERNAL, entry.record, entry.bytes);
    }
    return result;
}
