/* Pinned memory of the host, and what the driver knows of an address. */
#include "double.h"

#include <stdlib.h>
#include <sys/mman.h>

struct host {
    struct object base;
    size_t size;
    int registered;
};

static CUresult host_allocate(void **pointer, size_t bytes) {
    struct context *context;
    NEED(pointer != NULL && bytes > 0);
    TRY(current(&context));
    struct host *host = calloc(1, sizeof(*host));
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        free(host);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    host->size = bytes;
    objects_lock();
    object_add(&host->base, HOST, (uint64_t)(uintptr_t)memory);
    objects_unlock();
    *pointer = memory;
    return CUDA_SUCCESS;
}

CUresult model_cuMemAllocHost_v2(void **pp, size_t bytesize) {
    return host_allocate(pp, bytesize);
}

CUresult model_cuMemAllocHost(void **pp, unsigned int bytesize) {
    return host_allocate(pp, bytesize);
}

CUresult model_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    NEED((Flags & ~7u) == 0);
    return host_allocate(pp, bytesize);
}

static CUresult host_forget(void *pointer, int registered) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    objects_lock();
    struct host *host = (struct host *)object_find_handle(pointer, HOST);
    if (host != NULL && host->registered == registered) {
        object_remove(&host->base);
        if (!registered) {
            munmap(pointer, host->size);
        }
        free(host);
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

CUresult model_cuMemFreeHost(void *p) {
    return host_forget(p, 0);
}

CUresult model_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags) {
    NEED(p != NULL && bytesize > 0 && (Flags & ~15u) == 0);
    objects_lock();
    struct object *known = object_find_handle(p, HOST);
    if (known == NULL) {
        struct host *host = calloc(1, sizeof(*host));
        host->size = bytesize;
        host->registered = 1;
        object_add(&host->base, HOST, (uint64_t)(uintptr_t)p);
    }
    objects_unlock();
    return known == NULL ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult model_cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags) {
    return model_cuMemHostRegister_v2(p, bytesize, Flags);
}

CUresult model_cuMemHostUnregister(void *p) {
    return host_forget(p, 1);
}

CUresult model_cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
    NEED(pdptr != NULL && Flags == 0);
    *pdptr = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

/* The attributes that programs ask for to tell device memory from their own. */
CUresult model_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    CUresult result = CUDA_SUCCESS;
    NEED(data != NULL);
    objects_lock();
    struct memory *memory = memory_at(ptr);
    if (memory == NULL) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        *(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
    } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        *(int *)data = (int)memory->base.device;
    } else if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
        *(unsigned int *)data = memory->kind == SIM_CUDA_MEMORY_MANAGED;
    } else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
        *(CUdeviceptr *)data = memory->base.key;
    } else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
        *(size_t *)data = memory->size;
    } else if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) {
        *(void **)data = memory->pool;
    } else {
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    objects_unlock();
    return result;
}
