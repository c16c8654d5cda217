/* The time by which shares are kept. Nothing else of them reads a clock or sleeps, so that a test can put the clock of
 * a simulated GPU in the place of this file. */
#include "caps.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t gna_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void gna_clock_wait(const uint32_t *word, uint32_t seen, uint64_t until) {
    struct timespec limit = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    /* Of this kind the limit is an instant of CLOCK_MONOTONIC, and shared: the waker is another process. */
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &limit, NULL, FUTEX_BITSET_MATCH_ANY);
}
