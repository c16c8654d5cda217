/* What a program may take from a GPU, by every class of allocation, and give back again. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#include <cuda.h>

#define MIB (UINT64_C(1) << 20)
#define HOLDINGS 6
#define NOTHING ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n" /* a driver compiles it */

enum class { LINEAR, SMALL, PITCH, MANAGED, PHYSICAL, POOL, ARRAY, MIPMAP, GRAPH, CODE, CLASSES };
static const char *const names[CLASSES] = {"linear", "small", "pitch", "managed", "physical",
                                           "pool", "array", "mipmap", "graph", "code"};

static _Thread_local unsigned seed;
static void *driver;

struct holding {
    int used;
    enum class class;
    CUdeviceptr address;
    uint64_t size;
    void *handle;
    CUgraph graph;
};

/* Looked up by name at each call, as a program with late binding does: the library hooks dlsym. */
#define CALL(symbol) ((__typeof__(&symbol))dlsym(driver, NAME(symbol)))
#define NAME(symbol) NAME_(symbol)
#define NAME_(symbol) #symbol

static uint32_t dice(uint32_t sides) {
    return (uint32_t)rand_r(&seed) % sides;
}

static CUresult take_physical(struct holding *holding) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle handle;
    CUresult result = CALL(cuMemCreate)(&handle, holding->size, &properties, 0);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    CALL(cuMemAddressReserve)(&holding->address, holding->size, 0, 0, 0);
    CALL(cuMemMap)(holding->address, holding->size, 0, handle, 0);
    return CALL(cuMemRelease)(handle); /* the mapping keeps it */
}

static CUresult take_graph(struct holding *holding) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.bytesize = holding->size};
    CUgraphNode node, last;
    params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CALL(cuGraphCreate)(&holding->graph, 0);
    CALL(cuGraphAddMemAllocNode)(&node, holding->graph, NULL, 0, &params);
    CALL(cuGraphAddMemFreeNode)(&last, holding->graph, &node, 1, params.dptr);
    CUresult result = CALL(cuGraphInstantiateWithFlags)((CUgraphExec *)&holding->handle, holding->graph, 0);
    if (result == CUDA_SUCCESS) {
        result = CALL(cuGraphLaunch)(holding->handle, NULL);
        if (result != CUDA_SUCCESS) {
            CALL(cuGraphExecDestroy)(holding->handle);
        }
    }
    if (result != CUDA_SUCCESS) {
        CALL(cuGraphDestroy)(holding->graph);
    }
    return result;
}

static CUresult take(struct holding *holding) {
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = 1024, .Height = 256 * (1 + dice(16)), .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    size_t pitch;
    holding->size = 2 * MIB * (1 + dice(24));
    switch (holding->class) {
    case LINEAR:
        return CALL(cuMemAlloc)(&holding->address, holding->size);
    case SMALL:
        return CALL(cuMemAlloc)(&holding->address, 1024 * (1 + dice(1000)));
    case PITCH:
        return CALL(cuMemAllocPitch)(&holding->address, &pitch, 1000 + dice(9000), 1 + dice(4000), 4);
    case MANAGED:
        return CALL(cuMemAllocManaged)(&holding->address, holding->size, CU_MEM_ATTACH_GLOBAL);
    case PHYSICAL:
        return take_physical(holding);
    case POOL:
        return CALL(cuMemAllocAsync)(&holding->address, holding->size + dice(4096), NULL);
    case ARRAY:
        return CALL(cuArray3DCreate)((CUarray *)&holding->handle, &shape);
    case MIPMAP:
        return CALL(cuMipmappedArrayCreate)((CUmipmappedArray *)&holding->handle, &shape, 8);
    case GRAPH:
        return take_graph(holding);
    default:
        return CALL(cuModuleLoadData)((CUmodule *)&holding->handle, NOTHING);
    }
}

static void give_back(struct holding *holding) {
    switch (holding->class) {
    case PHYSICAL:
        CALL(cuMemUnmap)(holding->address, holding->size);
        CALL(cuMemAddressFree)(holding->address, holding->size);
        break;
    case POOL:
        CALL(cuMemFreeAsync)(holding->address, NULL);
        if (dice(2)) {
            CALL(cuStreamSynchronize)(NULL);
        }
        break;
    case ARRAY:
        CALL(cuArrayDestroy)(holding->handle);
        break;
    case MIPMAP:
        CALL(cuMipmappedArrayDestroy)(holding->handle);
        break;
    case GRAPH:
        CALL(cuGraphExecDestroy)(holding->handle);
        CALL(cuGraphDestroy)(holding->graph);
        CALL(cuDeviceGraphMemTrim)(0);
        break;
    case CODE:
        CALL(cuModuleUnload)(holding->handle);
        break;
    default:
        CALL(cuMemFree)(holding->address);
    }
}

/* Gives back what is held, or tries to take something: then true, and `result` is what came of it. */
static inline int exchange(struct holding *holding, CUresult *result) {
    if (holding->used) {
        give_back(holding);
        holding->used = 0;
        return 0;
    }
    holding->class = (enum class)dice(CLASSES);
    *result = take(holding);
    holding->used = *result == CUDA_SUCCESS;
    return 1;
}
