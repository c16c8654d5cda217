/* Instantiated graphs and the memory behind their nodes: it comes at upload or launch and stays until a trim. */
#include "double.h"
#include "graph.h"

#include <stdlib.h>

/* Per GPU: memory that graphs had and no longer use, what is used, and the marks. */
static struct {
    uint64_t idle, reserved, reserved_high, used, used_high;
} pool[SIM_CUDA_DEVICES];

struct reading {
    struct allocation *live;
    uint32_t count;
    uint64_t sum, most, duration_ns;
    uint64_t *frees;
    uint32_t free_count;
};

static void read_alloc(struct reading *reading, const struct node *node) {
    reading->live = realloc(reading->live, (reading->count + 1) * sizeof(*reading->live));
    reading->live[reading->count++] = (struct allocation){node->address, node->bytes};
    reading->sum += round_up(node->bytes, 512);
    reading->most = reading->sum > reading->most ? reading->sum : reading->most;
}

static void read_free(struct reading *reading, const struct node *node) {
    for (uint32_t number = 0; number < reading->count; number++) {
        if (reading->live[number].address == node->address) {
            reading->sum -= round_up(reading->live[number].bytes, 512);
            reading->live[number] = reading->live[--reading->count];
            return;
        }
    }
    reading->frees = realloc(reading->frees, (reading->free_count + 1) * sizeof(*reading->frees));
    reading->frees[reading->free_count++] = node->address;
}

static void read_nodes(struct reading *reading, const struct graph *graph) {
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        reading->duration_ns += node->duration_ns;
        if (node->type == NODE_ALLOC) {
            read_alloc(reading, node);
        } else if (node->type == NODE_FREE) {
            read_free(reading, node);
        } else if (node->type == NODE_CHILD) {
            read_nodes(reading, node->child);
        }
    }
}

/* The memory of each executable is taken in steps, as a pool's is: 32 MiB on an H200, even for 8. */
static uint64_t footprint(uint32_t device, uint64_t bytes) {
    uint64_t step = cuda_machine->devices[device].pool_chunk;
    return round_up(bytes, step > granule(device) ? step : granule(device));
}

static CUresult instantiate(CUgraphExec *handle, CUgraph hGraph, uint64_t flags) {
    NEED(handle != NULL);
    objects_lock();
    struct graph *graph = (struct graph *)object_find_handle(hGraph, GRAPH);
    if (graph != NULL) {
        struct reading reading = {0};
        struct exec *exec = calloc(1, sizeof(*exec));
        read_nodes(&reading, graph);
        *exec = (struct exec){.base.device = graph->base.device, .duration_ns = reading.duration_ns,
                              .footprint = footprint(graph->base.device, reading.most), .left = reading.live,
                              .left_count = reading.count, .frees = reading.frees, .free_count = reading.free_count,
                              .frees_at_launch = (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0};
        object_add(&exec->base, EXEC, (uint64_t)(uintptr_t)exec);
        *handle = (CUgraphExec)exec;
    }
    objects_unlock();
    return graph == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags) {
    return instantiate(phGraphExec, hGraph, flags);
}

CUresult model_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                     size_t bufferSize) {
    (void)phErrorNode;
    NEED(bufferSize == 0 || logBuffer != NULL);
    return instantiate(phGraphExec, hGraph, 0);
}

CUresult model_cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                  size_t bufferSize) {
    return model_cuGraphInstantiate_v2(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

#ifdef HAVE_cuGraphInstantiateWithParams
CUresult model_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                            CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    NEED(instantiateParams != NULL);
    TRY(instantiate(phGraphExec, hGraph, instantiateParams->flags));
    instantiateParams->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return instantiateParams->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
               ? model_cuGraphUpload(*phGraphExec, instantiateParams->hUploadStream)
               : CUDA_SUCCESS;
}
#endif

/* As in a service that decodes for another number of requests: the same nodes, other lengths. */
static CUresult update(CUgraphExec hExec, CUgraph hGraph) {
    objects_lock();
    struct exec *exec = (struct exec *)object_find_handle(hExec, EXEC);
    struct graph *graph = (struct graph *)object_find_handle(hGraph, GRAPH);
    CUresult result = exec == NULL || graph == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        struct reading reading = {0};
        read_nodes(&reading, graph);
        exec->duration_ns = reading.duration_ns;
        free(reading.live);
        free(reading.frees);
    }
    objects_unlock();
    return result;
}

CUresult model_cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                                 CUgraphExecUpdateResult *updateResult_out) {
    (void)hErrorNode_out;
    NEED(updateResult_out != NULL);
    return update(hGraphExec, hGraph);
}

#ifdef HAVE_cuGraphExecUpdate_v2
CUresult model_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo) {
    NEED(resultInfo != NULL);
    return update(hGraphExec, hGraph);
}
#endif

static CUresult grow(uint32_t device, uint64_t bytes) {
    uint64_t reused = bytes < pool[device].idle ? bytes : pool[device].idle;
    CUresult result = charge(device, SIM_CUDA_MEMORY_GRAPH, bytes - reused);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        pools_squeeze(device);
        result = charge(device, SIM_CUDA_MEMORY_GRAPH, bytes - reused);
    }
    TRY(result);
    pool[device].idle -= reused;
    pool[device].reserved += bytes - reused;
    if (pool[device].reserved > pool[device].reserved_high) {
        pool[device].reserved_high = pool[device].reserved;
    }
    return CUDA_SUCCESS;
}

