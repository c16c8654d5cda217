/* Threads of several processes allocate and launch at once, and fork meanwhile; for builds with a sanitizer.
 *
 * usage: race LIBCUDA PROCESSES THREADS STEPS SEED
 * Exit code 0 when every process ended by itself with 0 and no call failed but for want of memory. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "holdings.h"

static const char *path;
static int steps;
static pthread_barrier_t begin; /* all threads find the library as it was loaded, at once */

static int failed(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY) {
        return 0;
    }
    fprintf(stderr, "%s: %d\n", what, (int)result);
    return 1;
}

/* A child can use nothing of its parent's driver, but what it calls passes through the library all the same. */
static int as_child(void) {
    CUdeviceptr address;
    size_t unused, total;
    CUresult result = CALL(cuMemAlloc)(&address, 2 * MIB);
    CALL(cuMemFree)(address);
    CALL(cuMemGetInfo)(&unused, &total);
    return result == CUDA_ERROR_NOT_INITIALIZED ? 0 : 9;
}

static int forks = 1;

static int forked(void) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        _exit(as_child());
    }
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
        fprintf(stderr, "a child ended with %#x\n", status);
        return 1;
    }
    return 0;
}

static int work(void) {
    struct holding holdings[HOLDINGS] = {0};
    CUmodule module;
    CUfunction kernel = NULL;
    size_t unused, total;
    int bad = 0;
    if (CALL(cuModuleLoadData)(&module, "image") == CUDA_SUCCESS) {
        bad |= failed(CALL(cuModuleGetFunction)(&kernel, module, "kernel"), "cuModuleGetFunction");
    }
    for (int step = 0; step < steps && !bad; step++) {
        struct holding *holding = &holdings[dice(HOLDINGS)];
        CUresult result;
        if (exchange(holding, &result)) {
            bad |= failed(result, names[holding->class]);
        }
        if (kernel != NULL) {
            bad |= failed(CALL(cuLaunchKernel)(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        }
        if (step % 16 == 0) {
            bad |= failed(CALL(cuMemGetInfo)(&unused, &total), "cuMemGetInfo");
        }
        if (forks && step == steps / 2) {
            bad |= forked();
        }
    }
    for (int number = 0; number < HOLDINGS; number++) {
        if (holdings[number].used) {
            give_back(&holdings[number]);
        }
    }
    if (kernel != NULL) {
        CALL(cuModuleUnload)(module);
    }
    return bad;
}

static void *thread(void *number) {
    CUcontext context;
    seed = (unsigned)(uintptr_t)number;
    pthread_barrier_wait(&begin);
    int bad = failed(CALL(cuInit)(0), "cuInit");
    CUresult result = CALL(cuDevicePrimaryCtxRetain)(&context, 0);
    bad |= failed(result, "cuDevicePrimaryCtxRetain");
    if (result == CUDA_SUCCESS) {
        bad |= failed(CALL(cuCtxSetCurrent)(context), "cuCtxSetCurrent") || work();
        bad |= failed(CALL(cuCtxSynchronize)(), "cuCtxSynchronize");
        bad |= failed(CALL(cuDevicePrimaryCtxRelease)(0), "cuDevicePrimaryCtxRelease");
    }
    return bad ? (void *)1 : NULL;
}

static int process(int threads, unsigned first) {
    pthread_t started[64];
    void *bad = NULL, *answer;
    driver = dlopen(path, RTLD_NOW);
    if (driver == NULL || threads > 64) {
        fprintf(stderr, "%s\n", driver == NULL ? dlerror() : "too many threads");
        return 1;
    }
    pthread_barrier_init(&begin, NULL, (unsigned)threads);
    for (int number = 0; number < threads; number++) {
        pthread_create(&started[number], NULL, thread, (void *)(uintptr_t)(first + (unsigned)number));
    }
    for (int number = 0; number < threads; number++) {
        pthread_join(started[number], &answer);
        bad = answer != NULL ? answer : bad;
    }
    return bad != NULL;
}

int main(int argc, char **argv) {
    int bad = 0, status = -1;
    if (argc < 6 || argc > 7) {
        fprintf(stderr, "usage: race LIBCUDA PROCESSES THREADS STEPS SEED [without-forks]\n");
        return 2;
    }
    forks = argc == 6;
    path = argv[1];
    int processes = atoi(argv[2]), threads = atoi(argv[3]);
    steps = atoi(argv[4]);
    for (int number = 0; number < processes; number++) {
        if (fork() == 0) {
            /* By return, so that the sanitizer says its last word. */
            return process(threads, (unsigned)(atoi(argv[5]) + number * threads));
        }
    }
    for (int number = 0; number < processes; number++) {
        if (wait(&status) < 0 || status != 0) {
            fprintf(stderr, "a process ended with %#x\n", status);
            bad = 1;
        }
    }
    return bad;
}
