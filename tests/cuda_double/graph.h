/* What graph.c and graph_memory.c share. */
#ifndef GRAPH_H
#define GRAPH_H

#include "double.h"

enum node_type { NODE_WORK, NODE_ALLOC, NODE_FREE, NODE_CHILD };

struct node {
    struct object base;
    enum node_type type;
    struct graph *graph;
    struct node *next;
    uint64_t bytes, address, duration_ns;
    struct graph *child;
};

struct graph {
    struct object base;
    struct node *first;
};

struct allocation {
    uint64_t address, bytes;
};

struct exec {
    struct object base;
    uint64_t duration_ns;
    uint64_t footprint; /* the most that its nodes have at once, whole granules */
    uint64_t backing;   /* its own while memory that it allocated lives on, otherwise its stream's is used */
    uint32_t left_count, live, free_count;
    struct allocation *left; /* allocated and not freed by a node of this graph */
    uint64_t *frees;         /* what other graphs allocated */
    int frees_at_launch, destroyed;
};

/* --- graph.c: the object lock is held */
struct graph *graph_make(uint32_t device);
struct node *graph_append(struct graph *graph, enum node_type type);

/* --- capture.c */
CUresult graph_capture_child(struct stream *stream, struct exec *exec);

#endif
