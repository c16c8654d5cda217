/* cuda_calls DRIVER alloc|launch|start COUNT: prints the nanoseconds of one call, the least of nine rounds; `start`
 * ends as soon as it has a context and memory. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int call_t();

static void *driver;

static call_t *entry(const char *name) {
    call_t *found = (call_t *)dlsym(driver, name);
    if (found == NULL) {
        exit(3);
    }
    return found;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

int main(int argc, char **argv) {
    uint64_t context = 0, module = 0, function = 0, memory[64], least = UINT64_MAX;
    unsigned count = argc == 4 ? (unsigned)atoi(argv[3]) : 0;
    driver = argc == 4 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (driver == NULL || entry("cuInit")(0) || entry("cuDevicePrimaryCtxRetain")(&context, 0) || entry("cuCtxSetCurrent")(context) ||
        entry("cuMemAlloc_v2")(memory, (size_t)2 << 20)) {
        return 2;
    }
    if (!strcmp(argv[2], "start")) {
        return 0;
    }
    if (entry("cuModuleLoadData")(&module, "image") || entry("cuModuleGetFunction")(&function, module, "kernel")) {
        return 2;
    }
    call_t *launch = entry("cuLaunchKernel"), *take = entry("cuMemAlloc_v2"), *give = entry("cuMemFree_v2");
    for (unsigned round = 0; round < 9; round++) {
        uint64_t spent = 0;
        if (!strcmp(argv[2], "launch")) {
            uint64_t began = now();
            for (unsigned number = 0; number < count; number++) {
                launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
            }
            spent = now() - began;
        }
        for (unsigned done = 0; !strcmp(argv[2], "alloc") && done < count; done += 64) {
            uint64_t began = now();
            for (unsigned number = 0; number < 64; number++) {
                take(&memory[number], (size_t)2 << 20);
            }
            spent += now() - began;
            for (unsigned number = 0; number < 64; number++) {
                give(memory[number]);
            }
        }
        least = spent < least ? spent : least;
    }
    printf("%f\n", (double)least / count);
    return 0;
}
