/* sharing LIBRARY LOAD [WARM SECONDS NUMBER...]: one of the loads that share a GPU, by the driver's API alone.
 *
 * Beside the program are PTX files, each with the entry that it is named after. What an entry is called says how long it
 * is meant to run, and `calibrate` finds the number for which it does on the GPU at hand; all other loads are given these
 * numbers, in the order of `kernels` below, so that all processes do the same work. The simulated GPU of the tests goes by
 * the name alone.
 *
 * As tests/gpu/client.py it says {"ready": true} once it has a context, does its job when it reads a line, prints the
 * outcome as one line of JSON and keeps its context until it reads another line, or the end of its input. Times are in
 * seconds. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda.h>

#define CALL(symbol) ((__typeof__(&symbol))entry(NAME(symbol)))
#define NAME(symbol) NAME_(symbol)
#define NAME_(symbol) #symbol
#define LAYERS 32 /* of a model that decodes: as many pairs of kernels in its graph */
#define WORDS (UINT32_C(256) << 20)
#define MOST_RUNS 1000000
#define QUEUED 4 /* kernels that the busy neighbour keeps on the GPU */

enum { WEIGHTS, ATTENTION, PREFILL, TRAIN, NOTHING, KERNELS };
static struct kernel {
    const char *name;
    double target;        /* seconds */
    unsigned per_processor, threads; /* its grid, by multiprocessor */
    uint32_t number, most; /* rounds or words: a guess, and a bound */
    CUfunction function;
} kernels[KERNELS] = {
    {"weights_200us", 200e-6, 2, 1024, WORDS / 4, WORDS, NULL},
    {"attention_50us", 50e-6, 1, 128, 2000, 1u << 30, NULL},
    {"prefill_5ms", 5e-3, 2, 1024, 50000, 1u << 30, NULL},
    {"train_2ms", 2e-3, 2, 1024, 20000, 1u << 30, NULL},
    {"nothing_1us", 0, 0, 32, 0, 0, NULL},
};
static void *driver;
static int processors;
static CUdeviceptr memory;
static CUstream stream;

static void *entry(const char *name) {
    void *found = dlsym(driver, name);
    if (found == NULL) {
        printf("{\"code\": -1, \"problem\": \"the driver has no %s\"}\n", name);
        exit(3);
    }
    return found;
}

static void check(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS) {
        printf("{\"ready\": false, \"code\": %d, \"problem\": \"%s\"}\n", (int)result, what);
        exit(1);
    }
}
#define TRY(symbol, ...) check(CALL(symbol)(__VA_ARGS__), #symbol)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void sleep_until(double instant) {
    double left = instant - now();
    if (left > 0) {
        nanosleep(&(struct timespec){.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)}, NULL);
    }
}

static void load(const char *program) {
    const char *end = strrchr(program, '/');
    int folder = end == NULL ? 0 : (int)(end - program) + 1;
    for (int index = 0; index < KERNELS; index++) {
        char path[4096];
        CUmodule module;
        snprintf(path, sizeof(path), "%.*s%s.ptx", folder, program, kernels[index].name);
        FILE *file = fopen(path, "r");
        char *text = calloc(1, 1 << 16);
        if (file == NULL || text == NULL || fread(text, 1, (1 << 16) - 1, file) == 0) {
            fprintf(stderr, "%s cannot be read\n", path);
            exit(2);
        }
        fclose(file);
        TRY(cuModuleLoadData, &module, text);
        TRY(cuModuleGetFunction, &kernels[index].function, module, kernels[index].name);
        free(text);
    }
}

static CUresult launch(int index) {
    const struct kernel *kernel = &kernels[index];
    uint64_t address = memory;
    uint32_t number = kernel->number;
    void *parameters[] = {&address, &number};
    unsigned blocks = kernel->per_processor == 0 ? 1 : kernel->per_processor * (unsigned)processors;
    return CALL(cuLaunchKernel)(kernel->function, blocks, 1, 1, kernel->threads, 1, 1, 0, stream, parameters, NULL);
}

