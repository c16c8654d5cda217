/* What functions and graphs cost in device time. Some of their launches get an event before and behind them, and what is
 * read says the price. Nothing here waits for the GPU, and while anything is captured no event is touched, unless that
 * goes on for long. */
#include "caps.h"

#include <sys/mman.h>

#define PLACES 4096u
#define SAMPLES 64u
#define UNKNOWN_NS 100000u
#define HOPELESS 16u /* measurements in a row without one that came off: the driver gives no events */
#define POLL 16u /* launches between two looks at what is finished */

static _Atomic uint32_t failures; /* to measure launches that went well, in a row */

struct gna_price {
    _Atomic(const void *) key;
    _Atomic uint64_t ns;
    _Atomic uint32_t blind;     /* launched at a guess, and not settled yet */
    _Atomic bool known;         /* there are readings; written under the lock alone */
    _Atomic uint64_t barred_ns; /* since when captures keep it from being measured; 0: they do not */
    uint32_t generation;
    struct gna_sampling sampling;
    struct gna_readings readings;
};

enum { FREE, BEGUN, PENDING };

struct gna_sample {
    CUevent begin, end;
    struct gna_price *price;
    uint32_t generation;
    int record, state;
    bool failed; /* it has no events */
    uint64_t paid_ns;
    uint32_t launches; /* for which it stands */
};

static struct ring {
    struct ring *next;
    CUcontext context; /* NULL: free for another one */
    unsigned oldest, used;
    struct gna_sample sample[SAMPLES];
} *rings; /* one for each context that ever launched at once; none is given back */

static struct gna_mutex lock;
static struct gna_price prices[PLACES];
static struct gna_price any = {.ns = UNKNOWN_NS, .sampling = {.every = 1}}; /* for what the table has no room for */
static unsigned taken;
static _Atomic unsigned pending, polls;

static size_t home(const void *key) {
    return (size_t)(((uintptr_t)key * UINT64_C(0x9e3779b97f4a7c15)) >> 40) & (PLACES - 1);
}

static struct gna_price *find(const void *key) {
    for (size_t place = home(key);; place = (place + 1) & (PLACES - 1)) {
        const void *there = atomic_load_explicit(&prices[place].key, memory_order_acquire);
        if (there == key) {
            return &prices[place];
        }
        if (there == NULL) {
            return NULL;
        }
    }
}

static struct gna_price *insert(const void *key) {
    gna_enter(&lock);
    struct gna_price *found = find(key);
    if (found == NULL && taken < PLACES * 3 / 4) {
        size_t place = home(key);
        while (atomic_load_explicit(&prices[place].key, memory_order_relaxed) != NULL) {
            place = (place + 1) & (PLACES - 1);
        }
        taken++;
        found = &prices[place];
        atomic_store(&found->ns, UNKNOWN_NS);
        gna_sampling_reset(&found->sampling);
        atomic_store_explicit(&found->key, key, memory_order_release);
    }
    gna_leave(&lock);
    return found == NULL ? &any : found;
}

struct gna_price *gna_price_of(const void *key) {
    struct gna_price *found = key == NULL ? &any : find(key);
    return __builtin_expect(found != NULL, 1) ? found : insert(key);
}

/* Where nothing can be measured a guess holds nobody back: what is not known is free, and the agent says so. */
uint64_t gna_price_ns(struct gna_price *price) {
    bool is_free = atomic_load_explicit(&failures, memory_order_relaxed) >= HOPELESS && !atomic_load_explicit(&price->known, memory_order_relaxed);
    return is_free ? 0 : atomic_load_explicit(&price->ns, memory_order_relaxed);
}

/* A launch that fails by itself, as on a stream that is none, has the events fail, too, and says nothing of them. */
static void unmeasured(int record) {
    if (atomic_fetch_add(&failures, 1) + 1 == HOPELESS) {
        __atomic_fetch_add(&gna_usage->device[record].unmeasured, 1, __ATOMIC_RELAXED);
    }
}

