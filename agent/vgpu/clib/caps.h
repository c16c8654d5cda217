/* What the files of the library share. Hooks have the driver's own names and types; all else begins with gna_. */
#ifndef GNA_CAPS_H
#define GNA_CAPS_H

#define __CUDA_API_VERSION_INTERNAL /* every ABI under the name that it is exported by */
#include <cuda.h>

#include "ids.inc" /* generated: one GNA_ID_ per symbol, and no macro of cuda.h left that renames one */
#include "layout.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOOK(symbol) __attribute__((visibility("default"))) CUresult symbol
#define REAL(symbol) ((__typeof__(&symbol))gna_real(GNA_ID_##symbol))

#define GNA_GRANULE (UINT64_C(2) << 20)
#define GNA_SMALL (UINT64_C(1) << 20) /* below it, allocations share granules */
#define GNA_SWEEP_NS 2000000          /* between two searches for dead processes */
#define GNA_LOCK_SECONDS 3            /* a lock that is not had by then refuses */

static inline uint64_t gna_round_up(uint64_t bytes, uint64_t unit) {
    return bytes > UINT64_MAX - unit ? UINT64_MAX - unit + 1 : (bytes + unit - 1) / unit * unit;
}

/* --- loader.c: the real dlsym, found without the help of any dlsym ---------------------------------------- */
void *gna_real_dlsym(void *handle, const char *name);
void *gna_real_dlvsym(void *handle, const char *name, const char *version);
bool gna_same(const char *one, const char *other); /* as strcmp, which a sanitizer may have replaced */
void *gna_own_folder(char *path, size_t bytes); /* NULL when it is not known */

/* --- resolver.c ------------------------------------------------------------------------------------------- */
extern _Atomic(void *) gna_reals[GNA_IDS];
void *gna_resolve(unsigned id); /* never NULL: a function that answers CUDA_ERROR_NOT_FOUND for what is absent */
bool gna_has(unsigned id);

static inline void *gna_real(unsigned id) {
    void *found = atomic_load_explicit(&gna_reals[id], memory_order_acquire);
    return __builtin_expect(found != NULL, 1) ? found : gna_resolve(id);
}

/* --- private.c: locks and tables of this process ----------------------------------------------------------- */
struct gna_mutex {
    _Atomic int holder; /* a pid: a child of fork takes over what its parent held */
};
int gna_self(void); /* the pid */
void gna_enter(struct gna_mutex *mutex);
void gna_leave(struct gna_mutex *mutex);

enum gna_kind {
    GNA_NONE, GNA_LINEAR, GNA_MANAGED, GNA_ARRAY, GNA_MIPMAP, GNA_HANDLE, GNA_PHYSICAL, GNA_MAPPING, GNA_TILE,
    GNA_POOL, GNA_FOREIGN, GNA_EXTERNAL, GNA_CONTEXT, GNA_CODE, GNA_GRAPH, GNA_EXEC, GNA_FREED, GNA_HEAP, GNA_OPENED, GNA_NODE,
    GNA_BACKING, GNA_FREER,
    GNA_KINDS
};
struct gna_entry {
    uint64_t key;
    uint64_t bytes;  /* as charged, or as asked for where small ones share granules; GNA_OPENED: what holds the lock */
    uint64_t other;  /* by kind: another key */
    int32_t record;  /* of the limit file */
    uint16_t kind;
    uint16_t flag;
    uint32_t count, mappings;
};
bool gna_put(const struct gna_entry *entry); /* replaces; false when there is no memory for the table */
bool gna_get(enum gna_kind kind, uint64_t key, struct gna_entry *entry);
bool gna_take(enum gna_kind kind, uint64_t key, struct gna_entry *entry);
/* The first entry from *place on for which the kind matches; *place moves on. False at the end. */
bool gna_next(enum gna_kind kind, size_t *place, struct gna_entry *entry);
void gna_forget_all(void);

/* --- files.c ---------------------------------------------------------------------------------------------- */
extern struct gna_usage *gna_usage;
bool gna_files_open(void);   /* both files are sound; otherwise it said why, once */
bool gna_usage_sound(void);  /* still: a tenant may have truncated it */
bool gna_usage_back(size_t offset, size_t bytes); /* have pages behind a part of the region */
/* Hold the lock of a slot until this process ends or calls exec, whatever descriptors it closes, or lets go; NULL: it was
 * not to be had. */
void *gna_living_hold(unsigned slot);
void gna_living_let_go(void *held);
bool gna_living_held(unsigned slot); /* by anybody; yes in doubt */
unsigned gna_records(void);
bool gna_limit_of(unsigned record, struct gna_limit *limit);
/* Changes when limits do: the sum of both copies' generations. */
uint64_t gna_limit_generation(unsigned record);
uint64_t gna_limit_newest(unsigned record); /* the higher of both, of a copy that may not be whole */
const struct gna_limits_gate *gna_limits_gate(void); /* NULL before the files are open */
int gna_record_of_uuid(const void *uuid);
void gna_complain(const char *what, const char *cause, const char *remedy);

