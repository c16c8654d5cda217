/* A double of libcuda.so.1: inner interface of its parts.
 *
 * Every symbol that cuda.h declares is a generated gate (gates.c): it counts the call, lets injected faults
 * happen and calls the model `model_<symbol>`, if one of the files beside this one has it. The models have
 * the header's own prototypes, so that the compiler checks each of them against each release of the header.
 */
#ifndef CUDA_DOUBLE_H
#define CUDA_DOUBLE_H

#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_layout.h"
#include "models.h"

#define ALIGNMENT (UINT64_C(4) << 20) /* of addresses: no granule is larger */
#define SMALL (UINT64_C(1) << 20)
#define NEED(condition)                      \
    do {                                     \
        if (!(condition)) {                  \
            return CUDA_ERROR_INVALID_VALUE; \
        }                                    \
    } while (0)
/* Return what a step answers, unless it went well. */
#define TRY(step)                         \
    do {                                  \
        CUresult tried_ = (step);         \
        if (tried_ != CUDA_SUCCESS) {     \
            return tried_;                \
        }                                 \
    } while (0)

static inline uint64_t round_up(uint64_t bytes, uint64_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* --- state.c: the shared file ------------------------------------------------------------------------ */
extern struct sim_cuda_machine *cuda_machine; /* NULL before cuInit and in a forked child */
/* The mapping, made at the first call; NULL where there is none. */
struct sim_cuda_machine *state_map(void);
CUresult state_register(void);      /* takes the slot of this process */
int state_forked(void);             /* a child of a process that had called cuInit */
struct sim_cuda_slot *state_slot(void);
uint32_t state_slot_number(void);
int state_slot_lives(uint32_t number); /* or is this process's own */
/* A task is a thread in virtual time; its process holds a lock on it as on its slot. */
int state_task_take(uint32_t number);
int state_task_lives(uint32_t number);
void state_task_done(uint32_t number);
void state_lock(void);
void state_unlock(void);
/* Free the memory of dead processes; the lock is held. */
void state_sweep(void);

/* --- account.c: bytes -------------------------------------------------------------------------------- */
/* Take or give back device memory for this process. */
CUresult charge(uint32_t device, uint32_t kind, uint64_t bytes);
void discharge(uint32_t device, uint32_t kind, uint64_t bytes);
uint64_t used_bytes(uint32_t device);
uint64_t granule(uint32_t device); /* by which memory of the device is given out */
/* Memory that more than one process holds: the number in the table, or -1. */
int32_t share(uint32_t device, uint32_t kind, uint64_t bytes);
int32_t share_join(uint32_t number, uint32_t generation, uint32_t *device, uint32_t *kind, uint64_t *bytes);
void share_leave(uint32_t number, uint32_t slot); /* the lock is held */
void share_drop(uint32_t number);

/* --- objects.c: handles and addresses of this process -------------------------------------------------- */
enum object_kind { CONTEXT = 1, MEMORY, RESERVATION, MAPPING, HANDLE, POOL, ARRAY, STREAM, EVENT, MODULE, FUNCTION, LIBRARY,
                   GRAPH, NODE, EXEC, HOST, STALE = 0x100 };

struct object {
    uint64_t key;
    enum object_kind kind;
    uint32_t device;
    struct object *next;
};

/* One lock for all of a process's objects; taken by each model, never held while it waits. */
void objects_lock(void);
void objects_unlock(void);
void object_add(struct object *object, enum object_kind kind, uint64_t key);
struct object *object_find(uint64_t key, enum object_kind kind);
struct object *object_find_handle(const void *handle, enum object_kind kind);
void object_remove(struct object *object);
/* Its handle must not be used any more: to look for it ends the program. Never freed, so that no other one gets the handle. */
void object_retire(struct object *object);
int object_lives(const void *handle, enum object_kind kind); /* without ending the program */
/* Call `visit` for every object of a kind; it may remove and free the one that it is given. */
void objects_each(enum object_kind kind, void (*visit)(struct object *, void *), void *data);
/* A new range of device addresses. */
uint64_t address_take(uint64_t bytes, uint64_t alignment);
uint32_t address_take_narrow(uint64_t bytes); /* below 4 GiB, for the first ABI; 0: none left */

/* --- memory.c ---------------------------------------------------------------------------------------- */
struct pool;
struct memory {
    struct object base;
    uint32_t kind;
    uint64_t size;    /* as asked for */
    uint64_t charged; /* 0 for a small one, which is counted in the device's sum */
    int32_t shared;   /* number in the shared table, or -1 */
    uint32_t opened;  /* how often, by cuIpcOpenMemHandle */
    void *host;       /* managed memory can be touched by the program */
    struct pool *pool;
    struct exec *exec;
    void *context;
};
/* Bytes of a whole allocation: small ones share granules. */
CUresult memory_charge(struct memory *memory);
void memory_discharge(struct memory *memory);
void memory_free(struct memory *memory);
struct memory *memory_at(uint64_t address); /* the allocation that contains an address */

/* --- context.c --------------------------------------------------------------------------------------- */
struct context {
    struct object base;
    unsigned int flags;
    unsigned int references; /* of the primary context */
    size_t limits[16];
};
CUresult current(struct context **context);

/* --- device.c ---------------------------------------------------------------------------------------- */
CUresult device_index(CUdevice device, uint32_t *index); /* the GPU's number in the file */
CUdevice device_ordinal(uint32_t index);                 /* and back */
CUresult devices_find(void);                             /* CUDA_VISIBLE_DEVICES */
uint32_t devices_count(void);
/* The GPU of a location; on_device is 0 for memory of the host. */
CUresult location_index(const CUmemLocation *location, uint32_t *index, int *on_device);

/* --- pool.c ------------------------------------------------------------------------------------------ */
struct pool {
    struct object base;
    uint32_t own; /* the device's default pool */
    uint32_t is_gone; /* destroyed, and some of its memory is not freed yet */
    uint64_t reserved, reserved_high, used, used_high, threshold, maximum;
    uint64_t held; /* freed behind streams that are still at work */
    int settings[4];
};
void pools_trim(uint32_t device);  /* at a synchronisation */
void pools_squeeze(uint32_t device); /* before memory runs out: keep nothing that is not used */
void pool_give_back(struct memory *memory);
struct stream;
/* As memory_free, of a pool's memory, when the stream has done what it has to do. */
void pool_free_behind(struct memory *memory, const struct stream *stream, uint64_t due_ns);
void pool_stream_gone(const struct stream *stream);
void pools_reset(uint32_t device); /* with the primary context */

/* --- stream.c ---------------------------------------------------------------------------------------- */
struct graph;
struct stream {
    struct object base;
    uint64_t busy_until; /* CLOCK_MONOTONIC, ns */
    struct graph *capture;
    uint32_t capture_strict;
    uint64_t backing; /* bytes of graph memory that graphs on this stream share */
    unsigned int flags;
    int priority;
    uint32_t lane; /* of the GPUs' time, plus one; 0: nothing ran in it yet */
};
uint64_t now_ns(void);
void stream_defaults_each(uint32_t device, void (*visit)(struct object *, void *)); /* data: the device */
CUresult stream_of(CUstream handle, struct stream **stream);
uint64_t stream_busy_until(const struct stream *stream); /* 0: it is not, or the GPUs' time is simulated */
/* Work of a length on a stream. */
void stream_work(struct stream *stream, uint64_t nanoseconds);
/* Calls that a capture of the process forbids to threads which have not been exempted from it: the captures break. */
CUresult capture_forbids(void);

/* --- graph.c ----------------------------------------------------------------------------------------- */
struct function {
    struct object base;
    uint64_t duration_ns;
    int runs_grid;
    struct object *owner;
    char name[128];
};
struct function *function_find(const void *handle);
CUresult graph_capture_alloc(struct stream *stream, uint32_t device, uint64_t bytes, CUdeviceptr *address);
CUresult graph_capture_free(struct stream *stream, CUdeviceptr address);
CUresult graph_capture_work(struct stream *stream, uint64_t nanoseconds);
void graph_memory_freed(struct memory *memory);
void graph_stream_gone(struct stream *stream); /* what graphs on it had goes back to their pool */

/* --- faults.c, gates.c -------------------------------------------------------------------------------- */
struct argument {
    const void *at;
    size_t size;
};
#define GATE_EARLY 1u  /* answers before cuInit */
#define GATE_REPORT 2u /* answers although calls are only written down */
/* Nonzero: the call ends here with *result. */
int gate(uint32_t symbol, uint32_t flags, const struct argument *arguments, uint32_t count, CUresult *result);
extern const char *const symbol_names[];
extern const uint32_t symbol_count, symbols_checksum;
struct route {
    const char *name;
    uint32_t version;
    uint32_t per_thread;
    void *address;
};
extern const struct route routes[]; /* by name, then per_thread, then version */
extern const uint32_t route_count;

#endif
