/* Physical memory of its own: it is free when the last of its handles and mappings is gone, whichever that is. */
#include "caps.h"

#include <string.h>

/* A handle's number may be used again while what it stood for lives on in a mapping: hence a number of our own.
 * GNA_HANDLE: handle -> number. GNA_PHYSICAL: number -> bytes, handles (count), mappings. GNA_MAPPING: address -> number.
 * GNA_TILE: one piece of an array -> number, with the array in its key's entry. */
static struct gna_mutex lock;
static uint64_t numbers;

static void drop(uint64_t number, unsigned handles, unsigned mappings) {
    struct gna_entry physical;
    if (!gna_take(GNA_PHYSICAL, number, &physical)) {
        return;
    }
    physical.count -= handles < physical.count ? handles : physical.count;
    physical.mappings -= mappings < physical.mappings ? mappings : physical.mappings;
    if (physical.count == 0 && physical.mappings == 0) {
        gna_release(physical.record, physical.bytes);
    } else {
        gna_put(&physical);
    }
}

static bool hold(uint64_t handle, int record, uint64_t bytes) {
    struct gna_entry physical = {.kind = GNA_PHYSICAL, .bytes = bytes, .record = record, .count = 1};
    struct gna_entry known = {.kind = GNA_HANDLE, .key = handle};
    gna_enter(&lock);
    known.other = physical.key = ++numbers;
    bool done = gna_put(&physical) && gna_put(&known);
    gna_leave(&lock);
    return done;
}

HOOK(cuMemCreate)(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    bool on_device;
    if (handle == NULL || prop == NULL) {
        return REAL(cuMemCreate)(handle, size, prop, flags);
    }
    int record = gna_location_record(&prop->location, &on_device);
    if (!on_device) {
        return REAL(cuMemCreate)(handle, size, prop, flags); /* memory of the host */
    }
    uint64_t bytes = gna_round_up(size, GNA_GRANULE);
    gna_attach();
    if (record < 0 || gna_reserve_hard(record, bytes) != CUDA_SUCCESS) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = REAL(cuMemCreate)(handle, size, prop, flags);
    if (result == CUDA_SUCCESS && !hold(*handle, record, bytes)) {
        REAL(cuMemRelease)(*handle);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        gna_release(record, bytes);
    }
    return result;
}

/* Of another process: what it exported within this container is charged there already. A file descriptor does not say
 * where it comes from, and so counts in full: the safe side. */
HOOK(cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType) {
    CUresult result = REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    CUmemAllocationProp prop;
    bool on_device = false, ours = (int)shHandleType == 8 && osHandle != NULL && gna_is_ours(osHandle, 64); /* 8: fabric */
    memset(&prop, 0, sizeof(prop));
    if (result != CUDA_SUCCESS || ours || REAL(cuMemGetAllocationPropertiesFromHandle)(&prop, *handle) != CUDA_SUCCESS) {
        return result;
    }
    int record = gna_location_record(&prop.location, &on_device);
    struct gna_entry known;
    if (on_device && gna_get(GNA_HANDLE, *handle, &known)) {
        gna_enter(&lock);
        if (gna_take(GNA_PHYSICAL, known.other, &known)) {
            known.count++;
            gna_put(&known);
        }
        gna_leave(&lock);
        return result;
    }
    /* Its size shows when it is mapped: until then nothing of it can be used. */
    if (on_device && !hold(*handle, record, 0)) {
        REAL(cuMemRelease)(*handle);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

HOOK(cuMemExportToShareableHandle)(void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
                                   unsigned long long flags) {
    CUresult result = REAL(cuMemExportToShareableHandle)(shareableHandle, handle, handleType, flags);
    if (result == CUDA_SUCCESS && (int)handleType == 8) {
        gna_exported(shareableHandle, 64);
    }
    return result;
}

HOOK(cuMemRelease)(CUmemGenericAllocationHandle handle) {
    struct gna_entry known, physical;
    gna_attach();
    gna_enter(&lock);
    CUresult result = REAL(cuMemRelease)(handle);
    if (result == CUDA_SUCCESS && gna_get(GNA_HANDLE, handle, &known)) {
        if (gna_get(GNA_PHYSICAL, known.other, &physical) && physical.count <= 1) {
            gna_take(GNA_HANDLE, handle, &known);
        }
        drop(known.other, 1, 0);
    }
    gna_leave(&lock);
    return result;
}

static bool mapping_at(uint64_t address, struct gna_entry *found) {
    for (size_t place = 0; !gna_get(GNA_MAPPING, address, found);) {
        /* Not at a start: somewhere inside one. */
        while (gna_next(GNA_MAPPING, &place, found)) {
            if (address >= found->key && address - found->key < found->bytes) {
                return true;
            }
        }
        return false;
    }
    return true;
}

HOOK(cuMemRetainAllocationHandle)(CUmemGenericAllocationHandle *handle, void *addr) {
    struct gna_entry mapping, physical;
    gna_attach();
    gna_enter(&lock);
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, addr);
    if (result == CUDA_SUCCESS && mapping_at((uintptr_t)addr, &mapping) && gna_take(GNA_PHYSICAL, mapping.other, &physical)) {
        struct gna_entry known = {.kind = GNA_HANDLE, .key = *handle, .other = mapping.other};
        physical.count++;
        gna_put(&physical);
        gna_put(&known);
    }
    gna_leave(&lock);
    return result;
}

/* Imported memory has no size until it is mapped: as much as was ever mapped of it counts. */
static CUresult charge_imported(struct gna_entry *physical, uint64_t end) {
    uint64_t bytes = gna_round_up(end, GNA_GRANULE);
    if (physical->flag == 0 || bytes <= physical->bytes) {
        return CUDA_SUCCESS;
    }
    CUresult result = gna_reserve_hard(physical->record, bytes - physical->bytes);
    if (result == CUDA_SUCCESS) {
        physical->bytes = bytes;
    }
    return result;
}

HOOK(cuMemMap)(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct gna_entry known, physical;
    gna_attach();
    gna_enter(&lock);
    bool ours = gna_get(GNA_HANDLE, handle, &known) && gna_get(GNA_PHYSICAL, known.other, &physical);
    if (ours && physical.bytes == 0) {
        physical.flag = 1;
    }
    CUresult result = ours ? charge_imported(&physical, (uint64_t)size + offset) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        result = REAL(cuMemMap)(ptr, size, offset, handle, flags);
        struct gna_entry mapping = {.kind = GNA_MAPPING, .key = ptr, .bytes = size, .other = known.other};
        if (ours) {
            physical.mappings += result == CUDA_SUCCESS && gna_put(&mapping);
            gna_put(&physical);
        }
    }
    gna_leave(&lock);
    return result;
}

