/* Contexts cost memory by their existence, and what was allocated in one goes with it. */
#include "caps.h"

static struct gna_mutex primary_lock;
_Atomic bool gna_primary_known[GNA_MAX_DEVICES]; /* by record: its primary context is in the table */

static uint64_t price(int record) {
    struct gna_limit limit;
    return record >= 0 && gna_limit_of((unsigned)record, &limit) ? limit.context_bytes : 0;
}

/* Of a GPU that has no record: what the driver says of the device, if it says anything, such as that it is to be
 * initialised first. */
static CUresult refusal(CUdevice device) {
    CUuuid uuid;
    CUresult result = REAL(cuDeviceGetUuid)(&uuid, device);
    return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

static CUresult charge(CUdevice device, struct gna_entry *entry) {
    int record = gna_record_of(device);
    uint64_t bytes = price(record);
    *entry = (struct gna_entry){.kind = GNA_CONTEXT, .record = record, .bytes = bytes, .other = (uint64_t)device};
    return record < 0 ? refusal(device) : gna_reserve_hard(record, bytes);
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
    static const enum gna_kind kinds[] = {GNA_LINEAR, GNA_MANAGED, GNA_FOREIGN, GNA_OPENED, GNA_ARRAY, GNA_MIPMAP, GNA_CODE, GNA_HEAP};
    struct gna_entry entry;
    gna_freed_settle(false, context);
    gna_prices_context_gone(context);
    for (unsigned index = 0; context != NULL && index < sizeof(kinds) / sizeof(*kinds); index++) {
        for (size_t place = 0; gna_next(kinds[index], &place, &entry);) {
            if (entry.other != (uintptr_t)context || !gna_take(entry.kind, entry.key, &entry)) {
                continue;
            }
            if (entry.kind == GNA_OPENED || entry.kind == GNA_FOREIGN) {
                gna_import_gone(&entry);
            } else {
                gna_export_freed(&entry);
                gna_discharge(entry.kind == GNA_MIPMAP ? GNA_ARRAY : entry.kind, entry.record, entry.bytes);
            }
        }
    }
}

static CUresult destroyed(CUresult result, CUcontext context, uint64_t leaving) {
    struct gna_entry entry;
    gna_freers_left(leaving, result == CUDA_SUCCESS ? NULL : context);
    if (result == CUDA_SUCCESS && gna_take(GNA_CONTEXT, (uintptr_t)context, &entry)) {
        gna_context_gone(context);
        gna_context_charged(entry.record, -(int64_t)entry.bytes);
        gna_release(entry.record, entry.bytes);
    }
    return result;
}

#define CREATE(symbol, ...)                                                            \
    struct gna_entry entry;                                                            \
    CUresult charged = pctx == NULL ? CUDA_ERROR_INVALID_VALUE : charge(dev, &entry);  \
    if (charged != CUDA_SUCCESS) {                                                     \
        return charged;                                                                \
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
    uint64_t leaving = gna_freers_leave(ctx);
    return destroyed(REAL(cuCtxDestroy)(ctx), ctx, leaving);
}

HOOK(cuCtxDestroy_v2)(CUcontext ctx) {
    gna_attach();
    uint64_t leaving = gna_freers_leave(ctx);
    return destroyed(REAL(cuCtxDestroy_v2)(ctx), ctx, leaving);
}

/* The primary context of a device has the key of its device, which no handle has. */
static uint64_t primary_key(CUdevice device) {
    return (uint64_t)(uint32_t)device + 1;
}

static CUresult retain(CUcontext *pctx, CUdevice dev) {
    struct gna_entry entry;
    gna_attach();
    bool held = gna_get(GNA_CONTEXT, primary_key(dev), &entry);
    CUresult result = held ? CUDA_SUCCESS : charge(dev, &entry);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
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

/* NVIDIA's runtime retains the primary context by a private table of the driver, where no hook sees it. It is there
 * already, so that it is charged whatever the cap: with the first call that needs it, and before that call's own memory. */
void gna_primary_adopt(CUdevice dev, int record) {
    struct gna_entry entry;
    unsigned flags;
    int active = 0;
    CUcontext context;
    gna_enter(&primary_lock);
    bool known = gna_get(GNA_CONTEXT, primary_key(dev), &entry);
    if (!known && REAL(cuDevicePrimaryCtxGetState)(dev, &flags, &active) == CUDA_SUCCESS && active &&
        REAL(cuDevicePrimaryCtxRetain)(&context, dev) == CUDA_SUCCESS) {
        REAL(cuDevicePrimaryCtxRelease)(dev); /* the handle was all that was wanted */
        /* Retained once: by the runtime, which gives it back by the private table, too. */
        entry = (struct gna_entry){.kind = GNA_CONTEXT, .key = primary_key(dev), .record = record, .bytes = price(record),
                                   .count = 1, .other = (uintptr_t)context};
        known = gna_charge_present(record, entry.bytes);
        if (known) {
            gna_put(&entry);
            gna_context_charged(record, (int64_t)entry.bytes);
        }
    }
    atomic_store_explicit(&gna_primary_known[record], known, memory_order_relaxed);
    gna_leave(&primary_lock);
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

/* NULL: it stays, or is not known. */
static CUcontext ending(CUdevice dev, bool reset) {
    struct gna_entry entry;
    bool ends = gna_get(GNA_CONTEXT, primary_key(dev), &entry) && (reset || entry.count <= 1);
    return ends ? (CUcontext)(uintptr_t)entry.other : NULL;
}

static void dropped(CUdevice dev, bool reset) {
    struct gna_entry entry;
    if (!gna_take(GNA_CONTEXT, primary_key(dev), &entry)) {
        return;
    }
    if (reset || entry.count <= 1) {
        gna_pools_gone(dev);
    }
    if (reset) {
        /* What was allocated in it is gone. It is still retained as often, says cuda.h, and the next retain gives it
         * back: released as if it were gone, it would be missing from the books while it is used. */
        gna_context_gone((CUcontext)(uintptr_t)entry.other);
        gna_put(&entry);
        return;
    }
    if (entry.count > 1) {
        entry.count--;
        gna_put(&entry);
        return;
    }
    if (entry.record >= 0) {
        atomic_store_explicit(&gna_primary_known[entry.record], false, memory_order_relaxed);
    }
    gna_context_gone((CUcontext)(uintptr_t)entry.other);
    gna_context_charged(entry.record, -(int64_t)entry.bytes);
    gna_release(entry.record, entry.bytes);
}

#define DROP(symbol, dev, reset)                 \
    gna_enter(&primary_lock);                    \
    gna_attach();                                \
    gna_enter(&gna_pools_lock); /* or another thread would ask for pools that are gone */ \
    CUcontext context = ending(dev, reset);      \
    uint64_t leaving = gna_freers_leave(context); \
    CUresult result = REAL(symbol)(dev);         \
    gna_freers_left(leaving, result == CUDA_SUCCESS ? NULL : context); \
    if (result == CUDA_SUCCESS) {                \
        dropped(dev, reset);                     \
    }                                            \
    gna_leave(&gna_pools_lock);                  \
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

/* What device code allocates and prints comes out of memory that is set aside for it in full. As much as a context has
 * of it by default is part of the context's price. */
static uint64_t set_aside(CUlimit limit, uint64_t value) {
    uint64_t by_default = limit == CU_LIMIT_MALLOC_HEAP_SIZE ? UINT64_C(8) << 20 : UINT64_C(1) << 20;
    return value > by_default ? gna_round_up(value - by_default, GNA_GRANULE) : 0;
}

HOOK(cuCtxSetLimit)(CUlimit limit, size_t value) {
    CUcontext context = NULL;
    struct gna_entry entry;
    int record;
    if ((limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE) || gna_current_record(&record) != CUDA_SUCCESS) {
        return REAL(cuCtxSetLimit)(limit, value);
    }
    REAL(cuCtxGetCurrent)(&context);
    gna_attach();
    /* Handles are addresses and end in zeros. */
    uint64_t key = (uintptr_t)context + (unsigned)limit, wanted = set_aside(limit, value);
    uint64_t before = gna_get(GNA_HEAP, key, &entry) ? entry.bytes : 0;
    entry = (struct gna_entry){.kind = GNA_HEAP, .key = key, .bytes = wanted, .record = record, .other = (uintptr_t)context};
    if (wanted > before && gna_reserve_hard(record, wanted - before) != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = REAL(cuCtxSetLimit)(limit, value);
    uint64_t charged = wanted > before ? wanted : before;
    if (result != CUDA_SUCCESS) {
        gna_release(record, charged - before);
    } else if (gna_put(&entry)) {
        gna_release(record, charged - wanted);
    }
    return result;
}