/* The shortest of some runs by the GPU's own events: nobody else is on it. */
static double measured(int index, const CUevent event[2]) {
    double least = 1e9;
    for (int run = 0; run < 5; run++) {
        float milliseconds = 0;
        TRY(cuEventRecord, event[0], stream);
        check(launch(index), "cuLaunchKernel");
        TRY(cuEventRecord, event[1], stream);
        TRY(cuEventSynchronize, event[1]);
        TRY(cuEventElapsedTime, &milliseconds, event[0], event[1]);
        least = milliseconds / 1e3 < least ? milliseconds / 1e3 : least;
    }
    return least;
}

static void calibrate(void) {
    CUevent event[2];
    double taken[KERNELS];
    TRY(cuEventCreate, &event[0], 0);
    TRY(cuEventCreate, &event[1], 0);
    for (int index = 0; index < KERNELS; index++) {
        struct kernel *kernel = &kernels[index];
        taken[index] = measured(index, event);
        for (int round = 0; round < 6 && kernel->target > 0 && taken[index] > 0; round++) {
            double ratio = kernel->target / taken[index], next = (double)kernel->number * ratio;
            if (ratio > .97 && ratio < 1.03) {
                break;
            }
            kernel->number = next < 1 ? 1 : next > kernel->most ? kernel->most : (uint32_t)next;
            taken[index] = measured(index, event);
        }
    }
    printf("{\"code\": 0, \"numbers\": [");
    for (int index = 0; index < KERNELS; index++) {
        printf("%s%u", index == 0 ? "" : ", ", kernels[index].number);
    }
    printf("], \"microseconds\": {");
    for (int index = 0; index < KERNELS; index++) {
        printf("%s\"%s\": %.1f", index == 0 ? "" : ", ", kernels[index].name, taken[index] * 1e6);
    }
    printf("}}\n");
}

static int by_size(const void *one, const void *other) {
    double first = *(const double *)one, second = *(const double *)other;
    return first < second ? -1 : first > second;
}

static double times[MOST_RUNS];
static unsigned runs;

/* Those of the first `warm` seconds do not count. */
static void note(double taken, double since, double warm) {
    if (now() - since >= warm && runs < MOST_RUNS) {
        times[runs++] = taken;
    }
}

static void report(CUresult code, double seconds) {
    printf("{\"code\": %d, \"runs\": %u, \"seconds\": %.6f", (int)code, runs, seconds);
    if (runs > 0) {
        qsort(times, runs, sizeof(*times), by_size);
        unsigned late = (unsigned)(0.99 * runs);
        printf(", \"p50\": %.9f, \"p99\": %.9f", times[runs / 2], times[late < runs ? late : runs - 1]);
    }
    printf("}\n");
}

