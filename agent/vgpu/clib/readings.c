/* What the device times of one function say of its price. Between two events the GPU may have worked for other processes:
 * that lengthens a time and never shortens it. So the low quantile of the last times stands for each of them that others'
 * work can explain. Longer ones are the function's own, less what others had of the GPU on average, and the price is the
 * mean of all: it is right for a function whose launches differ, too. */
#include "caps.h"

#include <stdlib.h>

#define ONE 256u
#define SLICE_NS UINT64_C(2000000)       /* for so long a process has the GPU, where several have work */
#define MANY 128                         /* readings that the average of a function goes back to whose launches differ */
#define MOST_OWED_NS INT64_C(250000000)  /* for all launches that a measured one stands for, if it is no longer itself */

static int in_order(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

/* What a time is taken for by itself. Whose rivals always have work gets one slice in so many: each of its longer launches is
 * interrupted, and no quantile is free of that. It has begun a slice that it does not use up: half of one, on average. */
static uint64_t less_slices(uint64_t nanoseconds, uint32_t rivals) {
    uint64_t always = rivals / ONE;
    bool is_interrupted = always > 0 && nanoseconds > always * SLICE_NS + SLICE_NS / 2;
    return is_interrupted ? (nanoseconds + always * SLICE_NS / 2) / (1 + always) : nanoseconds;
}

static uint64_t own_of(uint64_t low, uint64_t nanoseconds, uint32_t rivals_then, uint32_t rivals) {
    uint64_t itself = less_slices(nanoseconds, rivals_then);
    uint64_t most = ((uint64_t)rivals + ONE - 1) / ONE; /* at once */
    if (rivals == 0 || itself <= low) {
        return itself;
    }
    bool is_explained = nanoseconds <= most * SLICE_NS + (most + 1) * low;
    return is_explained ? low : nanoseconds * ONE / (ONE + rivals);
}

uint64_t gna_reading_own(const struct gna_readings *readings, uint64_t nanoseconds, uint32_t rivals) {
    return own_of(readings->low, nanoseconds, rivals, rivals);
}

uint64_t gna_reading_add(struct gna_readings *readings, uint64_t nanoseconds, uint32_t rivals) {
    uint64_t ordered[GNA_READINGS], sum = 0, least = UINT64_MAX, most = 0;
    unsigned place = (unsigned)(readings->count++ % GNA_READINGS);
    readings->time[place] = nanoseconds;
    readings->rivals[place] = (uint16_t)(rivals > UINT16_MAX ? UINT16_MAX : rivals);
    unsigned count = readings->count < GNA_READINGS ? (unsigned)readings->count : GNA_READINGS;
    for (unsigned number = 0; number < count; number++) {
        if (readings->rivals[number] == GNA_UNKNOWN_RIVALS && rivals != GNA_UNKNOWN_RIVALS) {
            readings->rivals[number] = readings->rivals[place]; /* the agent says it a second late */
        }
        ordered[number] = less_slices(readings->time[number], readings->rivals[number]);
    }
    qsort(ordered, count, sizeof(*ordered), in_order);
    readings->low = ordered[count / 4];
    readings->is_even = readings->count >= GNA_READINGS && (ordered[count * 3 / 4] - readings->low) * 10 < readings->low;
    for (unsigned number = 0; number < count; number++) {
        uint32_t then = readings->rivals[number];
        uint64_t own = own_of(readings->low, readings->time[number], then, then > rivals ? then : rivals);
        sum += own;
        least = own < least ? own : least;
        most = own > most ? own : most;
    }
    /* The mean of so few times of a function that differs is a matter of luck, and would steer how often it is measured. */
    int64_t mean = (int64_t)(sum / count), own = (int64_t)gna_reading_own(readings, nanoseconds, rivals);
    readings->average += (own - readings->average) / (readings->count < MANY ? (int64_t)readings->count : MANY);
    readings->differs = most / 2 > least || readings->average / 2 > mean || mean / 2 > readings->average;
    return (uint64_t)(readings->differs ? readings->average : mean);
}

int64_t gna_reading_owed(uint64_t own, uint64_t paid, uint32_t launches) {
    int64_t itself = (int64_t)(own > paid ? own : paid), bound = itself > MOST_OWED_NS ? itself : MOST_OWED_NS;
    __int128_t owed = ((__int128_t)own - (__int128_t)paid) * launches;
    return owed > bound ? bound : owed < -bound ? -bound : (int64_t)owed;
}