/* The memory that a launch on `stream` needs is there afterwards. The object lock is held. */
static CUresult back(struct exec *exec, struct stream *stream) {
    uint64_t *backing = exec->left_count > 0 ? &exec->backing : &stream->backing;
    if (exec->footprint > *backing) {
        TRY(grow(exec->base.device, exec->footprint - *backing));
        *backing = exec->footprint;
    }
    return CUDA_SUCCESS;
}

static void put_away(struct exec *exec) {
    object_remove(&exec->base);
    free(exec->left);
    free(exec->frees);
    free(exec);
}

void graph_memory_freed(struct memory *memory) {
    struct exec *exec = memory->exec;
    uint32_t device = exec->base.device;
    pool[device].used -= round_up(memory->size, 512);
    if (--exec->live == 0) {
        if (!exec->destroyed) {
            return; /* its memory stays with it for the next launch, or until a trim */
        }
        pool[device].idle += exec->backing;
        put_away(exec);
    }
}

static void free_of_exec(struct object *object, void *data) {
    struct memory *memory = (struct memory *)object;
    if (memory->exec == data) {
        memory_free(memory);
    }
}

static void hand_out(struct exec *exec) {
    uint32_t device = exec->base.device;
    for (uint32_t number = 0; number < exec->left_count; number++) {
        struct memory *memory = calloc(1, sizeof(*memory));
        *memory = (struct memory){.base.device = device, .kind = SIM_CUDA_MEMORY_GRAPH, .size = exec->left[number].bytes,
                                  .shared = -1, .exec = exec};
        object_add(&memory->base, MEMORY, exec->left[number].address);
        pool[device].used += round_up(memory->size, 512);
        exec->live++;
    }
    if (pool[device].used > pool[device].used_high) {
        pool[device].used_high = pool[device].used;
    }
}

CUresult model_cuGraphLaunch(CUgraphExec hGraph, CUstream hStream) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    objects_lock();
    struct exec *exec = (struct exec *)object_find_handle(hGraph, EXEC);
    uint64_t duration = 0;
    int works = 0;
    CUresult result = exec == NULL || exec->destroyed ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && stream->capture == NULL) {
        if (exec->live > 0 && exec->frees_at_launch) {
            objects_each(MEMORY, free_of_exec, exec);
        }
        result = exec->live > 0 ? CUDA_ERROR_INVALID_VALUE : back(exec, stream);
        if (result == CUDA_SUCCESS) {
            hand_out(exec);
            for (uint32_t number = 0; number < exec->free_count; number++) {
                struct memory *memory = (struct memory *)object_find(exec->frees[number], MEMORY);
                if (memory != NULL) {
                    memory_free(memory);
                }
            }
            works = 1;
            duration = exec->duration_ns;
        }
    }
    objects_unlock();
    if (works) {
        stream_work(stream, duration); /* waits where the stream is full */
    }
    return result == CUDA_SUCCESS && stream->capture != NULL ? graph_capture_child(stream, exec) : result;
}

CUresult model_cuGraphUpload(CUgraphExec hGraph, CUstream hStream) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    objects_lock();
    struct exec *exec = (struct exec *)object_find_handle(hGraph, EXEC);
    CUresult result = exec == NULL || exec->destroyed ? CUDA_ERROR_INVALID_VALUE : back(exec, stream);
    objects_unlock();
    return result;
}

CUresult model_cuGraphExecDestroy(CUgraphExec hGraphExec) {
    objects_lock();
    struct exec *exec = (struct exec *)object_find_handle(hGraphExec, EXEC);
    int known = exec != NULL && !exec->destroyed;
    if (known && exec->live > 0) {
        exec->destroyed = 1; /* what it allocated lives on */
    } else if (known) {
        pool[exec->base.device].idle += exec->backing;
        put_away(exec);
    }
    objects_unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void graph_stream_gone(struct stream *stream) {
    pool[stream->base.device].idle += stream->backing;
    stream->backing = 0;
}

static void trim_stream(struct object *object, void *data) {
    if (object->device == *(uint32_t *)data) {
        graph_stream_gone((struct stream *)object);
    }
}

static void trim_exec(struct object *object, void *data) {
    struct exec *exec = (struct exec *)object;
    if (object->device == *(uint32_t *)data && exec->live == 0) {
        pool[object->device].idle += exec->backing;
        exec->backing = 0;
    }
}

CUresult model_cuDeviceGraphMemTrim(CUdevice device) {
    uint32_t index;
    TRY(device_index(device, &index));
    objects_lock();
    objects_each(STREAM, trim_stream, &index);
    objects_each(EXEC, trim_exec, &index);
    stream_defaults_each(index, trim_stream);
    discharge(index, SIM_CUDA_MEMORY_GRAPH, pool[index].idle);
    pool[index].reserved -= pool[index].idle;
    pool[index].idle = 0;
    objects_unlock();
    return CUDA_SUCCESS;
}

static uint64_t *mark(uint32_t device, CUgraphMem_attribute attr) {
    switch ((int)attr) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        return &pool[device].used;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
        return &pool[device].used_high;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
        return &pool[device].reserved;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
        return &pool[device].reserved_high;
    default:
        return NULL;
    }
}

CUresult model_cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value) {
    uint32_t index;
    NEED(value != NULL);
    TRY(device_index(device, &index));
    uint64_t *number = mark(index, attr);
    NEED(number != NULL);
    objects_lock();
    *(uint64_t *)value = *number;
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value) {
    uint32_t index;
    NEED(value != NULL && *(uint64_t *)value == 0); /* a high watermark can only be reset */
    NEED(attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
    TRY(device_index(device, &index));
    objects_lock();
    *mark(index, attr) = attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ? pool[index].used : pool[index].reserved;
    objects_unlock();
    return CUDA_SUCCESS;
}
