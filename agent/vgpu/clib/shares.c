/* Compute shares. Per container and GPU there is one word in the usage region: the instant at which the share has caught
 * up with all that was launched. A launch waits for it and moves it on by what it costs; who idled may be a burst behind.
 * There is nothing to refill, to own or to repair: a process that is killed leaves a sound word. */
#include "caps.h"

#define NONE 0u
#define WHOLE 1u /* all of the GPU: launches are seen, and never wait */
#define PAUSED UINT64_MAX
#define ONE 65536u
#define LONGEST_NAP_NS UINT64_C(100000000)   /* a change whose wake did not come through is seen by then */
#define LONGEST_DEBT_NS UINT64_C(600000000000) /* more is a damaged word */
#define SILENT_NS UINT64_C(30000000000)        /* without an agent's beat: nobody is there to end a pause */
#define LONGEST_BAR_NS UINT64_C(3000000000)    /* for which captures keep a function from being measured */

static const uint32_t closed = 1;
const uint32_t *gna_gate = &closed; /* until the files are open: the first launch looks */
_Atomic int gna_captures;

static struct share {
    _Atomic uint64_t generation; /* of the limits below; 0: they are to be looked at again */
    _Atomic uint64_t looked;     /* that of the last look */
    _Atomic uint64_t cost;   /* of the share's time for one of the device's, in 1/65536; NONE; WHOLE; PAUSED */
    _Atomic uint64_t burst;  /* ns of the share's time */
    _Atomic uint32_t rivals; /* other processes at work on the GPU at a time, in 1/256 */
} shares[GNA_MAX_DEVICES];

void gna_capture_begun(CUresult result) {
    if (result == CUDA_SUCCESS) {
        atomic_fetch_add(&gna_captures, 1);
    }
}

void gna_capture_ended(CUresult result) {
    bool has_ended = result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED || result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (has_ended && atomic_load(&gna_captures) > 0) {
        atomic_fetch_sub(&gna_captures, 1);
    }
}

/* The driver lets a thread touch events of streams that are not captured. Not to do so is caution, and ends where it would
 * make launches free. */
bool gna_capture_bars(_Atomic uint64_t *since_ns, bool due, uint64_t now) {
    if (__builtin_expect(atomic_load_explicit(&gna_captures, memory_order_relaxed) == 0, 1)) {
        return false;
    }
    uint64_t since = atomic_load_explicit(since_ns, memory_order_relaxed);
    if (due && since == 0) {
        atomic_store_explicit(since_ns, now, memory_order_relaxed);
    }
    return !due || since == 0 || now < since + LONGEST_BAR_NS;
}

void gna_shares_forget(void) {
    atomic_store(&gna_captures, 0);
    gna_prices_forget();
}

uint32_t gna_share_rivals(int record) {
    return atomic_load_explicit(&shares[record].rivals, memory_order_relaxed);
}

static uint64_t cost_of(const struct gna_limit *limit) {
    if (!(limit->flags & GNA_FLAG_COMPUTE)) {
        return NONE;
    }
    if (limit->core_share >= 10000) {
        return WHOLE;
    }
    uint64_t correction = limit->correction == 0 ? ONE : limit->correction;
    uint64_t rate = limit->core_share * correction; /* 10000 * 65536 is all of the GPU */
    return rate == 0 ? PAUSED : UINT64_C(10000) * ONE * ONE / rate;
}

static uint64_t times(uint64_t device_ns, uint64_t cost) {
    __uint128_t product = (__uint128_t)device_ns * cost / ONE;
    return product > LONGEST_DEBT_NS ? LONGEST_DEBT_NS : (uint64_t)product;
}

static void refresh(struct share *share, unsigned record) {
    uint64_t generation = gna_limit_generation(record);
    if (__builtin_expect(generation == atomic_load_explicit(&share->generation, memory_order_acquire), 1)) {
        return;
    }
    struct gna_limit limit;
    if (gna_limit_of(record, &limit)) {
        uint64_t cost = cost_of(&limit);
        uint64_t burst = (limit.burst_us == 0 ? GNA_BURST_US : limit.burst_us) * UINT64_C(1000);
        atomic_store_explicit(&share->burst, cost == PAUSED || cost <= WHOLE ? 0 : times(burst, cost), memory_order_relaxed);
        atomic_store_explicit(&share->cost, cost, memory_order_relaxed);
        atomic_store_explicit(&share->rivals, limit.rivals == 0 ? GNA_UNKNOWN_RIVALS : limit.rivals - 1, memory_order_relaxed);
        atomic_store_explicit(&share->looked, generation, memory_order_relaxed);
        /* A copy that is half written may have its generation already: it will not be another one when the copy is whole. */
        bool is_whole = limit.generation == gna_limit_newest(record);
        atomic_store_explicit(&share->generation, is_whole ? generation : 0, memory_order_release);
    }
}

/* Whether shares are in force at all; the first launch of a process finds out. */
static bool armed(void) {
    if (__atomic_load_n(&gna_gate, __ATOMIC_ACQUIRE) != &closed) {
        return true; /* and the files are open for this thread, too */
    }
    const struct gna_limits_gate *gate = gna_limits_gate();
    if (gate == NULL) {
        return false; /* without sound files there is no context, and so nothing to launch */
    }
    __atomic_store_n(&gna_gate, &gate->compute, __ATOMIC_RELEASE);
    return !gna_gate_open();
}

