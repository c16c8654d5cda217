/* gpu_load DRIVER LOAD SEED SECONDS [STREAMS]: puts a load on the GPU for so many seconds of the simulated GPU's time
 * and prints what it launched. Loads: those of `loads` below. */
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int call_t();

static void *driver;
static uint64_t state;

static call_t *entry(const char *name) {
    call_t *found = (call_t *)dlsym(driver, name);
    if (found == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(3);
    }
    return found;
}

static double uniform(double least, double most) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return least + (most - least) * (double)(state >> 11) / 9007199254740992.0;
}

/* About normal, of deviation 1: the sum of twelve. */
static double normal(void) {
    double sum = -6;
    for (int number = 0; number < 12; number++) {
        sum += uniform(0, 1);
    }
    return sum;
}

static double tiny(int *which) {
    *which = 0;
    return 12.4e-6 * exp(.4 * normal());
}

static double train(int *which) {
    static const double lengths[4] = {60e-6, 300e-6, 1.5e-3, 20e-6};
    *which = (int)uniform(0, 4);
    return lengths[*which];
}

static double lengthy(int *which) {
    *which = 0;
    return uniform(.05, .2);
}

static double requests(int *which) {
    *which = 0;
    return uniform(1e-3, 3e-3);
}

static double synced(int *which) {
    *which = 0;
    return uniform(.8e-3, 1.6e-3);
}

static double even(int *which) {
    *which = 0;
    return 1e-3;
}

static double brief(int *which) {
    *which = 0;
    return 35e-6 * exp(.3 * normal());
}

/* As a model that answers: mostly short kernels, of one in six a long one. */
static double infer(int *which) {
    static const double lengths[6] = {8e-6, 8e-6, 45e-6, 45e-6, 220e-6, 4e-3};
    int place = (int)uniform(0, 6);
    *which = place < 2 ? 0 : place < 4 ? 1 : place - 2;
    return lengths[place];
}

static double medium(int *which) {
    *which = 0;
    return uniform(5e-3, 15e-3);
}

/* One long kernel and many short ones: in turn, so that of two streams each has its own. */
static double beside(int *which) {
    static int turn;
    *which = turn++ % 2;
    return *which == 0 ? 5e-3 : .2e-3;
}

static double jobs(int *which) {
    *which = 0;
    return uniform(.5e-3, 8e-3);
}

/* One function, and launches that are not alike. */
static double mixed(int *which) {
    static int turn;
    *which = 0;
    return turn++ % 2 == 0 ? 1e-6 : 5e-3;
}

/* The long ones are within what a neighbour's time slice explains. */
static double within(int *which) {
    static int turn;
    *which = 0;
    return turn++ % 2 == 0 ? 1e-6 : 1.5e-3;
}

static double varied(int *which) {
    *which = 0;
    double place = uniform(0, 1);
    return place < .5 ? 2e-6 : place < .8 ? .2e-3 : 6e-3;
}

/* Short are those alone that would be measured if every eighth were. */
static double hiding(int *which) {
    static unsigned number;
    unsigned now = number++;
    *which = 0;
    return now < 3 || now % 8 == 2 ? .2e-3 : 2e-3;
}

static double wide(int *which) {
    *which = 0;
    return .2e-3 * exp(1.5 * normal());
}

static double changing(int *which) {
    uint64_t (*now)(void) = (uint64_t (*)(void))entry("gna_sim_now");
    *which = 0;
    return now() / 1000000000 % 2 == 0 ? 20e-6 : 4e-3;
}

static const struct load {
    const char *name;
    double (*length)(int *which); /* seconds, and of which function; NULL: graphs */
    double graph;                 /* about so many seconds */
    int depth;                    /* launches at once on the GPU */
    int burst;                    /* launches between two pauses; 0: none */
    double pause;                 /* seconds, on average */
    uint64_t copied;              /* bytes that a copy on the GPU moves after each launch */
    double turn;                  /* seconds in all streams, and then in one; 0: always in all */
} loads[] = {
    {.name = "tiny", .length = tiny, .depth = 64},
    {.name = "train", .length = train, .depth = 64},
    {.name = "long", .length = lengthy, .depth = 1},
    {.name = "graph", .graph = 20.2e-3, .depth = 2},
    {.name = "sync", .length = synced, .depth = 1},
    {.name = "bursty", .length = requests, .depth = 8, .burst = 40, .pause = .15},
    {.name = "even", .length = even, .depth = 64},
    {.name = "turning", .length = even, .depth = 64, .turn = 1.5},
    {.name = "mixed", .length = mixed, .depth = 8},
    {.name = "varied", .length = varied, .depth = 16},
    {.name = "changing", .length = changing, .depth = 8},
    /* Those that nothing was tuned by: */
    {.name = "brief", .length = brief, .depth = 32},
    {.name = "infer", .length = infer, .depth = 48},
    {.name = "medium", .length = medium, .depth = 3},
    {.name = "waiting", .length = medium, .depth = 1},
    {.name = "beside", .length = beside, .depth = 64},
    {.name = "jobs", .length = jobs, .depth = 8, .burst = 15, .pause = .05},
    {.name = "copying", .length = even, .depth = 16, .copied = 450000000},
    {.name = "decode", .graph = 6e-3, .depth = 2},
    {.name = "hiding", .length = hiding, .depth = 8},
    {.name = "within", .length = within, .depth = 8},
    {.name = "wide", .length = wide, .depth = 16},
    {.name = "prefill", .graph = 40e-3, .depth = 2},
};