/* The lock is held. */
static void reset(struct gna_price *price) {
    atomic_store(&price->known, false);
    price->generation++;
    price->readings = (struct gna_readings){.count = 0};
    gna_sampling_reset(&price->sampling);
    atomic_store(&price->blind, 0);
}

void gna_price_changed(const void *key) {
    gna_enter(&lock);
    struct gna_price *found = key == NULL ? NULL : find(key);
    if (found != NULL) {
        reset(found); /* its price stays as the first guess */
    }
    gna_leave(&lock);
}

void gna_prices_context_gone(CUcontext context) {
    gna_enter(&lock);
    for (struct ring *ring = rings; context != NULL && ring != NULL; ring = ring->next) {
        if (ring->context == context) {
            atomic_fetch_sub(&pending, ring->used);
            *ring = (struct ring){.next = ring->next}; /* its events went with it */
        }
    }
    gna_leave(&lock);
}

void gna_prices_forget(void) {
    gna_enter(&lock);
    for (struct ring *ring = rings; ring != NULL; ring = ring->next) {
        *ring = (struct ring){.next = ring->next};
    }
    for (unsigned place = 0; place < PLACES; place++) {
        if (atomic_load(&prices[place].key) != NULL) {
            reset(&prices[place]);
        }
    }
    atomic_store(&pending, 0);
    gna_leave(&lock);
}

/* The lock is held. */
static void take_in(const struct gna_sample *sample, uint64_t nanoseconds) {
    struct gna_price *price = sample->price;
    struct gna_readings *readings = &price->readings;
    uint32_t rivals = gna_share_rivals(sample->record);
    int64_t owed = (int64_t)(nanoseconds - sample->paid_ns);
    atomic_store_explicit(&failures, 0, memory_order_relaxed);
    if (sample->generation != price->generation) {
        gna_share_settle(sample->record, owed); /* of a graph that was changed since */
        return;
    }
    uint64_t ns = gna_reading_add(readings, nanoseconds, rivals);
    atomic_store_explicit(&price->ns, ns, memory_order_relaxed);
    gna_sampling_learned(&price->sampling, readings, ns);
    if (!atomic_exchange(&price->known, true)) {
        uint32_t blind = atomic_exchange(&price->blind, 0);
        gna_share_settle(sample->record, owed * (int64_t)blind);
    } else if (readings->differs) {
        uint64_t own = gna_reading_own(readings, nanoseconds, rivals);
        gna_share_settle(sample->record, gna_reading_owed(own, sample->paid_ns, sample->launches));
    }
}

/* The lock is held; all that follows is allowed to a thread while another one captures. */
static void read_ring(struct ring *ring) {
    while (ring->used > 0) {
        struct gna_sample *oldest = &ring->sample[ring->oldest];
        float milliseconds = 0;
        if (oldest->state != PENDING || (!oldest->failed && REAL(cuEventQuery)(oldest->end) != CUDA_SUCCESS)) {
            return;
        }
        if (!oldest->failed && REAL(cuEventElapsedTime)(&milliseconds, oldest->begin, oldest->end) == CUDA_SUCCESS && milliseconds >= 0) {
            take_in(oldest, (uint64_t)((double)milliseconds * 1e6));
        }
        oldest->state = FREE;
        ring->oldest = (ring->oldest + 1) % SAMPLES;
        ring->used--;
        atomic_fetch_sub(&pending, 1);
    }
}

