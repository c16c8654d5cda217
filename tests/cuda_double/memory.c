/* Linear, managed and host memory. */
#include "double.h"

#include <stdlib.h>
#include <sys/mman.h>

/* What is below 1 MiB shares granules with others of its kind and process: the sum is rounded. */
static uint64_t small_sum[SIM_CUDA_DEVICES][SIM_CUDA_KINDS];

static CUresult charge_squeezing(uint32_t device, uint32_t kind, uint64_t bytes) {
    CUresult result = charge(device, kind, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        pools_squeeze(device);
        result = charge(device, kind, bytes);
    }
    return result;
}

CUresult memory_charge(struct memory *memory) {
    uint32_t device = memory->base.device;
    uint64_t unit = granule(device);
    if (memory->size >= SMALL) {
        memory->charged = round_up(memory->size, unit);
        return charge_squeezing(device, memory->kind, memory->charged);
    }
    uint64_t *sum = &small_sum[device][memory->kind];
    uint64_t size = round_up(memory->size, 512);
    TRY(charge_squeezing(device, memory->kind, round_up(*sum + size, unit) - round_up(*sum, unit)));
    *sum += size;
    return CUDA_SUCCESS;
}

void memory_discharge(struct memory *memory) {
    uint32_t device = memory->base.device;
    if (memory->shared >= 0) {
        share_drop((uint32_t)memory->shared);
    } else if (memory->charged > 0) {
        discharge(device, memory->kind, memory->charged);
    } else if (memory->size > 0) {
        uint64_t *sum = &small_sum[device][memory->kind];
        uint64_t left = *sum - round_up(memory->size, 512);
        discharge(device, memory->kind, round_up(*sum, granule(device)) - round_up(left, granule(device)));
        *sum = left;
    }
}

void memory_free(struct memory *memory) {
    object_remove(&memory->base);
    if (memory->exec != NULL) {
        graph_memory_freed(memory);
    } else if (memory->pool != NULL) {
        pool_give_back(memory);
    } else {
        memory_discharge(memory);
    }
    if (memory->host != NULL) {
        munmap(memory->host, memory->size);
    }
    free(memory);
}

struct search {
    uint64_t address;
    struct memory *found;
};

static void look(struct object *object, void *data) {
    struct search *search = data;
    struct memory *memory = (struct memory *)object;
    if (search->address >= object->key && search->address - object->key < memory->size) {
        search->found = memory;
    }
}

struct memory *memory_at(uint64_t address) {
    struct search search = {.address = address};
    struct object *exact = object_find(address, MEMORY);
    if (exact != NULL) {
        return (struct memory *)exact;
    }
    objects_each(MEMORY, look, &search);
    return search.found;
}

static CUresult allocate(uint32_t kind, uint64_t bytes, int narrow, uint64_t *address) {
    struct context *context;
    NEED(bytes > 0);
    TRY(current(&context));
    TRY(capture_forbids()); /* "a call to cudaMalloc may be unsafe": cuda.h, of cuThreadExchangeStreamCaptureMode */
    struct memory *memory = calloc(1, sizeof(*memory));
    *memory = (struct memory){.base.device = context->base.device, .kind = kind, .size = bytes, .shared = -1, .context = context};
    objects_lock();
    CUresult result = memory_charge(memory);
    if (result == CUDA_SUCCESS) {
        uint64_t place = narrow ? address_take_narrow(bytes) : address_take(bytes, bytes >= SMALL ? ALIGNMENT : 512);
        if (kind == SIM_CUDA_MEMORY_MANAGED) {
            memory->host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            place = memory->host == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)memory->host;
        }
        if (place == 0) {
            memory_discharge(memory);
            memory->host = NULL;
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            object_add(&memory->base, MEMORY, *address = place);
        }
    }
    objects_unlock();
    if (result != CUDA_SUCCESS) {
        free(memory);
    }
    return result;
}

CUresult model_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    uint64_t address;
    NEED(dptr != NULL);
    TRY(allocate(SIM_CUDA_MEMORY_LINEAR, bytesize, 0, &address));
    *dptr = address;
    return CUDA_SUCCESS;
}

