/* How far the streams of this process run beside each other. Prices are of launches one by one, and the GPU is busy for
 * the union of their times, not for the sum. So where launches go to several streams, all of a number in a row are
 * looked at now and then: the part of their sum in which the GPU was busy is what launches pay until the next look.
 * Launches that a share lets through one by one would not overlap at all, so they go in groups. */
#include "caps.h"

#include <stdlib.h>

#define ONE 65536u
#define APART_NS UINT64_C(50000000)      /* between two looks: each costs some hundred microseconds */
#define FARTHEST_NS UINT64_C(3200000000) /* where nothing overlaps, though there are several streams */
#define GROUP_NS UINT64_C(5000000)       /* of device time; more, where a single launch takes more */
#define BESIDE (ONE / 16 * 15)           /* above it nothing is worth a group */
#define FEWEST 8u
#define LONGEST_NS UINT64_C(250000000) /* of a look that has the fewest launches */
#define LATE_NS UINT64_C(5000000000)   /* what has not ended by then says nothing about now */
#define OTHER 1.5                      /* times more or less overlap than before: the work is another one */
#define KEPT .94                       /* of the looks before, while it is the same */

enum { IDLE, LOOKING, READING, AGAIN };

struct span {
    double begin, end; /* ms */
};

struct times {
    double sum, busy; /* ms */
};

static struct overlap {
    _Atomic(const void *) stream; /* of the launch before */
    _Atomic bool several;         /* streams since the last look */
    _Atomic int state;
    _Atomic uint64_t next_ns; /* when there is to be a look, or one is given up */
    _Atomic uint32_t part;    /* of the sum of device times, in 1/65536; 0: all of it */
    _Atomic uint64_t paid_ns; /* since the look began */
    /* The rest under the lock of prices.c. */
    CUcontext context; /* whose events say the times */
    uint32_t look;
    uint64_t began_ns, since_ns, apart_ns; /* since: of the first of two looks in a row */
    unsigned begun, read;
    struct times kept, odd; /* odd: of a look that was far from those before, until the next one */
    int way;                /* in which it was: 1 for less overlap, -1 for more */
    struct span spans[GNA_LOOK];
} overlaps[GNA_MAX_DEVICES];

static _Thread_local char own __attribute__((tls_model("initial-exec")));

uint64_t gna_overlap_part(int record, uint64_t device_ns) {
    uint32_t part = atomic_load_explicit(&overlaps[record].part, memory_order_relaxed);
    return __builtin_expect(part == 0, 1) ? device_ns : (uint64_t)((__uint128_t)device_ns * part / ONE);
}

uint64_t gna_overlap_group(int record, uint64_t device_ns) {
    struct overlap *overlap = &overlaps[record];
    uint32_t part = atomic_load_explicit(&overlap->part, memory_order_relaxed);
    bool is_open = atomic_load_explicit(&overlap->state, memory_order_relaxed) == LOOKING || (part > 0 && part < BESIDE);
    uint64_t one = device_ns + device_ns / 16; /* there is always room for a second one */
    return __builtin_expect(!is_open, 1) ? 0 : one > GROUP_NS ? one : GROUP_NS;
}

bool gna_overlap_wants(int record, CUstream stream, uint64_t now, uint64_t paid_ns) {
    struct overlap *overlap = &overlaps[record];
    /* The default streams of threads are different ones under one name. */
    const void *key = stream == CU_STREAM_PER_THREAD ? (const void *)&own : (const void *)stream;
    if (key != atomic_load_explicit(&overlap->stream, memory_order_relaxed)) {
        atomic_store_explicit(&overlap->stream, key, memory_order_relaxed);
        atomic_store_explicit(&overlap->several, true, memory_order_relaxed);
    }
    int state = atomic_load_explicit(&overlap->state, memory_order_relaxed);
    if (state != IDLE) {
        atomic_fetch_add_explicit(&overlap->paid_ns, paid_ns, memory_order_relaxed);
    }
    if (state == LOOKING || __builtin_expect(now < atomic_load_explicit(&overlap->next_ns, memory_order_relaxed), 1)) {
        return state == LOOKING;
    }
    return state != IDLE || atomic_load_explicit(&overlap->several, memory_order_relaxed) ||
           atomic_load_explicit(&overlap->part, memory_order_relaxed) != 0;
}

static void rest(struct overlap *overlap, uint64_t now) {
    atomic_store(&overlap->next_ns, now + overlap->apart_ns);
    atomic_store(&overlap->state, IDLE);
}

static void forget(struct overlap *overlap) {
    atomic_store(&overlap->part, 0);
    overlap->kept = overlap->odd = (struct times){0, 0};
    overlap->way = 0;
    overlap->apart_ns = APART_NS;
}

