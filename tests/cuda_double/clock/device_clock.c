/* In the place of the library's clock.c: shares are kept by the clock of the simulated GPUs. */
#include "caps.h"

#include <dlfcn.h>

static void *of_driver(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return driver == NULL ? NULL : gna_real_dlsym(driver, name);
}

uint64_t gna_clock_ns(void) {
    static uint64_t (*now)(void);
    if (now == NULL) {
        now = (uint64_t (*)(void))of_driver("gna_sim_now");
    }
    return now();
}

void gna_clock_wait(const uint32_t *word, uint32_t seen, uint64_t until) {
    static void (*wait)(const uint32_t *, uint32_t, uint64_t);
    if (wait == NULL) {
        wait = (void (*)(const uint32_t *, uint32_t, uint64_t))of_driver("gna_sim_wait");
    }
    wait(word, seen, until);
}
