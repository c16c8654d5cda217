/* Linear, pitched and managed memory, and what all kinds of memory share: which GPU, and granules. */
#include "caps.h"

#define DEVICES 64

static _Atomic unsigned freed_later; /* entries of GNA_FREED */
static struct gna_mutex small_lock;
static uint64_t small[GNA_KINDS][GNA_MAX_DEVICES];
static _Atomic int record_of[DEVICES]; /* the record's number + 2; 1: none; 0: not looked up yet */

int gna_record_of(CUdevice device) {
    CUuuid uuid;
    if (device < 0 || device >= DEVICES || !gna_files_open()) {
        return -1;
    }
    int known = atomic_load_explicit(&record_of[device], memory_order_relaxed);
    if (known == 0) {
        CUresult result = gna_has(GNA_ID_cuDeviceGetUuid_v2) ? REAL(cuDeviceGetUuid_v2)(&uuid, device) : REAL(cuDeviceGetUuid)(&uuid, device);
        if (result != CUDA_SUCCESS) {
            return -1;
        }
        known = gna_record_of_uuid(&uuid) + 2;
        atomic_store_explicit(&record_of[device], known, memory_order_relaxed);
    }
    return known - 2;
}

CUresult gna_current_record(int *record) {
    CUdevice device;
    CUresult result = REAL(cuCtxGetDevice)(&device);
    if (result == CUDA_SUCCESS) {
        *record = gna_record_of(device);
        if (*record >= 0 && !atomic_load_explicit(&gna_primary_known[*record], memory_order_relaxed)) {
            gna_primary_adopt(device, *record);
        }
    }
    return result;
}

int gna_location_record(const CUmemLocation *location, bool *on_device) {
    int type = (int)location->type; /* 1: a GPU; 6: a part of one, whose number is a byte */
    *on_device = type == CU_MEM_LOCATION_TYPE_DEVICE || type == 6;
    return !*on_device ? -1 : gna_record_of(type == 6 ? location->localized.deviceId : location->id);
}

CUresult gna_reserve_hard(int record, uint64_t bytes) {
    CUresult result = gna_reserve(record, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && record >= 0) {
        gna_reclaim(record);
        result = gna_reserve(record, bytes);
    }
    return result;
}

static void count_movable(enum gna_kind kind, uint64_t bytes, int sign) {
    if (kind == GNA_MANAGED) {
        gna_movable_charged(sign * (int64_t)gna_round_up(bytes, bytes >= GNA_SMALL ? GNA_GRANULE : 512));
    }
}

CUresult gna_charge(enum gna_kind kind, int record, uint64_t bytes) {
    if (record < 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (bytes >= GNA_SMALL) {
        return gna_reserve_hard(record, gna_round_up(bytes, GNA_GRANULE));
    }
    for (unsigned attempt = 0;; attempt++) {
        gna_enter(&small_lock);
        uint64_t *sum = &small[kind][record], grown = *sum + gna_round_up(bytes, 512);
        CUresult result = gna_reserve(record, gna_round_up(grown, GNA_GRANULE) - gna_round_up(*sum, GNA_GRANULE));
        if (result == CUDA_SUCCESS) {
            *sum = grown;
        }
        gna_leave(&small_lock);
        if (result == CUDA_SUCCESS || attempt > 0) {
            return result;
        }
        gna_reclaim(record);
    }
}

void gna_discharge(enum gna_kind kind, int record, uint64_t bytes) {
    if (record < 0) {
        return;
    }
    count_movable(kind, bytes, -1);
    if (bytes >= GNA_SMALL) {
        gna_release(record, gna_round_up(bytes, GNA_GRANULE));
        return;
    }
    gna_enter(&small_lock);
    uint64_t *sum = &small[kind][record], left = *sum - gna_round_up(bytes, 512);
    gna_release(record, gna_round_up(*sum, GNA_GRANULE) - gna_round_up(left, GNA_GRANULE));
    *sum = left;
    gna_leave(&small_lock);
}

void gna_small_forget(void) {
    atomic_store(&freed_later, 0);
    for (unsigned kind = 0; kind < GNA_KINDS; kind++) {
        for (unsigned record = 0; record < GNA_MAX_DEVICES; record++) {
            small[kind][record] = 0;
        }
    }
}

/* After the driver has answered: remember what was charged, or give it back. */
static CUresult settle(CUresult result, enum gna_kind kind, int record, uint64_t bytes, CUdeviceptr pointer) {
    CUcontext context = NULL;
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = kind, .key = pointer, .bytes = bytes, .record = record, .other = (uintptr_t)context};
    if (result == CUDA_SUCCESS && !gna_put(&entry)) {
        REAL(cuMemFree_v2)(pointer);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        gna_discharge(kind, record, bytes);
    }
    return result;
}

