/* Stream-ordered memory: pools reserve in chunks and give back at synchronisation, trim and destruction. */
#include "double.h"

#include <stdlib.h>

static struct pool *default_pool[SIM_CUDA_DEVICES];
static struct pool *chosen_pool[SIM_CUDA_DEVICES];

static struct pool *make(uint32_t device, int own) {
    struct pool *pool = calloc(1, sizeof(*pool));
    pool->base.device = device;
    pool->own = (uint32_t)own;
    object_add(&pool->base, POOL, (uint64_t)(uintptr_t)pool);
    return pool;
}

static struct pool *default_of(uint32_t device) {
    if (default_pool[device] == NULL) {
        default_pool[device] = make(device, 1);
    }
    return default_pool[device];
}

static struct pool *current_of(uint32_t device) {
    return chosen_pool[device] != NULL ? chosen_pool[device] : default_of(device);
}

/* Freed, and no longer "used" from the call on; nobody has it before its stream gets there, but for an allocation on that
 * stream, which can have it at once: both as an H200 was seen to do, driver 580. */
struct pending {
    struct pending *next;
    struct pool *pool;
    const struct stream *stream;
    uint64_t bytes, due_ns;
};
static struct pending *pendings;

static void let_go(struct pool *pool) {
    if (pool->is_gone && pool->used + pool->held == 0) {
        discharge(pool->base.device, SIM_CUDA_MEMORY_POOL, pool->reserved);
        pool->reserved = 0;
    }
}

/* The object lock is held. */
static void free_due(const struct stream *stream) {
    for (struct pending **at = &pendings; *at != NULL;) {
        struct pending *found = *at;
        if ((stream != NULL && found->stream == stream) || now_ns() >= found->due_ns) {
            *at = found->next;
            found->pool->held -= found->bytes;
            let_go(found->pool);
            free(found);
        } else {
            at = &found->next;
        }
    }
}

void pool_free_behind(struct memory *memory, const struct stream *stream, uint64_t due_ns) {
    struct pending *made = calloc(1, sizeof(*made));
    *made = (struct pending){.next = pendings, .pool = memory->pool, .stream = stream, .due_ns = due_ns, .bytes = round_up(memory->size, 512)};
    pendings = made;
    made->pool->used -= made->bytes;
    made->pool->held += made->bytes;
    object_remove(&memory->base);
    free(memory);
}

/* Another stream may get its address, and is another one. The object lock is held. */
void pool_stream_gone(const struct stream *stream) {
    for (struct pending *each = pendings; each != NULL; each = each->next) {
        each->stream = each->stream == stream ? NULL : each->stream;
    }
}

static void keep(struct pool *pool, uint64_t bytes) {
    free_due(NULL);
    uint64_t kept = pool->used + pool->held, left = round_up(kept > bytes ? kept : bytes, granule(pool->base.device));
    if (left < pool->reserved) {
        discharge(pool->base.device, SIM_CUDA_MEMORY_POOL, pool->reserved - left);
        pool->reserved = left;
    }
}

struct trim {
    uint32_t device;
    int all;
};

static void trim_one(struct object *object, void *data) {
    struct trim *trim = data;
    struct pool *pool = (struct pool *)object;
    if (object->device == trim->device) {
        keep(pool, trim->all ? 0 : pool->threshold);
    }
}

void pools_trim(uint32_t device) {
    struct trim trim = {.device = device};
    objects_each(POOL, trim_one, &trim);
}

void pools_squeeze(uint32_t device) {
    struct trim trim = {.device = device, .all = 1};
    objects_each(POOL, trim_one, &trim);
}

/* The object lock is held. */
static CUresult reserve(struct pool *pool, uint64_t bytes) {
    uint32_t device = pool->base.device;
    if (pool->maximum > 0 && pool->used + bytes > pool->maximum) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t needed = pool->used + pool->held + bytes;
    if (needed > pool->reserved) {
        uint64_t growth = round_up(needed - pool->reserved, cuda_machine->devices[device].pool_chunk);
        CUresult result = charge(device, SIM_CUDA_MEMORY_POOL, growth);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            pools_squeeze(device);
            growth = round_up(pool->used + pool->held + bytes - pool->reserved, granule(device));
            result = charge(device, SIM_CUDA_MEMORY_POOL, growth);
        }
        TRY(result);
        pool->reserved += growth;
    }
    pool->used += bytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *dptr, uint64_t bytes, struct pool *pool, const struct stream *stream) {
    free_due(stream);
    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){.base.device = pool->base.device, .kind = SIM_CUDA_MEMORY_POOL, .size = bytes, .shared = -1, .pool = pool};
    CUresult result = reserve(pool, round_up(bytes, 512));
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    *dptr = address_take(bytes, 512);
    object_add(&memory->base, MEMORY, *dptr);
    return CUDA_SUCCESS;
}

/* "If any pointers obtained from this pool haven't been freed [...] when cuMemPoolDestroy is invoked, the function will
 * return immediately and the resources associated with the pool will be released automatically once there are no more
 * outstanding allocations": CUDA Driver API, Stream Ordered Memory Allocator, cuMemPoolDestroy. */