static int by_begin(const void *one, const void *other) {
    const struct span *a = one, *b = other;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* What the launches of a look took one by one, and for how much of it the GPU was busy. */
static struct times times_of(struct span *spans, unsigned count) {
    struct times found = {0, 0};
    double until = -1e30;
    qsort(spans, count, sizeof(*spans), by_begin);
    for (unsigned number = 0; number < count; number++) {
        double begin = spans[number].begin > until ? spans[number].begin : until;
        found.sum += spans[number].end - spans[number].begin;
        if (spans[number].end > begin) {
            found.busy += spans[number].end - begin;
            until = spans[number].end;
        }
    }
    return found;
}

/* Whether the work is another one than before: two looks in a row say so, since one may have been at an odd moment. */
static bool is_other(struct overlap *overlap, double before, double now) {
    int way = now > before * OTHER ? 1 : before > now * OTHER ? -1 : 0;
    bool is_sure = way != 0 && way == overlap->way;
    overlap->way = is_sure ? 0 : way;
    return is_sure;
}

static void conclude(int record, struct overlap *overlap) {
    double before = atomic_load(&overlap->part) == 0 ? 1 : (double)atomic_load(&overlap->part) / ONE;
    struct times found = times_of(overlap->spans, overlap->read), *kept = &overlap->kept;
    uint64_t now_ns = gna_clock_ns();
    if (found.sum > 0) {
        double now = found.busy / found.sum, weight = KEPT;
        if (is_other(overlap, before, now)) {
            /* What has been launched since the first of the two looks began has paid by the part before. The GPU was
             * busy with it for no longer than that. */
            double owed = (double)atomic_load(&overlap->paid_ns) * (now / before - 1), most = (double)(now_ns - overlap->since_ns);
            gna_share_settle(record, (int64_t)(owed > most ? most : owed));
            weight = 0;
        }
        if (overlap->way != 0) {
            overlap->odd = found; /* looks again at once */
            atomic_store(&overlap->next_ns, now_ns);
            atomic_store(&overlap->state, AGAIN);
            return;
        }
        kept->sum = kept->sum * weight + found.sum + overlap->odd.sum;
        kept->busy = kept->busy * weight + found.busy + overlap->odd.busy;
        overlap->odd = (struct times){0, 0};
        uint32_t part = (uint32_t)(kept->busy / kept->sum * ONE);
        atomic_store(&overlap->part, part > 0 ? part : 1);
        uint64_t longer = overlap->apart_ns * 2;
        overlap->apart_ns = part < BESIDE || longer == 0 ? APART_NS : longer > FARTHEST_NS ? FARTHEST_NS : longer;
    }
    rest(overlap, now_ns);
}

uint32_t gna_overlap_begin(int record, CUcontext context, uint64_t now) {
    struct overlap *overlap = &overlaps[record];
    if (now >= atomic_load(&overlap->next_ns)) {
        bool again = atomic_load(&overlap->state) == AGAIN;
        if (!atomic_exchange(&overlap->several, false) && !again) {
            forget(overlap); /* one behind the other since the last look */
            rest(overlap, now);
            return 0;
        }
        overlap->context = context;
        overlap->look += overlap->look == UINT32_MAX ? 2 : 1; /* 0 is none */
        overlap->began_ns = now;
        overlap->begun = overlap->read = 0;
        if (!again) {
            atomic_store(&overlap->paid_ns, 0);
            overlap->since_ns = now;
        }
        atomic_store(&overlap->next_ns, now + LATE_NS);
        atomic_store(&overlap->state, LOOKING);
    }
    if (atomic_load(&overlap->state) != LOOKING || overlap->context != context) {
        return 0;
    }
    if (overlap->begun == GNA_LOOK || (overlap->begun >= FEWEST && now - overlap->began_ns > LONGEST_NS)) {
        atomic_store(&overlap->state, READING);
        if (overlap->read == overlap->begun) {
            conclude(record, overlap);
        }
        return 0;
    }
    overlap->begun++;
    return overlap->look;
}

void gna_overlap_read(int record, uint32_t look, double begin, double end) {
    struct overlap *overlap = &overlaps[record];
    if (atomic_load(&overlap->state) == IDLE || overlap->look != look) {
        return; /* of a look that was given up */
    }
    overlap->spans[overlap->read++] = (struct span){begin, end};
    if (atomic_load(&overlap->state) == READING && overlap->read == overlap->begun) {
        conclude(record, overlap);
    }
}

void gna_overlap_forget(CUcontext context) {
    for (unsigned record = 0; record < GNA_MAX_DEVICES; record++) {
        if (context == NULL || overlaps[record].context == context) {
            forget(&overlaps[record]);
            rest(&overlaps[record], 0);
        }
    }
}
