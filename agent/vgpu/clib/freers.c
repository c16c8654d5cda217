/* Streams behind which memory of pools was freed.
 *
 * What is freed behind a busy stream no longer counts as used, and yet only an allocation on that stream may have it before
 * the stream gets there (H200, driver 580). So what a pool has spare is a stream's to have when each other stream that
 * freed has got there: the application waited for it, or it is asked, which waits for nothing.
 *
 * An entry: `key` is the stream's name, `other` its context, `bytes` an event behind the last free or 0, `record` the GPU
 * of the memory, `count` the calls going on, `mappings` the number of the last one that ended. */
#include "caps.h"

#define OF_THREAD (UINT64_C(1) << 63)

enum { IN_GRAPH = 3, ANY_GPU = -1, MANY = 16 };

static struct gna_mutex lock;
static _Atomic unsigned freers;
static _Atomic uint32_t frees; /* calls that ended */
static _Atomic bool nobody_is_asked; /* a stream's end is not all that a pool waits for */
static _Atomic uint64_t numbers;

static bool is_handle(CUstream stream) {
    return stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

static CUcontext context_of(CUstream stream) {
    CUcontext context = NULL;
    if (is_handle(stream)) {
        REAL(cuStreamGetCtx)(stream, &context);
    } else {
        REAL(cuCtxGetCurrent)(&context);
    }
    return context;
}

/* Handles are even. A thread's own stream has a number that no other thread gets, unlike an address of the thread's. */
static uint64_t name_of(CUstream stream, CUcontext context) {
    static _Thread_local uint64_t own __attribute__((tls_model("initial-exec")));
    if (is_handle(stream)) {
        return (uintptr_t)stream;
    }
    if (stream != CU_STREAM_PER_THREAD) {
        return (uintptr_t)context | 1;
    }
    own = own == 0 ? atomic_fetch_add(&numbers, 1) + 1 : own;
    return ((uintptr_t)context * UINT64_C(0x9e3779b97f4a7c15) ^ own << 1) | OF_THREAD | 1;
}

/* Even, unlike a thread's: of what no stream is asked for. */
static uint64_t new_name(void) {
    return (atomic_fetch_add(&numbers, 1) + 1) << 1 | OF_THREAD;
}

void gna_freers_forget(void) {
    atomic_store(&freers, 0);
}

void gna_freers_never_ask(void) {
    atomic_store(&nobody_is_asked, true);
}

/* Of one GPU it need not be asked. */
static int record_of(CUdeviceptr pointer) {
    int device = ANY_GPU;
    if (gna_records() == 1) {
        return 0;
    }
    REAL(cuPointerGetAttribute)(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
    return gna_record_of(device);
}

/* The lock is held. */
static void drop(struct gna_entry *entry, bool has_context) {
    if (gna_take(GNA_FREER, entry->key, entry)) {
        atomic_fetch_sub(&freers, 1);
        if (entry->bytes != 0 && has_context) {
            REAL(cuEventDestroy_v2)((CUevent)(uintptr_t)entry->bytes);
        }
    }
}

/* The lock is held. To ask a stream that is captured would end its capture. */
static bool is_past(const struct gna_entry *entry) {
    CUstream stream = (CUstream)(uintptr_t)entry->key;
    CUcontext context = (CUcontext)(uintptr_t)entry->other;
    CUgraph graph;
    if (entry->count > 0 || atomic_load(&nobody_is_asked)) {
        return false;
    }
    if (entry->bytes != 0) {
        return REAL(cuEventQuery)((CUevent)(uintptr_t)entry->bytes) == CUDA_SUCCESS;
    }
    if (entry->key & OF_THREAD) {
        return false; /* no event was to be had */
    }
    if ((entry->key & 1) == 0) {
        return !gna_capturing(stream, &graph) && REAL(cuStreamQuery)(stream) == CUDA_SUCCESS;
    }
    if (entry->key != (entry->other | 1) || atomic_load(&gna_captures) > 0 || REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS) {
        return false;
    }
    bool past = REAL(cuStreamQuery)(CU_STREAM_LEGACY) == CUDA_SUCCESS;
    REAL(cuCtxPopCurrent_v2)(&context);
    return past;
}

/* All that freed memory of the GPU's pools, but for one, have got there; those that have are forgotten. */
static bool ask(int record, uint64_t but) {
    struct gna_entry entry;
    bool past = true;
    unsigned seen = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    REAL(cuThreadExchangeStreamCaptureMode)(&mode); /* or to ask would end a capture of the application */
    gna_enter(&lock);
    unsigned count = atomic_load(&freers);
    for (size_t place = 0; gna_next(GNA_FREER, &place, &entry); seen++) {
        if (entry.key == but || (entry.record != record && entry.record != ANY_GPU)) {
            continue;
        }
        if (is_past(&entry)) {
            drop(&entry, true);
        } else {
            past = false;
        }
    }
    gna_leave(&lock);
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return past && seen == count; /* the table may move, or have had no room */
}

bool gna_freers_past(int record, CUstream stream, bool asks) {
    struct gna_entry entry;
    unsigned count = atomic_load(&freers);
    if (count == 0) {
        return true;
    }
    uint64_t own = name_of(stream, context_of(stream));
    return (count == 1 && gna_get(GNA_FREER, own, &entry)) || (asks && ask(record, own));
}

uint64_t gna_freer_begins(CUstream stream, CUdeviceptr pointer, bool in_graph) {
    struct gna_entry entry;
    CUcontext context = context_of(stream);
    uint64_t name = in_graph ? IN_GRAPH : name_of(stream, context);
    int record = record_of(pointer);
    gna_enter(&lock);
    bool is_new = !gna_get(GNA_FREER, name, &entry);
    if (is_new) {
        entry = (struct gna_entry){.kind = GNA_FREER, .key = name, .record = record, .other = (uintptr_t)context};
    }
    entry.record = entry.record == record ? record : ANY_GPU;
    entry.count++;
    unsigned count = atomic_fetch_add(&freers, is_new) + is_new;
    gna_put(&entry);
    gna_leave(&lock);
    if (is_new && count % MANY == 0) {
        ask(record, name); /* of threads that are gone, say */
    }
    return name;
}

/* Nobody asks for the event while the call goes on; it is recorded without the lock, since a full stream blocks. */
static void ended(uint64_t name, CUstream stream, bool needs_event) {
    struct gna_entry entry;
    CUevent event = NULL;
    if (needs_event && gna_get(GNA_FREER, name, &entry)) {
        event = (CUevent)(uintptr_t)entry.bytes;
        bool is_made = event != NULL || REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
        if (is_made && REAL(cuEventRecord)(event, stream) != CUDA_SUCCESS) {
            REAL(cuEventDestroy_v2)(event);
            event = NULL;
        }
    }
    gna_enter(&lock);
    if (gna_get(GNA_FREER, name, &entry)) {
        entry.bytes = (uintptr_t)event;
        entry.mappings = atomic_fetch_add(&frees, 1) + 1;
        entry.count--;
        gna_put(&entry);
    }
    gna_leave(&lock);
}

void gna_freer_ended(uint64_t name, CUstream stream) {
    if (name != IN_GRAPH) { /* a graph may run at any time */
        ended(name, stream, stream == CU_STREAM_PER_THREAD);
    }
}

uint32_t gna_freers_now(void) {
    return atomic_load(&frees);
}

void gna_freers_waited(CUcontext context, const CUstream *stream, uint32_t began) {
    struct gna_entry entry;
    if (atomic_load(&freers) == 0) {
        return;
    }
    if (stream != NULL || context == NULL) {
        context = context_of(stream != NULL ? *stream : NULL);
    }
    uint64_t name = stream != NULL ? name_of(*stream, context) : 0;
    gna_enter(&lock);
    for (size_t place = 0; gna_next(GNA_FREER, &place, &entry);) {
        bool is_waited = stream != NULL ? entry.key == name : entry.other == (uintptr_t)context;
        if (is_waited && entry.count == 0 && (int32_t)(entry.mappings - began) <= 0) {
            drop(&entry, true);
        }
    }
    gna_leave(&lock);
}

/* Another context and its streams may get the handles as soon as the driver is called: what is left has neither. A call that
 * fails may have ended the context all the same, so that its streams are not asked after it either, only waited for. */
uint64_t gna_freers_leave(CUcontext context) {
    struct gna_entry entry;
    if (context == NULL || atomic_load(&freers) == 0) {
        return 0;
    }
    uint64_t leaving = new_name(); /* no context has it */
    gna_enter(&lock);
    for (bool again = true; again;) { /* the table may move */
        again = false;
        for (size_t place = 0; gna_next(GNA_FREER, &place, &entry);) {
            if (entry.key != IN_GRAPH && entry.other == (uintptr_t)context && gna_take(GNA_FREER, entry.key, &entry)) {
                entry.key = new_name();
                entry.other = leaving;
                entry.bytes = entry.count = 0;
                gna_put(&entry);
                again = true;
            }
        }
    }
    gna_leave(&lock);
    return leaving;
}

void gna_freers_left(uint64_t leaving, CUcontext stays) {
    struct gna_entry entry;
    gna_enter(&lock);
    for (bool again = leaving != 0; again;) {
        again = false;
        for (size_t place = 0; gna_next(GNA_FREER, &place, &entry);) {
            if (entry.other != leaving) {
                continue;
            }
            again = true;
            if (stays == NULL) {
                drop(&entry, false);
            } else {
                entry.other = (uintptr_t)stays;
                gna_put(&entry);
            }
        }
    }
    gna_leave(&lock);
}

/* Before the call, since another stream may get the handle: what the stream freed and has not got to has a name of its own. */
static void retire(CUstream stream) {
    struct gna_entry entry;
    if (!is_handle(stream) || atomic_load(&freers) == 0) {
        return;
    }
    gna_enter(&lock);
    bool is_known = gna_take(GNA_FREER, (uintptr_t)stream, &entry);
    if (is_known) {
        entry.key = new_name();
        entry.count++;
        gna_put(&entry);
    }
    gna_leave(&lock);
    if (is_known) {
        CUcontext context = (CUcontext)(uintptr_t)entry.other;
        bool is_pushed = context != NULL && REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
        ended(entry.key, stream, true);
        if (is_pushed) {
            REAL(cuCtxPopCurrent_v2)(&context);
        }
        ask(entry.record, 0);
    }
}

HOOK(cuStreamDestroy)(CUstream hStream) {
    retire(hStream);
    return REAL(cuStreamDestroy)(hStream);
}

HOOK(cuStreamDestroy_v2)(CUstream hStream) {
    retire(hStream);
    return REAL(cuStreamDestroy_v2)(hStream);
}
