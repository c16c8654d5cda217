/* Virtual memory management: physical memory lives until the last release and unmap. */
#include "double.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SMALLEST (UINT64_C(64) << 10) /* granule, of any device */

struct physical {
    struct object base;
    uint64_t size;
    uint32_t releases; /* cuMemCreate, cuMemRetainAllocationHandle and imports */
    uint32_t mappings;
    int on_device;
    int32_t shared;
    CUmemAllocationProp properties;
};

struct mapping {
    struct object base;
    uint64_t size;
    struct physical *physical;
};

struct reservation {
    struct object base;
    uint64_t size;
};

struct ticket { /* what an exported descriptor holds */
    uint64_t magic;
    uint32_t number, generation;
    uint64_t size;
    CUmemAllocationProp properties;
};

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct physical *physical = (struct physical *)object_find(handle, HANDLE);
    return physical == NULL || physical->releases == 0 ? NULL : physical;
}

static void free_when_unused(struct physical *physical) {
    if (physical->releases > 0 || physical->mappings > 0) {
        return;
    }
    object_remove(&physical->base);
    if (physical->shared >= 0) {
        share_drop((uint32_t)physical->shared);
    } else if (physical->on_device) {
        discharge(physical->base.device, SIM_CUDA_MEMORY_PHYSICAL, physical->size);
    }
    free(physical);
}

CUresult model_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                             CUmemAllocationGranularity_flags option) {
    uint32_t index;
    int on_device;
    (void)option;
    NEED(granularity != NULL && prop != NULL);
    TRY(location_index(&prop->location, &index, &on_device));
    *granularity = granule(index);
    return CUDA_SUCCESS;
}

CUresult model_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                           unsigned long long flags) {
    uint32_t index;
    int on_device;
    NEED(handle != NULL && prop != NULL && size > 0 && flags == 0);
    NEED(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED);
    TRY(location_index(&prop->location, &index, &on_device));
    NEED(size % granule(index) == 0);
    objects_lock();
    if (on_device) {
        CUresult result = charge(index, SIM_CUDA_MEMORY_PHYSICAL, size);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            pools_squeeze(index);
            result = charge(index, SIM_CUDA_MEMORY_PHYSICAL, size);
        }
        if (result != CUDA_SUCCESS) {
            objects_unlock();
            return result;
        }
    }
    struct physical *physical = calloc(1, sizeof(*physical));
    *physical = (struct physical){.base.device = index, .size = size, .releases = 1, .on_device = on_device,
                                  .shared = -1, .properties = *prop};
    object_add(&physical->base, HANDLE, (uint64_t)(uintptr_t)physical);
    objects_unlock();
    *handle = physical->base.key;
    return CUDA_SUCCESS;
}

CUresult model_cuMemRelease(CUmemGenericAllocationHandle handle) {
    objects_lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL) {
        physical->releases--;
        free_when_unused(physical);
    }
    objects_unlock();
    return physical == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    NEED(handle != NULL);
    objects_lock();
    struct mapping *mapping = (struct mapping *)object_find_handle(addr, MAPPING);
    if (mapping != NULL) {
        mapping->physical->releases++;
        *handle = mapping->physical->base.key;
    }
    objects_unlock();
    return mapping == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                   unsigned long long flags) {
    (void)addr; /* a hint, which the driver need not follow */
    NEED(ptr != NULL && size > 0 && size % SMALLEST == 0 && flags == 0);
    NEED((alignment & (alignment - 1)) == 0);
    struct reservation *reservation = calloc(1, sizeof(*reservation));
    reservation->size = size;
    objects_lock();
    *ptr = address_take(size, alignment > ALIGNMENT ? alignment : ALIGNMENT);
    object_add(&reservation->base, RESERVATION, *ptr);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    objects_lock();
    struct reservation *reservation = (struct reservation *)object_find(ptr, RESERVATION);
    int known = reservation != NULL && reservation->size == size;
    if (known) {
        object_remove(&reservation->base);
        free(reservation);
    }
    objects_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

struct span {
    uint64_t address, size;
    uint64_t covered;
    int inside;
};

static void inside(struct object *object, void *data) {
    struct span *span = data;
    struct reservation *reservation = (struct reservation *)object;
    span->inside |= span->address >= object->key && span->address + span->size <= object->key + reservation->size;
}

static void cover(struct object *object, void *data) {
    struct span *span = data;
    struct mapping *mapping = (struct mapping *)object;
    if (object->key >= span->address && object->key + mapping->size <= span->address + span->size) {
        span->covered += mapping->size;
    } else if (object->key < span->address + span->size && span->address < object->key + mapping->size) {
        span->inside = 0; /* a part of a mapping */
    }
}

CUresult model_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                        unsigned long long flags) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    NEED(size > 0 && flags == 0);
    objects_lock();
    struct physical *physical = physical_of(handle);
    uint64_t unit = physical == NULL ? SMALLEST : granule(physical->base.device);
    struct span reserved = {.address = ptr, .size = size}, taken = {.address = ptr, .size = size, .inside = 1};
    objects_each(RESERVATION, inside, &reserved);
    objects_each(MAPPING, cover, &taken);
    if (physical != NULL && size % unit == 0 && offset % unit == 0 && ptr % unit == 0 && offset <= physical->size && size <= physical->size - offset && reserved.inside && taken.inside &&
        taken.covered == 0) {
        struct mapping *mapping = calloc(1, sizeof(*mapping));
        mapping->size = size;
        mapping->physical = physical;
        physical->mappings++;
        object_add(&mapping->base, MAPPING, ptr);
        result = CUDA_SUCCESS;
    }
    objects_unlock();
    return result;
}

