/* Stream-ordered memory: a pool is charged with what it has reserved from the GPU, whatever of it is in use.
 *
 * Before an allocation the most that the pool may grow by is reserved, what it has and nobody uses being free to use; after
 * it the charge becomes what the driver says the pool has. Both happen under one lock, so that two threads that grow one pool do not pay for one growth. */
#include "caps.h"

#include <time.h>

struct gna_mutex gna_pools_lock;
static _Atomic unsigned pools;
enum { DESTROYED = 1 }; /* by the application, which has memory of it left: the driver destroys it when that is freed */

void gna_pools_forget(void) {
    atomic_store(&pools, 0);
    gna_freers_forget();
    gna_graphs_forget();
}

static uint64_t key_of(CUmemoryPool pool) {
    return (uintptr_t)pool;
}

/* The lock is held. */
static bool entry_of(CUmemoryPool pool, CUdevice device, struct gna_entry *entry) {
    if (gna_get(GNA_POOL, key_of(pool), entry)) {
        return true;
    }
    *entry = (struct gna_entry){.kind = GNA_POOL, .key = key_of(pool), .record = gna_record_of(device), .other = (uint64_t)device};
    atomic_fetch_add(&pools, 1);
    return gna_put(entry);
}

/* The lock is held. Memory that came along behind the library's back is charged, where it fits; false where not. */
static bool settle(struct gna_entry *pool) {
    cuuint64_t reserved;
    if (pool->flag == DESTROYED) {
        REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
    }
    if (REAL(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool->key, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS) {
        return true;
    }
    bool fits = true;
    if (pool->flag == DESTROYED && reserved == 0) {
        REAL(cuMemPoolDestroy)((CUmemoryPool)(uintptr_t)pool->key);
        gna_release(pool->record, pool->bytes);
        atomic_fetch_sub(&pools, 1);
        return !gna_take(GNA_POOL, pool->key, pool);
    }
    if (reserved < pool->bytes) {
        gna_release(pool->record, pool->bytes - reserved);
        pool->bytes = reserved;
    } else if (reserved > pool->bytes) {
        fits = gna_reserve(pool->record, reserved - pool->bytes) == CUDA_SUCCESS;
        pool->bytes = fits ? reserved : pool->bytes;
    }
    gna_put(pool);
    return fits;
}

void gna_reclaim_locked(int record, CUstream stream, bool wait) {
    struct gna_entry pool;
    if (wait) {
        /* What the stream waits for may be another thread's to submit, which needs the lock for it. */
        gna_leave(&gna_pools_lock);
        REAL(cuStreamSynchronize)(stream);
        gna_enter(&gna_pools_lock);
    }
    for (size_t place = 0; gna_next(GNA_POOL, &place, &pool);) {
        if (pool.record == record) {
            REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool.key, 0);
            settle(&pool);
        }
    }
    gna_graphs_reclaim(record);
}

void gna_reclaim(int record) {
    /* A process that ended a moment ago was not searched for, if another search had just been: one is due again then. */
    nanosleep(&(struct timespec){.tv_nsec = GNA_SWEEP_NS}, NULL);
    gna_freed_settle(true, NULL);
    gna_enter(&gna_pools_lock);
    gna_reclaim_locked(record, NULL, false);
    gna_leave(&gna_pools_lock);
}

void gna_pools_settle(void) {
    struct gna_entry pool;
    gna_freed_settle(false, NULL);
    if (atomic_load_explicit(&pools, memory_order_relaxed) == 0) {
        return;
    }
    gna_enter(&gna_pools_lock);
    for (size_t place = 0; gna_next(GNA_POOL, &place, &pool);) {
        settle(&pool);
    }
    gna_leave(&gna_pools_lock);
}

/* Real drivers take memory for a pool in steps of 32 MiB where they can. */
static uint64_t growth(uint64_t bytes) {
    return gna_round_up(bytes, UINT64_C(32) << 20);
}

