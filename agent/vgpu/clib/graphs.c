/* Memory of graphs: a node that allocates costs nothing until its graph is uploaded or launched. Then the most that its
 * nodes have at once, less what the stream has from graphs before, is reserved first, and afterwards the charge becomes
 * what the driver says graphs have reserved. */
#include "caps.h"

#include <string.h>

static _Atomic unsigned graphs_with_memory;
static uint64_t charged[GNA_MAX_DEVICES];      /* guarded by gna_pools_lock */
static uint32_t generation[GNA_MAX_DEVICES];   /* raised when the driver gave back what graphs do not use */
static int devices[GNA_MAX_DEVICES];           /* the device of a record, as this process numbers it */
static _Thread_local char own __attribute__((tls_model("initial-exec"))); /* a thread's own stream, by its address */

void gna_graphs_forget(void) {
    memset(charged, 0, sizeof(charged));
    atomic_store(&graphs_with_memory, 0);
}

bool gna_capturing(CUstream stream, CUgraph *graph) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id;
    *graph = NULL;
    if (stream == NULL || stream == CU_STREAM_LEGACY || REAL(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        return false;
    }
    if (REAL(cuStreamGetCaptureInfo_v3)(stream, &status, &id, graph, NULL, NULL, NULL) != CUDA_SUCCESS) {
        REAL(cuStreamGetCaptureInfo_v2)(stream, &status, &id, graph, NULL, NULL); /* drivers before 12.3 */
    }
    return true;
}

/* Handles are addresses and end in zeros: one entry for each GPU. */
static uint64_t key_of(const void *handle, int record) {
    return (uintptr_t)handle + (unsigned)record;
}

/* `bytes` at once, of which `left` stay. A graph's entry: `bytes` is its peak, `other` what its nodes have not freed. Nodes
 * are added in an order in which they may run. */
static void grow(const void *handle, int record, uint64_t bytes, uint64_t left) {
    struct gna_entry entry;
    if (!gna_get(GNA_GRAPH, key_of(handle, record), &entry)) {
        entry = (struct gna_entry){.kind = GNA_GRAPH, .key = key_of(handle, record), .record = record};
    }
    entry.bytes = entry.other + bytes > entry.bytes ? entry.other + bytes : entry.bytes;
    entry.other += left;
    gna_put(&entry);
}

void gna_graph_grows(CUgraph graph, int record, CUdevice device, uint64_t bytes, CUdeviceptr pointer) {
    gna_attach();
    if (record >= 0) {
        struct gna_entry node = {.kind = GNA_NODE, .key = pointer, .bytes = bytes, .record = record, .other = (uintptr_t)graph};
        gna_enter(&gna_pools_lock);
        devices[record] = device;
        atomic_fetch_add(&graphs_with_memory, 1);
        grow(graph, record, bytes, bytes);
        gna_put(&node);
        gna_leave(&gna_pools_lock);
    }
}

/* Of what another graph allocated nothing is known here, and a launch settles it. */
static CUresult shrunk(CUresult result, CUgraph graph, CUdeviceptr pointer) {
    struct gna_entry node, entry;
    gna_enter(&gna_pools_lock);
    if (result == CUDA_SUCCESS && gna_get(GNA_NODE, pointer, &node) && node.other == (uintptr_t)graph && gna_take(GNA_NODE, pointer, &node) &&
        gna_get(GNA_GRAPH, key_of(graph, node.record), &entry)) {
        entry.other -= node.bytes < entry.other ? node.bytes : entry.other;
        gna_put(&entry);
    }
    gna_leave(&gna_pools_lock);
    return result;
}

CUresult gna_graph_frees(CUdeviceptr pointer, CUstream stream) {
    CUgraph graph;
    bool may_be = atomic_load_explicit(&graphs_with_memory, memory_order_relaxed) > 0;
    return may_be && gna_capturing(stream, &graph) ? shrunk(CUDA_SUCCESS, graph, pointer) : CUDA_SUCCESS;
}

HOOK(cuGraphAddMemFreeNode)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUdeviceptr dptr) {
    return shrunk(REAL(cuGraphAddMemFreeNode)(phGraphNode, hGraph, dependencies, numDependencies, dptr), hGraph, dptr);
}

