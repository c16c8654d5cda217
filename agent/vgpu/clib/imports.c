/* Memory of other processes. What a process of this container made is charged there; what comes from anywhere else is
 * charged here, since it stays alive while it is open here. Which it is, the exporting process wrote down.
 *
 * It stays alive when the process that made it ends, too: who opens it holds the lock of that process's slot, and while
 * anybody does, what the slot had exported stays charged. */
#include "caps.h"

static struct gna_mutex lock; /* while memory is opened or closed, since the driver gives an address again at once */

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
        uint16_t slot = (uint16_t)(gna_attach() - gna_usage->slot);
        __atomic_store_n(&gna_usage->exporter[print % GNA_EXPORTS], slot, __ATOMIC_RELAXED);
        __atomic_store_n(&gna_usage->exported[print % GNA_EXPORTS], print, __ATOMIC_RELEASE);
    }
}

bool gna_is_ours(const void *handle, size_t bytes) {
    uint64_t print = fingerprint(handle, bytes);
    return gna_attach() != NULL && gna_usage_sound() && gna_usage_back(offsetof(struct gna_usage, exported), sizeof(gna_usage->exported)) &&
           __atomic_load_n(&gna_usage->exported[print % GNA_EXPORTS], __ATOMIC_ACQUIRE) == print;
}

/* NULL where the memory is not of this container, or its exporter cannot be held to its charge. */
static void *hold_exporter(const void *handle, size_t bytes) {
    unsigned slot;
    if (!gna_is_ours(handle, bytes)) {
        return NULL;
    }
    slot = __atomic_load_n(&gna_usage->exporter[fingerprint(handle, bytes) % GNA_EXPORTS], __ATOMIC_RELAXED);
    return slot < GNA_SLOTS ? gna_living_hold(slot) : NULL;
}

static int64_t granules(const struct gna_entry *entry) {
    return (int64_t)(gna_round_up(entry->bytes, GNA_GRANULE) / GNA_GRANULE);
}

static void note_export(CUdeviceptr pointer) {
    struct gna_entry entry;
    CUdeviceptr base;
    size_t bytes;
    if (REAL(cuMemGetAddressRange_v2)(&base, &bytes, pointer) == CUDA_SUCCESS && gna_get(GNA_LINEAR, base, &entry) && !entry.flag) {
        entry.flag = 1;
        gna_put(&entry);
        gna_export_charged(entry.record, granules(&entry));
    }
}

void gna_export_freed(const struct gna_entry *entry) {
    if (entry->kind == GNA_LINEAR && entry->flag) {
        gna_export_charged(entry->record, -granules(entry));
    }
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
        gna_attach(); /* a child of fork forgets first what its parent had */
        note_export(dptr);
        gna_exported(pHandle, sizeof(*pHandle));
    }
    return result;
}

static bool note_opened(CUdeviceptr pointer, void *held) {
    CUcontext context = NULL;
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = GNA_OPENED, .key = pointer, .bytes = (uintptr_t)held, .other = (uintptr_t)context};
    return gna_put(&entry);
}

/* Opened once more, memory has the same address, and is there until it is closed as often: one entry, which counts. */
static CUresult opened(CUresult result, const CUdeviceptr *pointer, void *held) {
    struct gna_entry known;
    bool is_kept = false;
    if (result == CUDA_SUCCESS && (gna_get(GNA_OPENED, *pointer, &known) || gna_get(GNA_FOREIGN, *pointer, &known))) {
        if (known.kind == GNA_OPENED && held != NULL) {
            void *before = (void *)(uintptr_t)known.bytes;
            known.bytes = (uintptr_t)held; /* where an address went on to other memory unseen, this is the right exporter */
            held = before;
        }
        known.count++;
        gna_put(&known);
    } else if (result == CUDA_SUCCESS) {
        is_kept = held != NULL && note_opened(*pointer, held);
        if (!is_kept && !charge_opened(*pointer)) {
            REAL(cuIpcCloseMemHandle)(*pointer);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (held != NULL && !is_kept) {
        gna_living_let_go(held);
    }
    gna_leave(&lock);
    return result;
}

#define OPEN(symbol)                                                                                             \
    void *held = hold_exporter(&handle, sizeof(handle)); /* before: the exporter may end at any moment */        \
    gna_enter(&lock);                                                                                            \
    CUresult result = REAL(symbol)(pdptr, handle, Flags);                                                        \
    return opened(result, pdptr, held)

HOOK(cuIpcOpenMemHandle)(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    OPEN(cuIpcOpenMemHandle);
}

HOOK(cuIpcOpenMemHandle_v2)(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    OPEN(cuIpcOpenMemHandle_v2);
}

void gna_import_gone(const struct gna_entry *entry) {
    if (entry->kind == GNA_OPENED) {
        gna_living_let_go((void *)(uintptr_t)entry->bytes);
    } else {
        gna_discharge(GNA_FOREIGN, entry->record, entry->bytes);
    }
}

HOOK(cuIpcCloseMemHandle)(CUdeviceptr dptr) {
    struct gna_entry entry;
    gna_attach();
    gna_enter(&lock);
    CUresult result = REAL(cuIpcCloseMemHandle)(dptr);
    if (result == CUDA_SUCCESS && (gna_take(GNA_OPENED, dptr, &entry) || gna_take(GNA_FOREIGN, dptr, &entry))) {
        if (entry.count > 0) {
            entry.count--;
            gna_put(&entry);
        } else {
            gna_import_gone(&entry);
        }
    }
    gna_leave(&lock);
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