/* What is used is asked for first: what is freed from then on does not seem spare. */
static uint64_t missing(const struct gna_entry *pool, uint64_t bytes, CUstream stream, bool whole, bool asks) {
    cuuint64_t used;
    CUmemoryPool handle = (CUmemoryPool)(uintptr_t)pool->key;
    if (whole || REAL(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) != CUDA_SUCCESS ||
        !gna_freers_past(pool->record, stream, asks)) {
        return bytes;
    }
    uint64_t spare = used < pool->bytes ? pool->bytes - used : 0;
    return bytes > spare ? bytes - spare : 0;
}

/* The lock is held. `whole`: what the pool has spare was in pieces that are too small. */
static CUresult reserve(struct gna_entry *pool, uint64_t bytes, CUstream stream, bool whole) {
    uint64_t least = gna_round_up(missing(pool, bytes, stream, whole, false), GNA_GRANULE), wanted = growth(least);
    CUresult result = gna_reserve(pool->record, wanted);
    for (unsigned attempt = 0; result != CUDA_SUCCESS && attempt < 3; attempt++) {
        if (attempt > 0) {
            gna_reclaim_locked(pool->record, stream, attempt == 2);
            gna_get(GNA_POOL, pool->key, pool);
        }
        wanted = gna_round_up(missing(pool, bytes, stream, whole, true), GNA_GRANULE);
        result = gna_reserve(pool->record, wanted);
    }
    if (result == CUDA_SUCCESS) {
        pool->bytes += wanted;
        gna_put(pool);
    }
    return result;
}

typedef CUresult call_t(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream);

static CUresult allocate(call_t *call, CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream given, CUstream stream, CUdevice device) {
    struct gna_entry entry;
    CUgraph graph = NULL;
    if (gna_capturing(stream, &graph)) {
        /* No memory now: a node of a graph, which is charged when the graph runs. */
        CUresult result = call(pointer, bytes, pool, given);
        if (result == CUDA_SUCCESS) {
            gna_graph_grows(graph, gna_record_of(device), device, bytes, *pointer);
        }
        return result;
    }
    gna_attach();
    gna_enter(&gna_pools_lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned attempt = 0; attempt < 2 && entry_of(pool, device, &entry); attempt++) {
        result = reserve(&entry, bytes, stream, attempt > 0);
        if (result != CUDA_SUCCESS) {
            break;
        }
        result = call(pointer, bytes, pool, given);
        if (settle(&entry) || result != CUDA_SUCCESS) {
            break;
        }
        uint64_t freer = gna_freer_begins(stream, *pointer, false);
        REAL(cuMemFreeAsync)(*pointer, stream);
        gna_freer_ended(freer, stream);
        gna_reclaim_locked(entry.record, stream, true);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    gna_leave(&gna_pools_lock);
    return result;
}

static CUresult device_of(CUstream stream, CUdevice *device) {
    /* Drivers before 12.8 do not say it. */
    if (stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD && REAL(cuStreamGetDevice)(stream, device) == CUDA_SUCCESS) {
        return CUDA_SUCCESS;
    }
    return REAL(cuCtxGetDevice)(device);
}

static CUresult plain(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)pool;
    return REAL(cuMemAllocAsync)(pointer, bytes, stream);
}

static CUresult plain_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)pool;
    return REAL(cuMemAllocAsync_ptsz)(pointer, bytes, stream);
}

static CUresult from_current(call_t *call, CUdeviceptr *dptr, size_t bytesize, CUstream given, CUstream stream) {
    CUdevice device;
    CUmemoryPool pool;
    CUresult result = device_of(stream, &device);
    if (result == CUDA_SUCCESS) {
        result = REAL(cuDeviceGetMemPool)(&pool, device);
    }
    if (result != CUDA_SUCCESS || dptr == NULL || bytesize == 0) {
        return result != CUDA_SUCCESS ? result : call(dptr, bytesize, NULL, given);
    }
    return allocate(call, dptr, bytesize, pool, given, stream, device);
}

HOOK(cuMemAllocAsync)(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    return from_current(plain, dptr, bytesize, hStream, hStream);
}