int main(int argc, char **argv) {
    uint64_t context = 0, module = 0, function[4], graph = 0, node, exec[8], event[64], stream[8];
    const struct load *load = NULL;
    driver = argc >= 5 ? dlopen(argv[1], RTLD_NOW) : NULL;
    for (unsigned number = 0; argc >= 5 && number < sizeof(loads) / sizeof(*loads); number++) {
        load = strcmp(loads[number].name, argv[2]) ? load : &loads[number];
    }
    if (driver == NULL || load == NULL) {
        return 2;
    }
    int streams = argc > 5 ? atoi(argv[5]) : 1;
    state = (uint64_t)atoi(argv[3]) * UINT64_C(0x9e3779b97f4a7c15) + 1;
    uint64_t (*now)(void) = (uint64_t (*)(void))entry("gna_sim_now");
    void (*wait)(const uint32_t *, uint32_t, uint64_t) = (void (*)(const uint32_t *, uint32_t, uint64_t))entry("gna_sim_wait");
    static const char *const names[] = {"a_grid", "b_grid", "c_grid", "d_grid"};
    if (entry("cuInit")(0) || entry("cuDevicePrimaryCtxRetain")(&context, 0) || entry("cuCtxSetCurrent")(context) ||
        entry("cuModuleLoadData")(&module, "image")) {
        return 4;
    }
    for (int number = 0; number < 4; number++) {
        entry("cuModuleGetFunction")(&function[number], module, names[number]);
    }
    for (int number = 0; number < load->depth; number++) {
        entry("cuEventCreate")(&event[number], 0);
    }
    for (int number = 0; number < streams; number++) {
        entry("cuStreamCreate")(&stream[number], 1);
    }
    /* Graphs of different lengths, as of different lengths of a batch. */
    for (int number = 0; number < 8 && load->length == NULL; number++) {
        char name[32];
        uint64_t decode, kernel[16] = {0};
        snprintf(name, sizeof(name), "decode_%dus", (int)(load->graph * 1e6 * exp(.15 * normal())));
        entry("cuModuleGetFunction")(&decode, module, name);
        kernel[0] = decode; /* CUDA_KERNEL_NODE_PARAMS */
        if (entry("cuGraphCreate")(&graph, 0) || entry("cuGraphAddKernelNode_v2")(&node, graph, NULL, (size_t)0, kernel) ||
            entry("cuGraphInstantiateWithFlags")(&exec[number], graph, UINT64_C(0))) {
            return 5;
        }
    }
    uint64_t memory = 0;
    if (load->copied > 0 && entry("cuMemAlloc_v2")(&memory, load->copied * 2)) {
        return 7;
    }
    wait(NULL, 0, now()); /* until all loads are there */
    call_t *launch = entry("cuLaunchKernel"), *run = entry("cuGraphLaunch"), *record = entry("cuEventRecord");
    call_t *sync = entry("cuEventSynchronize");
    uint64_t end = now() + (uint64_t)(atof(argv[4]) * 1e9);
    unsigned count = 0;
    while (now() < end) {
        if (load->burst > 0 && count > 0 && count % (unsigned)load->burst == 0) {
            entry("cuCtxSynchronize")();
            wait(NULL, 0, now() + (uint64_t)(-log(1 - uniform(0, 1)) * load->pause * 1e9));
        }
        if (count >= (unsigned)load->depth) {
            sync(event[count % (unsigned)load->depth]);
        }
        bool is_single = load->turn > 0 && (uint64_t)((double)now() / 1e9 / load->turn) % 2 == 1;
        uint64_t on = stream[is_single ? 0 : count % (unsigned)streams];
        int which = 0, problem;
        if (load->length == NULL) {
            problem = run(exec[(int)uniform(0, 8)], on);
        } else {
            unsigned width = (unsigned)(load->length(&which) * 1e9);
            problem = launch(function[which], width, 1, 1, 1, 1, 1, 0, on, NULL, NULL);
        }
        if (load->copied > 0 && !problem) {
            problem = entry("cuMemcpyDtoDAsync_v2")(memory, memory + load->copied, load->copied, on);
        }
        if (problem || record(event[count % (unsigned)load->depth], on)) {
            return 6;
        }
        count++;
    }
    printf("%u\n", count);
    return 0;
}
