/* Which launches of a function are measured. An event costs some microseconds, so few are; and which of them is drawn by
 * lot, so that no order of long and short launches hides the long ones. */
#include "caps.h"

#define FIRST 3u          /* launches that are measured at once */
#define OFTEN 8u
#define SELDOM 64u
#define APART_NS 1000000u       /* of a function's device time between two measurements, on average */
#define APART_DIFFERS_NS 200000u /* the same, where launches differ */
#define MOST_APART 1024u
#define LATEST_NS UINT64_C(20000000) /* after a measurement one of the next few is measured, however short they were */

void gna_sampling_reset(struct gna_sampling *sampling) {
    sampling->every = OFTEN;
    sampling->last = 0;
    atomic_store(&sampling->late_ns, 0);
    atomic_store(&sampling->launches, 0);
    atomic_store(&sampling->due, 0);
}

/* 0 to most - 1. The clock's nanoseconds are the lot. */
static uint32_t drawn(uint32_t most, uint64_t now, uint32_t number) {
    uint64_t mixed = (now + number) * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ mixed >> 32) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)((mixed >> 32) * most >> 32);
}

static void bring_forward(struct gna_sampling *sampling, uint32_t number) {
    if ((int32_t)(atomic_load(&sampling->due) - number) > 0) {
        atomic_store(&sampling->due, number);
    }
}

void gna_sampling_late(struct gna_sampling *sampling, uint32_t number, uint64_t now) {
    atomic_store(&sampling->late_ns, now + LATEST_NS);
    bring_forward(sampling, number + drawn(OFTEN * 2, now, number));
}

/* Launches until the next one, 1 or more. */
static uint32_t apart(const struct gna_sampling *sampling, bool differs, uint64_t price_ns, uint64_t now, uint32_t number) {
    uint64_t least = (differs ? APART_DIFFERS_NS : APART_NS) / (price_ns + 1);
    least = least > MOST_APART ? MOST_APART : least;
    least = sampling->every > least ? sampling->every : least;
    return 1 + drawn((uint32_t)least * 2 - 1, now, number);
}

uint32_t gna_sampling_took(struct gna_sampling *sampling, uint32_t number) {
    /* Numbers are drawn before the lock is had: another thread's launch may have stood for this one, or a reset come. */
    int32_t stands_for = (int32_t)(number - sampling->last);
    sampling->last = number;
    return stands_for > 0 ? (uint32_t)stands_for : 0;
}

void gna_sampling_next(struct gna_sampling *sampling, const struct gna_readings *readings, uint64_t price_ns, uint32_t number, uint64_t now) {
    uint32_t next = number + 1 < FIRST ? 1 : apart(sampling, readings->differs, price_ns, now, number);
    atomic_store_explicit(&sampling->due, number + next, memory_order_relaxed);
    atomic_store_explicit(&sampling->late_ns, now + LATEST_NS, memory_order_relaxed);
}

void gna_sampling_learned(struct gna_sampling *sampling, const struct gna_readings *readings, uint64_t price_ns) {
    if (readings->differs) {
        uint32_t number = atomic_load(&sampling->launches);
        sampling->every = 1;
        bring_forward(sampling, number + apart(sampling, true, price_ns, gna_clock_ns(), number));
    } else if (readings->is_even) {
        sampling->every = sampling->every * 2 > SELDOM ? SELDOM : sampling->every * 2;
    } else {
        sampling->every = OFTEN;
    }
}
