/* Graphs: nodes, capture, and launches with a device time. The memory behind them is in graph_memory.c. */
#include "double.h"
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct node *graph_append(struct graph *graph, enum node_type type) {
    struct node *node = calloc(1, sizeof(*node));
    struct node **last = &graph->first;
    node->type = type;
    node->graph = graph;
    node->base.device = graph->base.device;
    while (*last != NULL) {
        last = &(*last)->next;
    }
    *last = node;
    object_add(&node->base, NODE, (uint64_t)(uintptr_t)node);
    return node;
}

struct graph *graph_make(uint32_t device) {
    struct graph *graph = calloc(1, sizeof(*graph));
    graph->base.device = device;
    object_add(&graph->base, GRAPH, (uint64_t)(uintptr_t)graph);
    return graph;
}

static struct graph *graph_of(CUgraph handle) {
    return (struct graph *)object_find_handle(handle, GRAPH);
}

CUresult model_cuGraphCreate(CUgraph *phGraph, unsigned int flags) {
    struct context *context;
    NEED(phGraph != NULL && flags == 0);
    TRY(current(&context));
    objects_lock();
    *phGraph = (CUgraph)graph_make(context->base.device);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph) {
    NEED(phGraphClone != NULL);
    objects_lock();
    struct graph *graph = graph_of(originalGraph), *clone = graph == NULL ? NULL : graph_make(graph->base.device);
    for (const struct node *node = graph == NULL ? NULL : graph->first; node != NULL; node = node->next) {
        struct node *copy = graph_append(clone, node->type);
        copy->bytes = node->bytes;
        copy->address = node->address;
        copy->duration_ns = node->duration_ns;
        copy->child = node->child;
    }
    objects_unlock();
    *phGraphClone = (CUgraph)clone;
    return clone == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuGraphDestroy(CUgraph hGraph) {
    objects_lock();
    struct graph *graph = graph_of(hGraph);
    for (struct node *node = graph == NULL ? NULL : graph->first, *next; node != NULL; node = next) {
        next = node->next;
        object_remove(&node->base);
        free(node);
    }
    if (graph != NULL) {
        object_remove(&graph->base);
        free(graph);
    }
    objects_unlock();
    return graph == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Add a node; `fill` may refuse. The order of addition stands for that of execution. */
static CUresult add(CUgraphNode *handle, CUgraph hGraph, enum node_type type, const struct node *content) {
    NEED(handle != NULL);
    objects_lock();
    struct graph *graph = graph_of(hGraph);
    if (graph != NULL) {
        struct node *node = graph_append(graph, type);
        node->bytes = content->bytes;
        node->address = content->address;
        node->duration_ns = content->duration_ns;
        node->child = content->child;
        *handle = (CUgraphNode)node;
    }
    objects_unlock();
    return graph == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult model_cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                   size_t numDependencies) {
    struct node content = {0};
    NEED(numDependencies == 0 || dependencies != NULL);
    return add(phGraphNode, hGraph, NODE_WORK, &content);
}

static CUresult add_kernel(CUgraphNode *handle, CUgraph hGraph, const void *function) {
    struct function *known = function_find(function);
    if (known == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    struct node content = {.duration_ns = known->duration_ns};
    return add(handle, hGraph, NODE_WORK, &content);
}

#ifdef HAVE_cuGraphAddKernelNode_v2
CUresult model_cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    NEED(nodeParams != NULL && (numDependencies == 0 || dependencies != NULL));
    return add_kernel(phGraphNode, hGraph, nodeParams->func);
}
CUresult model_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
#else
CUresult model_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
#endif
    NEED(nodeParams != NULL && (numDependencies == 0 || dependencies != NULL));
    return add_kernel(phGraphNode, hGraph, nodeParams->func);
}

CUresult model_cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                        size_t numDependencies, CUgraph childGraph) {
    NEED(numDependencies == 0 || dependencies != NULL);
    objects_lock();
    struct node content = {.child = graph_of(childGraph)};
    objects_unlock();
    NEED(content.child != NULL);
    return add(phGraphNode, hGraph, NODE_CHILD, &content);
}

static CUresult add_alloc(CUgraphNode *handle, CUgraph hGraph, const CUmemPoolProps *pool, uint64_t bytes, CUdeviceptr *address) {
    uint32_t index;
    int on_device;
    NEED(bytes > 0);
    TRY(location_index(&pool->location, &index, &on_device));
    NEED(on_device);
    objects_lock();
    struct node content = {.bytes = bytes, .address = address_take(bytes, ALIGNMENT)};
    objects_unlock();
    TRY(add(handle, hGraph, NODE_ALLOC, &content));
    *address = content.address;
    return CUDA_SUCCESS;
}

CUresult model_cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams) {
    NEED(nodeParams != NULL && (numDependencies == 0 || dependencies != NULL));
    return add_alloc(phGraphNode, hGraph, &nodeParams->poolProps, nodeParams->bytesize, &nodeParams->dptr);
}

CUresult model_cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                     size_t numDependencies, CUdeviceptr dptr) {
    struct node content = {.address = dptr};
    NEED(dptr != 0 && (numDependencies == 0 || dependencies != NULL));
    return add(phGraphNode, hGraph, NODE_FREE, &content);
}

#ifdef HAVE_cuGraphAddNode
static CUresult add_any(CUgraphNode *handle, CUgraph hGraph, CUgraphNodeParams *params) {
    struct node content = {0};
    NEED(params != NULL);
    switch ((int)params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return add_kernel(handle, hGraph, params->kernel.func);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return add_alloc(handle, hGraph, &params->alloc.poolProps, params->alloc.bytesize, &params->alloc.dptr);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        content.address = params->free.dptr;
        return add(handle, hGraph, NODE_FREE, &content);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return model_cuGraphAddChildGraphNode(handle, hGraph, NULL, 0, params->graph.graph);
    default:
        return add(handle, hGraph, NODE_WORK, &content);
    }
}

CUresult model_cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                              size_t numDependencies, CUgraphNodeParams *nodeParams) {
    NEED(numDependencies == 0 || dependencies != NULL);
    return add_any(phGraphNode, hGraph, nodeParams);
}
#endif

#ifdef HAVE_cuGraphAddNode_v2
CUresult model_cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                 const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                 CUgraphNodeParams *nodeParams) {
    (void)dependencyData;
    NEED(numDependencies == 0 || dependencies != NULL);
    return add_any(phGraphNode, hGraph, nodeParams);
}
#endif

#ifdef HAVE_cuGraphAddNode_v3
CUresult model_cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                 const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                 CUgraphNodeParams *nodeParams) {
    (void)dependencyData;
    NEED(numDependencies == 0 || dependencies != NULL);
    return add_any(phGraphNode, hGraph, nodeParams);
}
#endif
