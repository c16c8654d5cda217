/* Contexts cost memory by their existence, and what was allocated in one goes with it. */
#include "caps.h"

static struct gna_mutex primary_lock;

static uint64_t price(int record) {
    struct gna_limit limit;
    return record >= 0 && gna_limit_of((unsigned)record, &limit) ? limit.context_bytes : 0;
}

static CUresult charge(CUdevice device, struct gna_entry *entry) {
    int record = gna_record_of(device);
    uint64_t bytes = price(record);
    *entry = (struct gna_entry){.kind = GNA_CONTEXT, .record = record, .bytes = bytes, .other = (uint64_t)device};
    return record < 0 ? CUDA_ERROR_OUT_OF_MEMORY : gna_reserve_hard(record, bytes);
}

static CUresult created(CUresult result, struct gna_entry *entry, const CUcontext *context) {
    if (result == CUDA_SUCCESS) {
        entry->key = (uintptr_t)*context;
        gna_put(entry);
        gna_context_charged(entry->record, (int64_t)entry->bytes);
    } else {
        gna_release(entry->record, entry->bytes);
    }
    return result;
}

void gna_context_gone(CUcontext context) {
    static const enum gna_kind kinds[] = {GNA_LINEAR, GNA_MANAGED, GNA_FOREIGN, GNA_ARRAY, GNA_MIPMAP, GNA_CODE};
    struct gna_entry entry;
    for (unsigned index = 0; context != NULL && index < sizeof(kinds) / sizeof(*kinds); index++) {
        for (size_t place = 0; gna_next(kinds[index], &place, &entry);) {
            if (entry.other == (uintptr_t)context && gna_take(entry.kind, entry.key, &entry)) {
                gna_discharge(entry.kind == GNA_MIPMAP ? GNA_ARRAY : entry.kind, entry.record, entry.bytes);
            }
        }
    }
}

static CUresult destroyed(CUresult result, CUcontext context) {
    struct gna_entry entry;
    if (result == CUDA_SUCCESS && gna_take(GNA_CONTEXT, (uintptr_t)context, &entry)) {
        gna_context_gone(context);
        gna_context_charged(entry.record, -(int64_t)entry.bytes);
        gna_release(entry.record, entry.bytes);
    }
    return result;
}

#define CREATE(symbol, ...)                                                            \
    struct gna_entry entry;                                                            \
    if (pctx == NULL || charge(dev, &entry) != CUDA_SUCCESS) {                         \
        return pctx == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;     \
    }                                                                                  \
    return created(REAL(symbol)(__VA_ARGS__), &entry, pctx)

HOOK(cuCtxCreate)(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    CREATE(cuCtxCreate, pctx, flags, dev);
}

HOOK(cuCtxCreate_v2)(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    CREATE(cuCtxCreate_v2, pctx, flags, dev);
}

HOOK(cuCtxCreate_v3)(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev) {
    CREATE(cuCtxCreate_v3, pctx, paramsArray, numParams, flags, dev);
}

HOOK(cuCtxCreate_v4)(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev) {
    CREATE(cuCtxCreate_v4, pctx, ctxCreateParams, flags, dev);
}

HOOK(cuCtxDestroy)(CUcontext ctx) {
    gna_attach();
    return destroyed(REAL(cuCtxDestroy)(ctx), ctx);
}

HOOK(cuCtxDestroy_v2)(CUcontext ctx) {
    gna_attach();
    return destroyed(REAL(cuCtxDestroy_v2)(ctx), ctx);
}

/* The primary context of a device has the key of its device, which no handle has. */
static uint64_t primary_key(CUdevice device) {
    return (uint64_t)(uint32_t)device + 1;
}

static CUresult retain(CUcontext *pctx, CUdevice dev) {
    struct gna_entry entry;
    gna_attach();
    bool held = gna_get(GNA_CONTEXT, primary_key(dev), &entry);
    if (!held && charge(dev, &entry) != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
    if (result == CUDA_SUCCESS) {
        entry.key = primary_key(dev);
        entry.count++;
        entry.other = (uintptr_t)*pctx;
        gna_put(&entry);
        if (!held) {
            gna_context_charged(entry.record, (int64_t)entry.bytes);
        }
    } else if (!held) {
        gna_release(entry.record, entry.bytes);
    }
    return result;
}

HOOK(cuDevicePrimaryCtxRetain)(CUcontext *pctx, CUdevice dev) {
    if (pctx == NULL) {
        return REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
    }
    gna_enter(&primary_lock);
    CUresult result = retain(pctx, dev);
    gna_leave(&primary_lock);
    return result;
}

static void dropped(CUdevice dev, bool wholly) {
    struct gna_entry entry;
    if (!gna_take(GNA_CONTEXT, primary_key(dev), &entry)) {
        return;
    }
    if (!wholly && entry.count > 1) {
        entry.count--;
        gna_put(&entry);
        return;
    }
    gna_context_gone((CUcontext)(uintptr_t)entry.other);
    gna_context_charged(entry.record, -(int64_t)entry.bytes);
    gna_release(entry.record, entry.bytes);
}

#define DROP(symbol, dev, wholly)                \
    gna_enter(&primary_lock);                    \
    gna_attach();                                \
    CUresult result = REAL(symbol)(dev);         \
    if (result == CUDA_SUCCESS) {                \
        dropped(dev, wholly);                    \
    }                                            \
    gna_leave(&primary_lock);                    \
    return result

HOOK(cuDevicePrimaryCtxRelease)(CUdevice dev) {
    DROP(cuDevicePrimaryCtxRelease, dev, false);
}

HOOK(cuDevicePrimaryCtxRelease_v2)(CUdevice dev) {
    DROP(cuDevicePrimaryCtxRelease_v2, dev, false);
}

HOOK(cuDevicePrimaryCtxReset)(CUdevice dev) {
    DROP(cuDevicePrimaryCtxReset, dev, true);
}

HOOK(cuDevicePrimaryCtxReset_v2)(CUdevice dev) {
    DROP(cuDevicePrimaryCtxReset_v2, dev, true);
}