static void retire(struct pool *pool) {
    uint32_t device = pool->base.device;
    if (chosen_pool[device] == pool) {
        chosen_pool[device] = NULL; /* "sets the default mempool as the current mempool for that device": the same */
    }
    pool->is_gone = 1;
    let_go(pool);
    object_retire(&pool->base);
}

void pool_give_back(struct memory *memory) {
    memory->pool->used -= round_up(memory->size, 512);
    let_go(memory->pool);
}

static void free_of_device(struct object *object, void *data) {
    struct memory *memory = (struct memory *)object;
    if (memory->pool != NULL && object->device == *(uint32_t *)data) {
        memory_free(memory);
    }
}

static void retire_of_device(struct object *object, void *data) {
    if (object->device == *(uint32_t *)data) {
        retire((struct pool *)object);
    }
}

/* "Explicitly destroys and cleans up all resources associated with the current device in the current process": CUDA Driver
 * API, Primary Context Management, cuDevicePrimaryCtxReset. */
void pools_reset(uint32_t device) {
    for (struct pending *each = pendings; each != NULL; each = each->next) {
        each->due_ns = each->pool->base.device == device ? 0 : each->due_ns;
    }
    free_due(NULL);
    objects_each(MEMORY, free_of_device, &device);
    objects_each(POOL, retire_of_device, &device);
    default_pool[device] = NULL;
}

CUresult model_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    struct stream *stream;
    struct context *context;
    NEED(dptr != NULL);
    TRY(current(&context));
    TRY(stream_of(hStream, &stream));
    if (bytesize == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->capture != NULL) {
        return graph_capture_alloc(stream, context->base.device, bytesize, dptr);
    }
    objects_lock();
    CUresult result = allocate(dptr, bytesize, current_of(context->base.device), stream);
    objects_unlock();
    return result;
}

CUresult model_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
    struct stream *stream;
    struct context *context;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    NEED(dptr != NULL && bytesize > 0);
    TRY(current(&context));
    TRY(stream_of(hStream, &stream));
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    if (known != NULL && stream->capture == NULL) {
        result = allocate(dptr, bytesize, known, stream);
    }
    objects_unlock();
    return known != NULL && stream->capture != NULL ? graph_capture_alloc(stream, known->base.device, bytesize, dptr) : result;
}

CUresult model_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
    uint32_t index;
    int on_device;
    NEED(pool != NULL && poolProps != NULL);
    TRY(location_index(&poolProps->location, &index, &on_device));
    if (!on_device) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    objects_lock();
    struct pool *made = make(index, 0);
#if CUDA_VERSION >= 12020
    made->maximum = poolProps->maxSize;
#endif
    objects_unlock();
    *pool = (CUmemoryPool)made;
    return CUDA_SUCCESS;
}

CUresult model_cuMemPoolDestroy(CUmemoryPool pool) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    if (known != NULL && !known->own) {
        retire(known);
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

CUresult model_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    if (known != NULL) {
        keep(known, minBytesToKeep);
    }
    objects_unlock();
    return known == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult attribute(struct pool *pool, CUmemPool_attribute attr, void *value, int set) {
    free_due(NULL);
    uint64_t *number;
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        if (set) {
            pool->settings[attr] = *(int *)value;
        } else {
            *(int *)value = pool->settings[attr];
        }
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        number = &pool->threshold;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        NEED(!set);
        number = &pool->reserved;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        number = &pool->reserved_high;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        NEED(!set);
        number = &pool->used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        number = &pool->used_high;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!set) {
        *(uint64_t *)value = *number;
    } else if (attr == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        *number = *(uint64_t *)value;
    } else {
        NEED(*(uint64_t *)value == 0); /* a high watermark can only be reset */
        *number = attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? pool->used : pool->reserved;
    }
    return CUDA_SUCCESS;
}

CUresult model_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
    NEED(value != NULL);
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    CUresult result = known == NULL ? CUDA_ERROR_INVALID_VALUE : attribute(known, attr, value, 0);
    objects_unlock();
    return result;
}

CUresult model_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
    NEED(value != NULL);
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    CUresult result = known == NULL ? CUDA_ERROR_INVALID_VALUE : attribute(known, attr, value, 1);
    objects_unlock();
    return result;
}

CUresult model_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev) {
    uint32_t index;
    NEED(pool_out != NULL);
    TRY(device_index(dev, &index));
    objects_lock();
    *pool_out = (CUmemoryPool)default_of(index);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
    uint32_t index;
    NEED(pool != NULL);
    TRY(device_index(dev, &index));
    objects_lock();
    *pool = (CUmemoryPool)current_of(index);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
    uint32_t index;
    TRY(device_index(dev, &index));
    objects_lock();
    struct pool *known = (struct pool *)object_find_handle(pool, POOL);
    int fits = known != NULL && known->base.device == index;
    if (fits) {
        chosen_pool[index] = known;
    }
    objects_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