HOOK(cuMemUnmap)(CUdeviceptr ptr, size_t size) {
    struct gna_entry mapping;
    gna_attach();
    gna_enter(&lock);
    CUresult result = REAL(cuMemUnmap)(ptr, size);
    for (uint64_t at = ptr; result == CUDA_SUCCESS && at - ptr < size;) {
        if (gna_take(GNA_MAPPING, at, &mapping)) {
            drop(mapping.other, 0, 1);
            at += mapping.bytes;
            continue;
        }
        /* A gap: on to the next mapping of the range. */
        uint64_t next = ptr + size;
        for (size_t place = 0; gna_next(GNA_MAPPING, &place, &mapping);) {
            next = mapping.key > at && mapping.key < next ? mapping.key : next;
        }
        at = next;
    }
    gna_leave(&lock);
    return result;
}

/* Pieces of sparse arrays: held until the array is destroyed, since an unmapping does not say what it unmaps. */
static void tiled(const CUarrayMapInfo *list, unsigned count) {
    struct gna_entry known, physical;
    gna_enter(&lock);
    for (unsigned index = 0; index < count; index++) {
        if (list[index].memOperationType != CU_MEM_OPERATION_TYPE_MAP || !gna_get(GNA_HANDLE, list[index].memHandle.memHandle, &known) ||
            !gna_take(GNA_PHYSICAL, known.other, &physical)) {
            continue;
        }
        struct gna_entry tile = {.kind = GNA_TILE, .key = ++numbers, .other = known.other, .bytes = (uintptr_t)list[index].resource.array};
        physical.mappings += gna_put(&tile);
        gna_put(&physical);
    }
    gna_leave(&lock);
}

void gna_tiles_gone(uint64_t array);

void gna_tiles_gone(uint64_t array) {
    struct gna_entry tile;
    gna_enter(&lock);
    for (size_t place = 0; gna_next(GNA_TILE, &place, &tile);) {
        if (tile.bytes == array && gna_take(GNA_TILE, tile.key, &tile)) {
            drop(tile.other, 0, 1);
        }
    }
    gna_leave(&lock);
}

HOOK(cuMemMapArrayAsync)(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    CUresult result = REAL(cuMemMapArrayAsync)(mapInfoList, count, hStream);
    if (result == CUDA_SUCCESS) {
        tiled(mapInfoList, count);
    }
    return result;
}

HOOK(cuMemMapArrayAsync_ptsz)(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    CUresult result = REAL(cuMemMapArrayAsync_ptsz)(mapInfoList, count, hStream);
    if (result == CUDA_SUCCESS) {
        tiled(mapInfoList, count);
    }
    return result;
}