static void nap(unsigned record, uint64_t now, uint64_t until) {
    struct gna_usage_device *device = &gna_usage->device[record];
    const struct gna_limits_gate *gate = gna_limits_gate();
    uint32_t seen = __atomic_load_n(&gate->changes, __ATOMIC_ACQUIRE);
    if (gna_limit_generation(record) != atomic_load_explicit(&shares[record].looked, memory_order_acquire)) {
        return; /* changed since the caller looked: the wake for it may have been before `seen` */
    }
    until = until - now > LONGEST_NAP_NS ? now + LONGEST_NAP_NS : until;
    gna_clock_wait(&gate->changes, seen, until);
    __atomic_fetch_add(&device->waited_ns, gna_clock_ns() - now, __ATOMIC_RELAXED);
}

/* Of a pause: its agent has not kept the beat for long, by looks of this process. */
static bool is_forgotten(uint64_t now) {
    static _Atomic uint32_t seen;
    static _Atomic uint64_t since;
    uint32_t beat = __atomic_load_n(&gna_limits_gate()->beat, __ATOMIC_RELAXED);
    if (beat != atomic_load_explicit(&seen, memory_order_relaxed)) {
        atomic_store_explicit(&since, now, memory_order_relaxed);
        atomic_store_explicit(&seen, beat, memory_order_relaxed);
    }
    return beat != 0 && now - atomic_load_explicit(&since, memory_order_relaxed) >= SILENT_NS;
}

/* Waits for the share and charges it. */
static void charge(struct gna_turn *turn, unsigned record, uint64_t device_ns) {
    struct share *share = &shares[record];
    struct gna_usage_device *device = &gna_usage->device[record];
    bool waited = false;
    for (;;) {
        refresh(share, record);
        uint64_t cost = atomic_load_explicit(&share->cost, memory_order_relaxed);
        uint64_t burst = atomic_load_explicit(&share->burst, memory_order_relaxed);
        if (cost == NONE) {
            return;
        }
        if (cost == WHOLE) {
            __atomic_store_n(&device->next_ns, gna_clock_ns(), __ATOMIC_RELAXED);
            return;
        }
        uint64_t now = gna_clock_ns(), next = __atomic_load_n(&device->next_ns, __ATOMIC_RELAXED);
        uint64_t base = next;
        if (base > now + LONGEST_DEBT_NS * 2) {
            base = now;
        } else if (base + burst < now) {
            base = now - burst;
        }
        if (cost != PAUSED && base <= now) {
            uint64_t price = times(device_ns, cost);
            if (__atomic_compare_exchange_n(&device->next_ns, &next, base + price, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
                turn->charged_ns = price;
                turn->paid_ns = device_ns;
                turn->at_ns = now;
                return;
            }
            continue;
        }
        if (!gna_usage_sound() || (cost == PAUSED && is_forgotten(now))) {
            return; /* without sound files the container is refused memory from here on */
        }
        if (!waited) {
            waited = true;
            __atomic_fetch_add(&device->waits, 1, __ATOMIC_RELAXED);
            gna_measure_read(); /* what is known by now may change the price of the next one */
        }
        nap(record, now, cost == PAUSED ? now + LONGEST_NAP_NS : base);
    }
}

void gna_share_settle(int record, int64_t device_ns) {
    struct gna_usage_device *device = &gna_usage->device[record];
    uint64_t cost = atomic_load_explicit(&shares[record].cost, memory_order_relaxed);
    if (cost > WHOLE && cost != PAUSED) {
        uint64_t amount = times((uint64_t)(device_ns < 0 ? -device_ns : device_ns), cost);
        if (device_ns < 0) {
            __atomic_fetch_sub(&device->next_ns, amount, __ATOMIC_RELAXED);
        } else {
            __atomic_fetch_add(&device->next_ns, amount, __ATOMIC_RELAXED);
        }
    }
}

void gna_share_wait(struct gna_turn *turn, const void *key, CUstream stream) {
    CUgraph graph;
    int record = 0;
    *turn = (struct gna_turn){.record = -1, .stream = stream};
    if (!armed() || gna_usage == NULL) {
        return;
    }
    if (gna_records() > 1 && (gna_current_record(&record) != CUDA_SUCCESS || record < 0)) {
        return;
    }
    refresh(&shares[record], (unsigned)record);
    if (atomic_load_explicit(&shares[record].cost, memory_order_relaxed) == NONE) {
        return;
    }
    if (atomic_load_explicit(&gna_captures, memory_order_relaxed) > 0 && gna_capturing(stream, &graph)) {
        return; /* nothing runs now: it is paid for when the graph is launched */
    }
    if (atomic_load_explicit(&shares[record].cost, memory_order_relaxed) == WHOLE) {
        charge(turn, (unsigned)record, 0);
        return;
    }
    struct gna_price *price = gna_price_of(key);
    charge(turn, (unsigned)record, gna_price_ns(price));
    turn->record = record;
    turn->sample = gna_measure_begin(price, stream, turn);
}

void gna_share_done(struct gna_turn *turn, CUresult result) {
    if (turn->sample != NULL) {
        gna_measure_end(turn->sample, turn->stream, result == CUDA_SUCCESS);
    }
    if (turn->record >= 0 && result != CUDA_SUCCESS && turn->charged_ns > 0) {
        __atomic_fetch_sub(&gna_usage->device[turn->record].next_ns, turn->charged_ns, __ATOMIC_RELAXED);
    }
}