/* As vLLM does: a step is one graph of all layers, then the token is fetched, without which the next cannot begin. */
static CUresult decode(double warm, double seconds) {
    CUgraph graph;
    CUgraphExec ready;
    uint32_t token;
    /* A driver that loads lazily does so with the first launch, which must not be captured. */
    check(launch(WEIGHTS), "cuLaunchKernel");
    check(launch(ATTENTION), "cuLaunchKernel");
    TRY(cuStreamSynchronize, stream);
    TRY(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (int layer = 0; layer < LAYERS; layer++) {
        check(launch(WEIGHTS), "cuLaunchKernel");
        check(launch(ATTENTION), "cuLaunchKernel");
    }
    TRY(cuStreamEndCapture, stream, &graph);
    TRY(cuGraphInstantiateWithFlags, &ready, graph, 0);
    double began = now();
    CUresult result = CUDA_SUCCESS;
    while (result == CUDA_SUCCESS && now() - began < warm + seconds) {
        double before = now();
        result = CALL(cuGraphLaunch)(ready, stream);
        result = result == CUDA_SUCCESS ? CALL(cuMemcpyDtoHAsync)(&token, memory, sizeof(token), stream) : result;
        result = result == CUDA_SUCCESS ? CALL(cuStreamSynchronize)(stream) : result;
        note(now() - before, began, warm);
    }
    return result;
}

/* A request every 50 ms, of two kernels of 5 ms; one that comes while another is served waits, and its wait counts. */
static CUresult serve(double warm, double seconds) {
    double began = now(), due = began;
    CUresult result = CUDA_SUCCESS;
    for (; result == CUDA_SUCCESS && due - began < warm + seconds && now() - began < 2 * (warm + seconds); due += .05) {
        sleep_until(due);
        result = launch(PREFILL);
        result = result == CUDA_SUCCESS ? launch(PREFILL) : result;
        result = result == CUDA_SUCCESS ? CALL(cuStreamSynchronize)(stream) : result;
        note(now() - due, began, warm);
    }
    return result;
}

/* As training does: some kernels are always queued. */
static CUresult busy(double warm, double seconds) {
    CUevent done[QUEUED];
    CUresult result = CUDA_SUCCESS;
    double began = now(), before = began;
    for (int index = 0; index < QUEUED; index++) {
        TRY(cuEventCreate, &done[index], CU_EVENT_DISABLE_TIMING);
    }
    for (unsigned count = 0; result == CUDA_SUCCESS && now() - began < warm + seconds; count++) {
        if (count >= QUEUED) {
            result = CALL(cuEventSynchronize)(done[count % QUEUED]);
            note(now() - before, began, warm);
            before = now();
        }
        result = result == CUDA_SUCCESS ? launch(TRAIN) : result;
        result = result == CUDA_SUCCESS ? CALL(cuEventRecord)(done[count % QUEUED], stream) : result;
    }
    CUresult end = CALL(cuStreamSynchronize)(stream);
    return result == CUDA_SUCCESS ? end : result;
}

/* What a launch costs its caller: the least mean of some rounds, each of fewer launches than the driver's queue has places. */
static CUresult calls(unsigned rounds) {
    enum { COUNT = 400 };
    CUresult result = CUDA_SUCCESS;
    __typeof__(&cuLaunchKernel) function = CALL(cuLaunchKernel); /* asked for once, as programs do */
    uint64_t address = memory;
    uint32_t none = 0;
    void *parameters[] = {&address, &none};
    for (unsigned round = 0; result == CUDA_SUCCESS && round < rounds; round++) {
        double before = now();
        for (int count = 0; result == CUDA_SUCCESS && count < COUNT; count++) {
            result = function(kernels[NOTHING].function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
        }
        note((now() - before) / COUNT, 0, 0);
        result = result == CUDA_SUCCESS ? CALL(cuStreamSynchronize)(stream) : result;
    }
    return result;
}

int main(int argc, char **argv) {
    CUdevice device;
    CUcontext context;
    double given[2 + KERNELS] = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    driver = argc >= 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (driver == NULL) {
        fprintf(stderr, "usage: sharing LIBRARY calibrate|decode|serve|busy|calls [WARM SECONDS NUMBER...]: %s\n", argc >= 3 ? dlerror() : "");
        return 2;
    }
    for (int index = 0; index < argc - 3 && index < 2 + KERNELS; index++) {
        given[index] = atof(argv[3 + index]);
    }
    TRY(cuInit, 0);
    TRY(cuDeviceGet, &device, 0);
    TRY(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    TRY(cuDevicePrimaryCtxRetain, &context, device);
    TRY(cuCtxSetCurrent, context);
    TRY(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    TRY(cuMemAlloc, &memory, (size_t)WORDS * 4);
    TRY(cuMemsetD32, memory, 0, WORDS);
    load(argv[0]);
    for (int index = 0; index < KERNELS && strcmp(argv[2], "calibrate") != 0; index++) {
        kernels[index].number = (uint32_t)given[2 + index];
    }
    TRY(cuCtxSynchronize);
    /* The double of the tests has a clock of its own; no driver of NVIDIA's has that symbol. */
    printf("{\"ready\": true, \"simulated\": %s}\n", dlsym(driver, "gna_sim_now") == NULL ? "false" : "true");
    getchar();
    double began = now() + given[0];
    if (!strcmp(argv[2], "calibrate")) {
        calibrate();
    } else if (!strcmp(argv[2], "decode")) {
        CUresult code = decode(given[0], given[1]);
        report(code, now() - began);
    } else if (!strcmp(argv[2], "serve")) {
        CUresult code = serve(given[0], given[1]);
        report(code, now() - began);
    } else if (!strcmp(argv[2], "busy")) {
        CUresult code = busy(given[0], given[1]);
        report(code, now() - began);
    } else if (!strcmp(argv[2], "calls")) {
        CUresult code = calls((unsigned)given[1]);
        report(code, now() - began);
    } else {
        printf("{\"code\": -1, \"problem\": \"no such load\"}\n");
    }
    while (getchar() != '\n' && !feof(stdin)) {
    }
    return 0;
}
