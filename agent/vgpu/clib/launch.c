/* Launches are counted and passed on. The count is the thread's own until it is worth a look at the region. */
#include "caps.h"

static _Thread_local unsigned pending __attribute__((tls_model("initial-exec")));

/* Rarely called: it keeps every register, so that a launch need not. */
static __attribute__((noinline, preserve_most, cold)) void publish(void) {
    struct gna_usage_slot *slot = gna_attach();
    if (slot != NULL && gna_usage_sound()) {
        __atomic_fetch_add(&slot->launches, pending, __ATOMIC_RELAXED);
    }
    pending = 0;
}

static inline __attribute__((always_inline)) void count(void) {
    if (__builtin_expect(++pending >= 1024, 0)) {
        publish();
    }
}

void gna_count_launch(void) {
    count();
}

/* Where no share is to be kept, a jump: the arguments stay where they are. */
#define LAUNCH(symbol, key, stream, ...)                                \
    count();                                                            \
    if (!gna_gate_open()) {                                             \
        struct gna_turn turn;                                           \
        gna_share_wait(&turn, key, stream);                             \
        CUresult result = REAL(symbol)(__VA_ARGS__);                    \
        gna_share_done(&turn, result);                                  \
        return result;                                                  \
    }                                                                   \
    __attribute__((musttail)) return REAL(symbol)(__VA_ARGS__)
/* For the default stream of the caller's thread. */
#define OWN(stream) ((stream) == NULL ? CU_STREAM_PER_THREAD : (stream))

HOOK(cuLaunch)(CUfunction f) {
    LAUNCH(cuLaunch, f, NULL, f);
}

HOOK(cuLaunchGrid)(CUfunction f, int grid_width, int grid_height) {
    LAUNCH(cuLaunchGrid, f, NULL, f, grid_width, grid_height);
}

HOOK(cuLaunchGridAsync)(CUfunction f, int grid_width, int grid_height, CUstream hStream) {
    LAUNCH(cuLaunchGridAsync, f, hStream, f, grid_width, grid_height, hStream);
}

HOOK(cuLaunchKernel)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                     unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams,
                     void **extra) {
    LAUNCH(cuLaunchKernel, f, hStream, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, extra);
}

HOOK(cuLaunchKernel_ptsz)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                          unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                          void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernel_ptsz, f, OWN(hStream), f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams,
           extra);
}

HOOK(cuLaunchKernelEx)(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernelEx, f, config == NULL ? NULL : config->hStream, config, f, kernelParams, extra);
}

HOOK(cuLaunchKernelEx_ptsz)(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernelEx_ptsz, f, config == NULL ? CU_STREAM_PER_THREAD : OWN(config->hStream), config, f, kernelParams, extra);
}

HOOK(cuLaunchCooperativeKernel)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                                unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                void **kernelParams) {
    LAUNCH(cuLaunchCooperativeKernel, f, hStream, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
           kernelParams);
}

HOOK(cuLaunchCooperativeKernel_ptsz)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                     unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
                                     CUstream hStream, void **kernelParams) {
    LAUNCH(cuLaunchCooperativeKernel_ptsz, f, OWN(hStream), f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
           kernelParams);
}

HOOK(cuLaunchCooperativeKernelMultiDevice)(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags) {
    bool is_any = launchParamsList != NULL && numDevices > 0;
    LAUNCH(cuLaunchCooperativeKernelMultiDevice, is_any ? launchParamsList->function : NULL, is_any ? launchParamsList->hStream : NULL,
           launchParamsList, numDevices, flags);
}