/* --- slots.c ---------------------------------------------------------------------------------------------- */
bool gna_lock_shared(pthread_mutex_t *lock, bool *died);
struct gna_usage_slot *gna_attach(void); /* this process's slot; NULL: refuse */
void gna_sweep(bool thorough); /* not more often than is good for all; thorough: zombies, too */
uint64_t gna_now_ns(void);

/* --- ledger.c --------------------------------------------------------------------------------------------- */
bool gna_charge_present(int record, uint64_t bytes); /* what is there already, whatever the cap; false: not now */
CUresult gna_reserve(int record, uint64_t bytes); /* CUDA_SUCCESS or CUDA_ERROR_OUT_OF_MEMORY */
void gna_release(int record, uint64_t bytes);
void gna_charged(int record, uint64_t *used, uint64_t *limit); /* of the container, what is unseen included */
uint64_t gna_sum_of_slots(unsigned record);
void gna_context_charged(int record, int64_t bytes);
void gna_export_charged(int record, int64_t granules); /* of what is charged already */
void gna_movable_charged(int64_t bytes); /* likewise, of memory that need not stay on the GPU */
void gna_ledger_forget(void);

/* --- memory.c --------------------------------------------------------------------------------------------- */
/* As gna_reserve, but gives back first what this process's pools and graphs hold and do not use. */
CUresult gna_reserve_hard(int record, uint64_t bytes);
CUresult gna_charge(enum gna_kind kind, int record, uint64_t bytes);
void gna_discharge(enum gna_kind kind, int record, uint64_t bytes);
int gna_record_of(CUdevice device); /* -1: this container holds no such GPU */
CUresult gna_current_record(int *record);
extern _Atomic bool gna_primary_known[];
void gna_primary_adopt(CUdevice dev, int record); /* charge a primary context that no hook saw retained */
int gna_location_record(const CUmemLocation *location, bool *on_device);
void gna_small_forget(void);
/* What was freed in the order of a stream is released where the stream has got there, or where its context is `gone`. */
void gna_freed_settle(bool wait, CUcontext gone);

/* --- pools.c, graphs.c: both under one lock, since each may make room by what the other gives back --------- */
extern struct gna_mutex gna_pools_lock;
void gna_reclaim(int record);
/* The lock is held, and let go of while, to order, a stream is waited for. */
void gna_reclaim_locked(int record, CUstream stream, bool wait);
void gna_pools_settle(void); /* after the application waited for the GPU: pools gave memory back */
void gna_pools_forget(void);
void gna_pools_gone(CUdevice device); /* the lock is held */
void gna_graphs_reclaim(int record);
void gna_graphs_forget(void);
bool gna_capturing(CUstream stream, CUgraph *graph);
void gna_graph_grows(CUgraph graph, int record, CUdevice device, uint64_t bytes, CUdeviceptr pointer);
CUresult gna_graph_frees(CUdeviceptr pointer, CUstream stream); /* if that is captured */

/* --- freers.c ------------------------------------------------------------------------------------------------ */
/* Around the call that frees what may be a pool's memory, in the order of a stream, which is another one's name then. */
uint64_t gna_freer_begins(CUstream stream, CUdeviceptr pointer, bool in_graph);
void gna_freer_ended(uint64_t name, CUstream stream);
/* Whether the stream may have all that the GPU's pools have spare; `asks` other streams for it, and waits for none. */
bool gna_freers_past(int record, CUstream stream, bool asks);
uint32_t gna_freers_now(void);
/* The application waited for one stream, or with NULL for a context (NULL: the current one), from `began` on. */
void gna_freers_waited(CUcontext context, const CUstream *stream, uint32_t began);
void gna_freers_never_ask(void);
/* Around the call that ends a context, whose streams and events nobody asks any more from before the call on: what the first
 * returns is given to the second, with the context where the call failed, or NULL. */
uint64_t gna_freers_leave(CUcontext context);
void gna_freers_left(uint64_t leaving, CUcontext stays);
void gna_freers_forget(void);

/* --- imports.c -------------------------------------------------------------------------------------------- */
void gna_exported(const void *handle, size_t bytes);
bool gna_is_ours(const void *handle, size_t bytes);
void gna_export_freed(const struct gna_entry *entry); /* GNA_LINEAR: of what was exported, this is free again */
void gna_import_gone(const struct gna_entry *entry);  /* GNA_OPENED, GNA_FOREIGN: it is open here no more */