/* What one graph has, another gets too: by a clone, as a child, as an executable. */
static void inherit(const void *from, const void *to, bool executable) {
    struct gna_entry entry;
    if (atomic_load(&graphs_with_memory) == 0) {
        return;
    }
    gna_enter(&gna_pools_lock);
    for (int record = 0; record < (int)gna_records(); record++) {
        if (!gna_get(GNA_GRAPH, key_of(from, record), &entry)) {
            continue;
        }
        if (executable) {
            entry.kind = GNA_EXEC;
            entry.key = key_of(to, record);
            entry.flag = entry.other > 0;
            entry.bytes = gna_round_up(entry.bytes, GNA_GRANULE);
            gna_put(&entry);
        } else {
            grow(to, record, entry.bytes, entry.other);
        }
    }
    gna_leave(&gna_pools_lock);
}

static void forget(enum gna_kind kind, const void *handle) {
    struct gna_entry entry;
    gna_attach();
    for (int record = 0; record < (int)gna_records(); record++) {
        gna_take(kind, key_of(handle, record), &entry);
        gna_take(GNA_BACKING, key_of(handle, record), &entry);
    }
}

/* The lock is held. */
static void settle(int record) {
    cuuint64_t reserved;
    if (REAL(cuDeviceGetGraphMemAttribute)(devices[record], CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS) {
        return;
    }
    if (reserved > charged[record] && gna_reserve(record, reserved - charged[record]) != CUDA_SUCCESS) {
        return; /* the agent measures it */
    }
    if (reserved < charged[record]) {
        gna_release(record, charged[record] - reserved);
    }
    charged[record] = reserved;
}

/* The lock is held. */
void gna_graphs_reclaim(int record) {
    if (atomic_load(&graphs_with_memory) == 0 || charged[record] == 0) {
        return;
    }
    REAL(cuDeviceGraphMemTrim)(devices[record]);
    generation[record]++;
    settle(record);
}

/* What an executable had on one stream the driver may not use on another, and each thread has a default stream. */
static uint64_t place_of(CUstream stream) {
    return stream == CU_STREAM_PER_THREAD ? (uintptr_t)&own : (uintptr_t)stream;
}

/* Graphs on one stream use the same memory, one after the other; what outlives a launch, by the flag, is shared with no
 * other graph. */
static struct gna_entry backing_of(const struct gna_entry *exec, CUstream stream) {
    struct gna_entry found, none = {.kind = GNA_BACKING, .key = exec->flag ? exec->key : place_of(stream) ^ (uint64_t)exec->record << 56};
    bool is_known = gna_get(GNA_BACKING, none.key, &found) && found.count == generation[exec->record];
    return is_known ? found : none;
}

/* The lock is held. */
static CUresult reserve(CUgraphExec exec, CUstream stream) {
    struct gna_entry entry;
    for (int record = 0; record < (int)gna_records(); record++) {
        CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
        if (!gna_get(GNA_EXEC, key_of(exec, record), &entry)) {
            continue;
        }
        for (unsigned attempt = 0; result != CUDA_SUCCESS && attempt < 3; attempt++) {
            if (attempt > 0) {
                gna_reclaim_locked(record, stream, attempt == 2);
            }
            uint64_t backed = backing_of(&entry, stream).bytes, more = entry.bytes > backed ? entry.bytes - backed : 0;
            result = gna_reserve(record, more);
            charged[record] += result == CUDA_SUCCESS ? more : 0;
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    return CUDA_SUCCESS;
}

/* The lock is held. */
static void settle_exec(CUgraphExec exec, CUstream stream, bool backed) {
    struct gna_entry entry;
    for (int record = 0; record < (int)gna_records(); record++) {
        if (gna_get(GNA_EXEC, key_of(exec, record), &entry)) {
            struct gna_entry backing = backing_of(&entry, stream);
            settle(record);
            backing.count = generation[record];
            backing.bytes = entry.bytes > backing.bytes ? entry.bytes : backing.bytes;
            if (backed) {
                gna_put(&backing);
            }
        }
    }
}

typedef CUresult run_t(CUgraphExec exec, CUstream stream);

static CUresult back_and_run(run_t *call, CUgraphExec exec, CUstream given, CUstream stream) {
    if (__builtin_expect(atomic_load_explicit(&graphs_with_memory, memory_order_relaxed) == 0, 1)) {
        return call(exec, given);
    }
    gna_attach();
    gna_enter(&gna_pools_lock);
    CUresult result = reserve(exec, stream);
    if (result == CUDA_SUCCESS) {
        result = call(exec, given);
    }
    settle_exec(exec, stream, result == CUDA_SUCCESS);
    gna_leave(&gna_pools_lock);
    return result;
}

static CUresult run(run_t *call, CUgraphExec exec, CUstream given, CUstream stream, bool launches) {
    struct gna_turn turn;
    if (!launches) {
        return back_and_run(call, exec, given, stream);
    }
    gna_count_launch();
    if (gna_gate_open()) {
        return back_and_run(call, exec, given, stream);
    }
    gna_share_wait(&turn, exec, stream);
    CUresult result = back_and_run(call, exec, given, stream);
    gna_share_done(&turn, result);
    return result;
}

#define RUN(symbol, stream, launches) return run((run_t *)gna_real(GNA_ID_##symbol), hGraph, hStream, stream, launches)

HOOK(cuGraphLaunch)(CUgraphExec hGraph, CUstream hStream) {
    RUN(cuGraphLaunch, hStream, true);
}

HOOK(cuGraphLaunch_ptsz)(CUgraphExec hGraph, CUstream hStream) {
    RUN(cuGraphLaunch_ptsz, hStream == NULL ? CU_STREAM_PER_THREAD : hStream, true);
}

HOOK(cuGraphUpload)(CUgraphExec hGraph, CUstream hStream) {
    RUN(cuGraphUpload, hStream, false);
}

HOOK(cuGraphUpload_ptsz)(CUgraphExec hGraph, CUstream hStream) {
    RUN(cuGraphUpload_ptsz, hStream == NULL ? CU_STREAM_PER_THREAD : hStream, false);
}

/* An instantiation that uploads at once reserves as a launch does. */
static CUresult instantiated(CUresult result, CUgraphExec *exec, CUgraph graph) {
    if (result == CUDA_SUCCESS) {
        inherit(graph, *exec, true);
    }
    return result;
}

HOOK(cuGraphInstantiate)(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize) {
    return instantiated(REAL(cuGraphInstantiate)(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize), phGraphExec, hGraph);
}

HOOK(cuGraphInstantiate_v2)(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize) {
    return instantiated(REAL(cuGraphInstantiate_v2)(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize), phGraphExec, hGraph);
}

HOOK(cuGraphInstantiateWithFlags)(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags) {
    return instantiated(REAL(cuGraphInstantiateWithFlags)(phGraphExec, hGraph, flags), phGraphExec, hGraph);
}

/* The flag that uploads is taken off and the upload done here, where it can be refused. */
static CUresult with_params(CUresult (*call)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *), run_t *upload, CUgraphExec *exec,
                            CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params, CUstream otherwise) {
    if (params == NULL || !(params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)) {
        return instantiated(call(exec, graph, params), exec, graph);
    }
    params->flags &= ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    CUresult result = instantiated(call(exec, graph, params), exec, graph);
    params->flags |= CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    if (result == CUDA_SUCCESS) {
        CUstream stream = params->hUploadStream == NULL ? otherwise : params->hUploadStream;
        result = run(upload, *exec, params->hUploadStream, stream, false);
        if (result != CUDA_SUCCESS) {
            forget(GNA_EXEC, *exec);
            REAL(cuGraphExecDestroy)(*exec);
        }
    }
    return result;
}

HOOK(cuGraphInstantiateWithParams)(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    return with_params(REAL(cuGraphInstantiateWithParams), REAL(cuGraphUpload), phGraphExec, hGraph, instantiateParams, NULL);
}

HOOK(cuGraphInstantiateWithParams_ptsz)(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    return with_params(REAL(cuGraphInstantiateWithParams_ptsz), REAL(cuGraphUpload_ptsz), phGraphExec, hGraph, instantiateParams,
                       CU_STREAM_PER_THREAD);
}

HOOK(cuGraphExecUpdate)(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out) {
    CUresult result = REAL(cuGraphExecUpdate)(hGraphExec, hGraph, hErrorNode_out, updateResult_out);
    gna_price_changed(hGraphExec);
    return instantiated(result, &hGraphExec, hGraph);
}

HOOK(cuGraphExecUpdate_v2)(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo) {
    CUresult result = REAL(cuGraphExecUpdate_v2)(hGraphExec, hGraph, resultInfo);
    gna_price_changed(hGraphExec);
    return instantiated(result, &hGraphExec, hGraph);
}

HOOK(cuGraphExecDestroy)(CUgraphExec hGraphExec) {
    forget(GNA_EXEC, hGraphExec);
    gna_price_changed(hGraphExec);
    CUresult result = REAL(cuGraphExecDestroy)(hGraphExec);
    gna_enter(&gna_pools_lock);
    for (int record = 0; record < (int)gna_records() && atomic_load(&graphs_with_memory) > 0; record++) {
        if (charged[record] > 0) {
            settle(record);
        }
    }
    gna_leave(&gna_pools_lock);
    return result;
}

HOOK(cuGraphDestroy)(CUgraph hGraph) {
    forget(GNA_GRAPH, hGraph);
    return REAL(cuGraphDestroy)(hGraph);
}

HOOK(cuGraphClone)(CUgraph *phGraphClone, CUgraph originalGraph) {
    CUresult result = REAL(cuGraphClone)(phGraphClone, originalGraph);
    if (result == CUDA_SUCCESS) {
        inherit(originalGraph, *phGraphClone, false);
    }
    return result;
}

HOOK(cuDeviceGraphMemTrim)(CUdevice device) {
    CUresult result = REAL(cuDeviceGraphMemTrim)(device);
    int record = gna_record_of(device);
    if (result == CUDA_SUCCESS && record >= 0 && atomic_load(&graphs_with_memory) > 0) {
        gna_attach();
        gna_enter(&gna_pools_lock);
        generation[record]++;
        settle(record);
        gna_leave(&gna_pools_lock);
    }
    return result;
}

HOOK(cuGraphAddMemAllocNode)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                             CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams) {
    CUresult result = REAL(cuGraphAddMemAllocNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    bool on_device;
    if (result == CUDA_SUCCESS) {
        int record = gna_location_record(&nodeParams->poolProps.location, &on_device);
        gna_graph_grows(hGraph, record, nodeParams->poolProps.location.id, nodeParams->bytesize, nodeParams->dptr);
    }
    return result;
}

static CUresult added(CUresult result, CUgraph graph, const CUgraphNodeParams *params) {
    bool on_device;
    if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        int record = gna_location_record(&params->alloc.poolProps.location, &on_device);
        gna_graph_grows(graph, record, params->alloc.poolProps.location.id, params->alloc.bytesize, params->alloc.dptr);
    } else if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
        shrunk(result, graph, params->free.dptr);
    } else if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
        inherit(params->graph.graph, graph, false);
    }
    return result;
}

HOOK(cuGraphAddNode)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                     CUgraphNodeParams *nodeParams) {
    return added(REAL(cuGraphAddNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams), hGraph, nodeParams);
}

HOOK(cuGraphAddNode_v2)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                        size_t numDependencies, CUgraphNodeParams *nodeParams) {
    return added(REAL(cuGraphAddNode_v2)(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams), hGraph, nodeParams);
}

HOOK(cuGraphAddNode_v3)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
                        size_t numDependencies, CUgraphNodeParams *nodeParams) {
    return added(REAL(cuGraphAddNode_v3)(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams), hGraph, nodeParams);
}

HOOK(cuGraphAddChildGraphNode)(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                               CUgraph childGraph) {
    CUresult result = REAL(cuGraphAddChildGraphNode)(phGraphNode, hGraph, dependencies, numDependencies, childGraph);
    if (result == CUDA_SUCCESS) {
        inherit(childGraph, hGraph, false);
    }
    return result;
}