HOOK(cuMemAllocAsync_ptsz)(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    return from_current(plain_ptsz, dptr, bytesize, hStream, hStream == NULL ? CU_STREAM_PER_THREAD : hStream);
}

/* A pool that was made elsewhere, by a private table say, has the device of the context. */
static CUresult from_pool(call_t *call, CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream given, CUstream stream) {
    struct gna_entry entry;
    CUdevice device;
    if (dptr == NULL || pool == NULL || bytesize == 0) {
        return call(dptr, bytesize, pool, given);
    }
    if (gna_get(GNA_POOL, key_of(pool), &entry)) {
        if (entry.flag == DESTROYED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        device = (CUdevice)entry.other;
    } else {
        CUresult result = device_of(stream, &device);
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    if (device < 0) {
        return call(dptr, bytesize, pool, given); /* a pool of the host's memory */
    }
    return allocate(call, dptr, bytesize, pool, given, stream, device);
}

static CUresult pool_plain(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return REAL(cuMemAllocFromPoolAsync)(pointer, bytes, pool, stream);
}

static CUresult pool_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return REAL(cuMemAllocFromPoolAsync_ptsz)(pointer, bytes, pool, stream);
}

HOOK(cuMemAllocFromPoolAsync)(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
    return from_pool(pool_plain, dptr, bytesize, pool, hStream, hStream);
}

HOOK(cuMemAllocFromPoolAsync_ptsz)(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
    return from_pool(pool_ptsz, dptr, bytesize, pool, hStream, hStream == NULL ? CU_STREAM_PER_THREAD : hStream);
}

static void know(CUmemoryPool pool, CUdevice device) {
    struct gna_entry entry;
    gna_attach();
    gna_enter(&gna_pools_lock);
    entry_of(pool, device, &entry);
    gna_leave(&gna_pools_lock);
}

/* Memory of the host costs nothing; managed memory moves to the GPU that works with it, so that such a pool counts for
 * the GPU from which it is first asked for memory. */
static void know_by_location(CUmemoryPool pool, const CUmemLocation *location, CUmemAllocationType kind) {
    int type = (int)location->type;
    if (kind == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        gna_movable_charged(INT64_C(1) << 48); /* the driver does not say what of a pool is where */
    }
    if (type == CU_MEM_LOCATION_TYPE_DEVICE) {
        know(pool, location->id);
    } else if (type == 6) {
        know(pool, location->localized.deviceId);
    } else if (kind != CU_MEM_ALLOCATION_TYPE_MANAGED) {
        know(pool, -1);
    }
}

HOOK(cuMemPoolCreate)(CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
    CUresult result = REAL(cuMemPoolCreate)(pool, poolProps);
    if (result == CUDA_SUCCESS) {
        know_by_location(*pool, &poolProps->location, poolProps->allocType);
    }
    return result;
}

HOOK(cuMemGetDefaultMemPool)(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type) {
    CUresult result = REAL(cuMemGetDefaultMemPool)(pool_out, location, type);
    if (result == CUDA_SUCCESS) {
        know_by_location(*pool_out, location, type);
    }
    return result;
}

HOOK(cuMemGetMemPool)(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    CUresult result = REAL(cuMemGetMemPool)(pool, location, type);
    if (result == CUDA_SUCCESS) {
        know_by_location(*pool, location, type);
    }
    return result;
}

HOOK(cuDeviceGetDefaultMemPool)(CUmemoryPool *pool_out, CUdevice dev) {
    CUresult result = REAL(cuDeviceGetDefaultMemPool)(pool_out, dev);
    if (result == CUDA_SUCCESS) {
        know(*pool_out, dev);
    }
    return result;
}

HOOK(cuDeviceGetMemPool)(CUmemoryPool *pool, CUdevice dev) {
    CUresult result = REAL(cuDeviceGetMemPool)(pool, dev);
    if (result == CUDA_SUCCESS) {
        know(*pool, dev);
    }
    return result;
}

/* Its memory stays until it is freed, says cuda.h, and after this call nobody could ask the driver how much that is. So a
 * pool that has some is kept until it has none, and is destroyed for the application alone. */
static bool outlives(CUmemoryPool pool, struct gna_entry *entry) {
    CUmemoryPool other = NULL;
    CUdevice device = (CUdevice)entry->other;
    bool is_own = REAL(cuDeviceGetDefaultMemPool)(&other, device) == CUDA_SUCCESS && other == pool;
    if (is_own || entry->record < 0) {
        return false;
    }
    REAL(cuMemPoolTrimTo)(pool, 0);
    settle(entry);
    if (entry->bytes > 0 && other != NULL && REAL(cuDeviceGetMemPool)(&pool, device) == CUDA_SUCCESS && key_of(pool) == entry->key) {
        REAL(cuDeviceSetMemPool)(device, other);
    }
    return entry->bytes > 0;
}

HOOK(cuMemPoolDestroy)(CUmemoryPool pool) {
    struct gna_entry entry;
    CUresult result = CUDA_SUCCESS;
    gna_attach();
    gna_enter(&gna_pools_lock);
    bool is_known = gna_get(GNA_POOL, key_of(pool), &entry);
    if (is_known && entry.flag == DESTROYED) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (is_known && outlives(pool, &entry)) {
        entry.flag = DESTROYED;
        gna_put(&entry);
    } else {
        result = REAL(cuMemPoolDestroy)(pool);
        if (result == CUDA_SUCCESS && gna_take(GNA_POOL, key_of(pool), &entry)) {
            gna_release(entry.record, entry.bytes);
            atomic_fetch_sub(&pools, 1);
        }
    }
    gna_leave(&gna_pools_lock);
    return result;
}

/* With the device's primary context. */
void gna_pools_gone(CUdevice device) {
    struct gna_entry pool;
    for (size_t place = 0; gna_next(GNA_POOL, &place, &pool);) {
        if (pool.other == (uint64_t)device && gna_take(GNA_POOL, pool.key, &pool)) {
            gna_release(pool.record, pool.bytes);
            atomic_fetch_sub(&pools, 1);
        }
    }
}

HOOK(cuMemPoolTrimTo)(CUmemoryPool pool, size_t minBytesToKeep) {
    CUresult result = REAL(cuMemPoolTrimTo)(pool, minBytesToKeep);
    gna_pools_settle();
    return result;
}

HOOK(cuMemPoolSetAttribute)(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
    if (attr == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC && value != NULL && *(int *)value == 0) {
        gna_freers_never_ask(); /* the pool may give a stream nothing that another freed before somebody waits */
    }
    CUresult result = REAL(cuMemPoolSetAttribute)(pool, attr, value);
    gna_pools_settle();
    return result;
}

#define WAIT(symbol, context, stream, ...)               \
    uint32_t began = gna_freers_now();                   \
    CUresult result = REAL(symbol)(__VA_ARGS__);         \
    if (result == CUDA_SUCCESS) {                        \
        gna_freers_waited(context, stream, began);       \
    }                                                    \
    gna_pools_settle();                                  \
    return result

HOOK(cuCtxSynchronize)(void) {
    WAIT(cuCtxSynchronize, NULL, NULL, );
}

HOOK(cuCtxSynchronize_v2)(CUcontext ctx) {
    WAIT(cuCtxSynchronize_v2, ctx, NULL, ctx);
}

HOOK(cuStreamSynchronize)(CUstream hStream) {
    WAIT(cuStreamSynchronize, NULL, &hStream, hStream);
}

HOOK(cuStreamSynchronize_ptsz)(CUstream hStream) {
    CUstream stream = hStream == NULL ? CU_STREAM_PER_THREAD : hStream;
    WAIT(cuStreamSynchronize_ptsz, NULL, &stream, hStream);
}

HOOK(cuEventSynchronize)(CUevent hEvent) {
    CUresult result = REAL(cuEventSynchronize)(hEvent);
    gna_pools_settle();
    return result;
}