/* --- contexts.c ------------------------------------------------------------------------------------------- */
void gna_context_gone(CUcontext context); /* and with it what was allocated in it */

/* --- clock.c: the one place where a share's time comes from ------------------------------------------------- */
uint64_t gna_clock_ns(void);
/* Until the instant, or until the word is not `seen` and its futex is woken; may end early. */
void gna_clock_wait(const uint32_t *word, uint32_t seen, uint64_t until);

/* --- prices.c: what a function or graph costs, learned from events ------------------------------------------- */
struct gna_price;
struct gna_turn;
/* A launch that is measured, between gna_measure_begin and gna_measure_end; NULL: it is not. */
struct gna_sample;
struct gna_price *gna_price_of(const void *key);
uint64_t gna_price_ns(struct gna_price *price);
struct gna_sample *gna_measure_begin(struct gna_price *price, CUstream stream, const struct gna_turn *turn);
void gna_measure_end(struct gna_sample *sample, CUstream stream, bool launched);
void gna_measure_read(void); /* what is finished, without waiting */
void gna_price_changed(const void *key); /* the graph is another one now, or gone */
void gna_prices_context_gone(CUcontext context);
void gna_prices_forget(void);

/* --- readings.c: what the device times of a function say; under the lock of prices.c ---------------------------- */
#define GNA_READINGS 16u
struct gna_readings {
    uint64_t time[GNA_READINGS];
    uint16_t rivals[GNA_READINGS]; /* as they were then */
    uint64_t low;    /* quartile, of what each is taken for */
    int64_t average; /* ns, of more than are kept */
    uint64_t count;  /* ever */
    bool is_even;    /* they are about the same */
    bool differs;    /* by more than others' work explains */
};
/* Takes a time in, and answers the price. `rivals`: as gna_share_rivals says. */
uint64_t gna_reading_add(struct gna_readings *readings, uint64_t nanoseconds, uint32_t rivals);
uint64_t gna_reading_own(const struct gna_readings *readings, uint64_t nanoseconds, uint32_t rivals);
/* By how much launches paid too little, or too much, of which one was measured. */
int64_t gna_reading_owed(uint64_t own, uint64_t paid, uint32_t launches);

/* --- sampling.c: which launches of a function are measured; but for gna_sampling_late under the lock of prices.c -- */
struct gna_sampling {
    _Atomic uint32_t launches, due; /* the next one that is measured */
    _Atomic uint64_t late_ns;       /* when none has been measured for long */
    uint32_t every, last;           /* measured */
};
void gna_sampling_reset(struct gna_sampling *sampling);
void gna_sampling_late(struct gna_sampling *sampling, uint32_t number, uint64_t now);
uint32_t gna_sampling_took(struct gna_sampling *sampling, uint32_t number); /* for how many launches it stands */
void gna_sampling_next(struct gna_sampling *sampling, const struct gna_readings *readings, uint64_t price_ns, uint32_t number, uint64_t now);
void gna_sampling_learned(struct gna_sampling *sampling, const struct gna_readings *readings, uint64_t price_ns);

/* --- shares.c ----------------------------------------------------------------------------------------------- */
extern const uint32_t *gna_gate; /* 0: launches pass */
struct gna_turn {
    struct gna_sample *sample;
    CUstream stream;
    uint64_t charged_ns; /* of the share's time */
    uint64_t paid_ns;    /* of the device's */
    uint64_t at_ns;      /* when it was charged */
    int record;          /* -1: nothing was charged */
};
void gna_share_wait(struct gna_turn *turn, const void *key, CUstream stream);
void gna_share_done(struct gna_turn *turn, CUresult result);
/* A launch turned out to have taken more device time than it paid for, or less. */
void gna_share_settle(int record, int64_t device_ns);
void gna_shares_forget(void);
#define GNA_UNKNOWN_RIVALS 255u       /* one, that does not always have work */
uint32_t gna_share_rivals(int record); /* other processes at work on the GPU at a time, in 1/256 */
/* Captures of this process that are going on: one began, or ended, if that is what the driver answered. */
extern _Atomic int gna_captures;
void gna_capture_begun(CUresult result);
void gna_capture_ended(CUresult result);
/* Whether captures keep a launch from being measured now, and its function since `*since_ns`; 0: they do not. */
bool gna_capture_bars(_Atomic uint64_t *since_ns, bool due, uint64_t now);

static inline bool gna_gate_open(void) {
    return __builtin_expect(__atomic_load_n(__atomic_load_n(&gna_gate, __ATOMIC_RELAXED), __ATOMIC_RELAXED) == 0, 1);
}

/* --- launch.c --------------------------------------------------------------------------------------------- */
void gna_count_launch(void);

#endif