CUresult model_cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    uint64_t address;
    NEED(dptr != NULL);
    TRY(allocate(SIM_CUDA_MEMORY_LINEAR, bytesize, 1, &address));
    *dptr = (CUdeviceptr_v1)address;
    return CUDA_SUCCESS;
}

CUresult model_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                  unsigned int ElementSizeBytes) {
    uint64_t address, pitch = round_up(WidthInBytes, 512);
    NEED(dptr != NULL && pPitch != NULL && WidthInBytes > 0 && Height > 0);
    NEED(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16);
    NEED(WidthInBytes <= UINT64_MAX - 512 && Height <= UINT64_MAX / pitch);
    TRY(allocate(SIM_CUDA_MEMORY_LINEAR, pitch * Height, 0, &address));
    *dptr = address;
    *pPitch = pitch;
    return CUDA_SUCCESS;
}

CUresult model_cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes,
                               unsigned int Height, unsigned int ElementSizeBytes) {
    uint64_t address, pitch = round_up(WidthInBytes, 512);
    NEED(dptr != NULL && pPitch != NULL && WidthInBytes > 0 && Height > 0 && ElementSizeBytes > 0);
    TRY(allocate(SIM_CUDA_MEMORY_LINEAR, pitch * Height, 1, &address));
    *dptr = (CUdeviceptr_v1)address;
    *pPitch = (unsigned int)pitch;
    return CUDA_SUCCESS;
}

CUresult model_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    uint64_t address;
    NEED(dptr != NULL && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
    TRY(allocate(SIM_CUDA_MEMORY_MANAGED, bytesize, 0, &address));
    *dptr = address;
    return CUDA_SUCCESS;
}

static CUresult free_at(uint64_t address) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    objects_lock();
    struct memory *memory = (struct memory *)object_find(address, MEMORY);
    if (memory != NULL && !memory->opened) {
        memory_free(memory);
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

CUresult model_cuMemFree_v2(CUdeviceptr dptr) {
    return free_at(dptr);
}

CUresult model_cuMemFree(CUdeviceptr_v1 dptr) {
    return free_at(dptr);
}

CUresult model_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    if (stream->capture != NULL) {
        return graph_capture_free(stream, dptr);
    }
    objects_lock();
    struct memory *memory = (struct memory *)object_find(dptr, MEMORY);
    uint64_t due = stream_busy_until(stream);
    int waits = due > 0 && memory != NULL && memory->pool != NULL && memory->exec == NULL;
    if (waits) {
        pool_free_behind(memory, stream, due);
    }
    objects_unlock();
    return waits ? CUDA_SUCCESS : free_at(dptr);
}

CUresult model_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    CUresult result = CUDA_ERROR_NOT_FOUND;
    objects_lock();
    struct memory *memory = memory_at(dptr);
    if (memory != NULL) {
        if (pbase != NULL) {
            *pbase = memory->base.key;
        }
        if (psize != NULL) {
            *psize = memory->size;
        }
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

CUresult model_cuMemGetAddressRange(CUdeviceptr_v1 *pbase, unsigned int *psize, CUdeviceptr_v1 dptr) {
    CUdeviceptr base;
    size_t size;
    TRY(model_cuMemGetAddressRange_v2(&base, &size, dptr));
    if (pbase != NULL) {
        *pbase = (CUdeviceptr_v1)base;
    }
    if (psize != NULL) {
        *psize = (unsigned int)size;
    }
    return CUDA_SUCCESS;
}

CUresult model_cuMemGetInfo_v2(size_t *free, size_t *total) {
    struct context *context;
    TRY(current(&context));
    uint64_t all = cuda_machine->devices[context->base.device].total;
    uint64_t used = used_bytes(context->base.device);
    if (free != NULL) {
        *free = all - used;
    }
    if (total != NULL) {
        *total = all;
    }
    return CUDA_SUCCESS;
}

CUresult model_cuMemGetInfo(unsigned int *free, unsigned int *total) {
    size_t all_free, all;
    TRY(model_cuMemGetInfo_v2(&all_free, &all));
    if (free != NULL) {
        *free = all_free > UINT32_MAX ? UINT32_MAX : (unsigned int)all_free;
    }
    if (total != NULL) {
        *total = all > UINT32_MAX ? UINT32_MAX : (unsigned int)all;
    }
    return CUDA_SUCCESS;
}