/* The lock is held. */
static struct ring *ring_of_current(bool make) {
    CUcontext context = NULL;
    struct ring *empty = NULL;
    if (REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || context == NULL) {
        return NULL;
    }
    for (struct ring *ring = rings; ring != NULL; ring = ring->next) {
        if (ring->context == context) {
            return ring;
        }
        empty = ring->context == NULL ? ring : empty;
    }
    if (!make) {
        return NULL;
    }
    if (empty == NULL) {
        empty = mmap(NULL, sizeof(*empty), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (empty == MAP_FAILED) {
            return NULL;
        }
        empty->next = rings;
        rings = empty;
    }
    empty->context = context;
    return empty;
}

void gna_measure_read(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (atomic_load_explicit(&pending, memory_order_relaxed) == 0 || atomic_load(&gna_captures) > 0) {
        return;
    }
    gna_enter(&lock);
    struct ring *ring = ring_of_current(false);
    if (ring != NULL && ring->used > 0 && REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS) {
        read_ring(ring);
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    }
    gna_leave(&lock);
}

static bool has_event(CUevent *event) {
    if (*event == NULL && REAL(cuEventCreate)(event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        *event = NULL;
    }
    return *event != NULL;
}

/* The lock is held. */
static struct gna_sample *begin(struct gna_price *price, const struct gna_turn *turn) {
    struct ring *ring = ring_of_current(true);
    if (ring == NULL) {
        return NULL;
    }
    read_ring(ring);
    struct gna_sample *sample = &ring->sample[(ring->oldest + ring->used) % SAMPLES];
    if (ring->used == SAMPLES) {
        return NULL;
    }
    sample->failed = !has_event(&sample->begin) || !has_event(&sample->end);
    sample->price = price;
    sample->generation = price->generation;
    sample->record = turn->record;
    sample->paid_ns = turn->paid_ns;
    sample->state = BEGUN;
    ring->used++;
    atomic_fetch_add(&pending, 1);
    return sample;
}

struct gna_sample *gna_measure_begin(struct gna_price *price, CUstream stream, const struct gna_turn *turn) {
    struct gna_sampling *sampling = &price->sampling;
    uint32_t number = atomic_fetch_add_explicit(&sampling->launches, 1, memory_order_relaxed);
    if (__builtin_expect(!atomic_load_explicit(&price->known, memory_order_relaxed), 0)) {
        atomic_fetch_add(&price->blind, 1);
    }
    if (__builtin_expect(turn->at_ns >= atomic_load_explicit(&sampling->late_ns, memory_order_relaxed), 0)) {
        gna_sampling_late(sampling, number, turn->at_ns);
    }
    bool is_due = (int32_t)(number - atomic_load_explicit(&sampling->due, memory_order_relaxed)) >= 0;
    if (__builtin_expect(!is_due || gna_capture_bars(&price->barred_ns, is_due, turn->at_ns), 1)) {
        if (atomic_load_explicit(&pending, memory_order_relaxed) > 0 &&
            atomic_fetch_add_explicit(&polls, 1, memory_order_relaxed) % POLL == 0) {
            gna_measure_read();
        }
        return NULL;
    }
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    struct gna_sample *sample = NULL;
    bool is_relaxed = REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    gna_enter(&lock);
    if (is_relaxed) {
        sample = begin(price, turn);
        if (sample != NULL && atomic_load(&gna_captures) == 0) {
            atomic_store_explicit(&price->barred_ns, 0, memory_order_relaxed);
        }
    }
    if (sample != NULL) {
        sample->launches = gna_sampling_took(sampling, number);
    }
    gna_sampling_next(sampling, &price->readings, gna_price_ns(price), number, turn->at_ns);
    gna_leave(&lock);
    if (sample != NULL) { /* this thread's alone until gna_measure_end; without the lock: a full stream makes its caller wait */
        sample->failed = sample->failed || REAL(cuEventRecord)(sample->begin, stream) != CUDA_SUCCESS;
    }
    if (is_relaxed) {
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    }
    return sample;
}

void gna_measure_end(struct gna_sample *sample, CUstream stream, bool launched) {
    gna_enter(&lock);
    bool is_begun = sample->state == BEGUN && !sample->failed;
    CUevent end = sample->end;
    gna_leave(&lock);
    bool is_recorded = is_begun && launched && REAL(cuEventRecord)(end, stream) == CUDA_SUCCESS;
    gna_enter(&lock);
    if (sample->state == BEGUN && sample->end == end) { /* its context is not gone meanwhile */
        sample->failed = !is_recorded;
        sample->state = PENDING;
        if (launched && !is_recorded) {
            unmeasured(sample->record);
        }
    }
    gna_leave(&lock);
}