HOOK(cuMemAlloc_v2)(CUdeviceptr *dptr, size_t bytesize) {
    int record;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || dptr == NULL || bytesize == 0) {
        return result != CUDA_SUCCESS ? result : REAL(cuMemAlloc_v2)(dptr, bytesize);
    }
    result = gna_charge(GNA_LINEAR, record, bytesize);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = REAL(cuMemAlloc_v2)(dptr, bytesize);
    return settle(result, GNA_LINEAR, record, bytesize, *dptr);
}

HOOK(cuMemAlloc)(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    int record;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || dptr == NULL || bytesize == 0) {
        return result != CUDA_SUCCESS ? result : REAL(cuMemAlloc)(dptr, bytesize);
    }
    result = gna_charge(GNA_LINEAR, record, bytesize);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = REAL(cuMemAlloc)(dptr, bytesize);
    return settle(result, GNA_LINEAR, record, bytesize, *dptr);
}

/* The driver chooses the pitch: no more than the width rounded up to 512, as far as is known. If it is more, the
 * difference is charged afterwards; if it is less, what was charged stays. */
static CUresult settle_pitch(CUresult result, int record, uint64_t charged, uint64_t bytes, CUdeviceptr pointer) {
    if (result == CUDA_SUCCESS && bytes > charged) {
        if (gna_charge(GNA_LINEAR, record, bytes) != CUDA_SUCCESS) {
            REAL(cuMemFree_v2)(pointer);
            gna_discharge(GNA_LINEAR, record, charged);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        gna_discharge(GNA_LINEAR, record, charged);
        charged = bytes;
    }
    return settle(result, GNA_LINEAR, record, charged, pointer);
}

HOOK(cuMemAllocPitch_v2)(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes) {
    int record;
    uint64_t bytes;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || dptr == NULL || pPitch == NULL || WidthInBytes == 0 || Height == 0) {
        return result != CUDA_SUCCESS ? result : REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    }
    if (__builtin_mul_overflow(gna_round_up(WidthInBytes, 512), (uint64_t)Height, &bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result = gna_charge(GNA_LINEAR, record, bytes);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    return settle_pitch(result, record, bytes, *pPitch * Height, *dptr);
}

HOOK(cuMemAllocPitch)(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes, unsigned int Height, unsigned int ElementSizeBytes) {
    int record;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || dptr == NULL || pPitch == NULL || WidthInBytes == 0 || Height == 0) {
        return result != CUDA_SUCCESS ? result : REAL(cuMemAllocPitch)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    }
    uint64_t bytes = gna_round_up(WidthInBytes, 512) * Height;
    result = gna_charge(GNA_LINEAR, record, bytes);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = REAL(cuMemAllocPitch)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    return settle_pitch(result, record, bytes, (uint64_t)*pPitch * Height, *dptr);
}

HOOK(cuMemAllocManaged)(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    int record;
    CUresult result = gna_current_record(&record);
    if (result != CUDA_SUCCESS || dptr == NULL || bytesize == 0) {
        return result != CUDA_SUCCESS ? result : REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    }
    result = gna_charge(GNA_MANAGED, record, bytesize);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    count_movable(GNA_MANAGED, bytesize, 1);
    result = REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    return settle(result, GNA_MANAGED, record, bytesize, *dptr);
}

static bool take(CUdeviceptr pointer, struct gna_entry *entry) {
    gna_attach(); /* a child of fork forgets first what its parent had */
    return gna_take(GNA_LINEAR, pointer, entry) || gna_take(GNA_MANAGED, pointer, entry) || gna_take(GNA_FOREIGN, pointer, entry);
}

/* Taken out before the call: once the driver has freed it, another thread may be given the same address. */
static CUresult freed(CUresult result, bool known, const struct gna_entry *entry) {
    if (known && result == CUDA_SUCCESS) {
        gna_export_freed(entry);
        gna_discharge(entry->kind, entry->record, entry->bytes);
    } else if (known) {
        gna_put(entry);
    }
    return result;
}

HOOK(cuMemFree_v2)(CUdeviceptr dptr) {
    struct gna_entry entry;
    bool known = take(dptr, &entry);
    return freed(REAL(cuMemFree_v2)(dptr), known, &entry);
}

HOOK(cuMemFree)(CUdeviceptr_v1 dptr) {
    struct gna_entry entry;
    bool known = take(dptr, &entry);
    return freed(REAL(cuMemFree)(dptr), known, &entry);
}

/* Of what cuMemAlloc gave: it is free when the stream gets there, so it stays charged until an event behind it is over.
 * The call itself does not wait: what the stream waits for may be this thread's to submit. */
static CUresult freed_async(CUresult result, CUdeviceptr pointer, bool known, struct gna_entry *entry, CUstream stream) {
    CUgraph graph;
    CUevent event;
    if (!known) {
        return result == CUDA_SUCCESS ? gna_graph_frees(pointer, stream) : result;
    }
    if (result != CUDA_SUCCESS || gna_capturing(stream, &graph) || REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        gna_put(entry);
        return result;
    }
    struct gna_entry later = *entry;
    later.kind = GNA_FREED;
    later.key = (uintptr_t)event;
    later.flag = entry->kind;
    if (REAL(cuEventRecord)(event, stream) == CUDA_SUCCESS && gna_put(&later)) {
        gna_export_freed(entry);
        atomic_fetch_add(&freed_later, 1);
    } else {
        REAL(cuEventDestroy_v2)(event);
        gna_put(entry);
    }
    return result;
}

void gna_freed_settle(bool wait, CUcontext gone) {
    struct gna_entry later;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (atomic_load_explicit(&freed_later, memory_order_relaxed) == 0) {
        return;
    }
    REAL(cuThreadExchangeStreamCaptureMode)(&mode); /* or to ask for an event would end a capture of the application */
    for (size_t place = 0; gna_next(GNA_FREED, &place, &later);) {
        /* Taken out first: another thread must not ask for an event that this one destroys. */
        if (!gna_take(GNA_FREED, later.key, &later)) {
            continue;
        }
        CUevent event = (CUevent)(uintptr_t)later.key;
        if (gone == NULL || later.other != (uintptr_t)gone) {
            if ((wait ? REAL(cuEventSynchronize)(event) : REAL(cuEventQuery)(event)) != CUDA_SUCCESS) {
                gna_put(&later); /* not yet, or the context has failed and gives back nothing before it ends */
                continue;
            }
            REAL(cuEventDestroy_v2)(event);
        }
        gna_discharge(later.flag, later.record, later.bytes);
        atomic_fetch_sub(&freed_later, 1);
    }
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

/* What was a pool's seems to be spare from the call on. */
static CUresult free_async(CUresult (*call)(CUdeviceptr, CUstream), CUdeviceptr pointer, CUstream given, CUstream stream) {
    struct gna_entry entry, node;
    CUgraph graph;
    if (take(pointer, &entry)) {
        return freed_async(call(pointer, given), pointer, true, &entry, stream);
    }
    bool in_graph = gna_capturing(stream, &graph);
    if (in_graph && gna_get(GNA_NODE, pointer, &node)) {
        return freed_async(call(pointer, given), pointer, false, NULL, stream); /* a graph's own */
    }
    uint64_t freer = gna_freer_begins(stream, pointer, in_graph);
    CUresult result = call(pointer, given);
    gna_freer_ended(freer, stream);
    return freed_async(result, pointer, false, NULL, stream);
}

HOOK(cuMemFreeAsync)(CUdeviceptr dptr, CUstream hStream) {
    return free_async(REAL(cuMemFreeAsync), dptr, hStream, hStream);
}

HOOK(cuMemFreeAsync_ptsz)(CUdeviceptr dptr, CUstream hStream) {
    return free_async(REAL(cuMemFreeAsync_ptsz), dptr, hStream, hStream == NULL ? CU_STREAM_PER_THREAD : hStream);
}