static void unmap(struct object *object, void *data) {
    struct span *span = data;
    struct mapping *mapping = (struct mapping *)object;
    if (object->key >= span->address && object->key + mapping->size <= span->address + span->size) {
        object_remove(object);
        mapping->physical->mappings--;
        free_when_unused(mapping->physical);
        free(mapping);
    }
}

CUresult model_cuMemUnmap(CUdeviceptr ptr, size_t size) {
    objects_lock();
    struct span span = {.address = ptr, .size = size, .inside = 1};
    objects_each(MAPPING, cover, &span);
    int whole = span.inside && span.covered == size && size > 0;
    if (whole) {
        objects_each(MAPPING, unmap, &span);
    }
    objects_unlock();
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult model_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    NEED(desc != NULL && count > 0);
    objects_lock();
    struct span span = {.address = ptr, .size = size, .inside = 1};
    objects_each(MAPPING, cover, &span);
    objects_unlock();
    return span.covered == size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult model_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    NEED(prop != NULL);
    objects_lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL) {
        *prop = physical->properties;
    }
    objects_unlock();
    return physical == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                            CUmemAllocationHandleType handleType, unsigned long long flags) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    NEED(shareableHandle != NULL && flags == 0);
    if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    objects_lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL && physical->on_device &&
        (physical->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
        if (physical->shared < 0) {
            physical->shared = share(physical->base.device, SIM_CUDA_MEMORY_PHYSICAL, physical->size);
        }
        int descriptor = physical->shared < 0 ? -1 : (int)syscall(SYS_memfd_create, "cuda-memory", 1u /* MFD_CLOEXEC */);
        if (descriptor >= 0) {
            struct ticket ticket = {.magic = SIM_CUDA_MAGIC, .number = (uint32_t)physical->shared, .size = physical->size,
                                    .generation = cuda_machine->shared[physical->shared].generation,
                                    .properties = physical->properties};
            if (pwrite(descriptor, &ticket, sizeof(ticket), 0) == (ssize_t)sizeof(ticket)) {
                *(int *)shareableHandle = descriptor;
                result = CUDA_SUCCESS;
            }
        }
    }
    objects_unlock();
    return result;
}

CUresult model_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                              CUmemAllocationHandleType shHandleType) {
    struct ticket ticket;
    uint32_t device, kind;
    uint64_t size;
    NEED(handle != NULL);
    if (shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    NEED(pread((int)(intptr_t)osHandle, &ticket, sizeof(ticket), 0) == (ssize_t)sizeof(ticket));
    NEED(ticket.magic == SIM_CUDA_MAGIC);
    int32_t shared = share_join(ticket.number, ticket.generation, &device, &kind, &size);
    NEED(shared >= 0);
    struct physical *physical = calloc(1, sizeof(*physical));
    *physical = (struct physical){.base.device = device, .size = size, .releases = 1, .on_device = 1, .shared = shared,
                                  .properties = ticket.properties};
    objects_lock();
    object_add(&physical->base, HANDLE, (uint64_t)(uintptr_t)physical);
    objects_unlock();
    *handle = physical->base.key;
    return CUDA_SUCCESS;
}
