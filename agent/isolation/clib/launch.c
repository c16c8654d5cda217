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

/* A jump: the arguments stay where they are. */
#define LAUNCH(symbol, ...)                                             \
    count();                                                            \
    __attribute__((musttail)) return REAL(symbol)(__VA_ARGS__)

HOOK(cuLaunch)(CUfunction f) {
    LAUNCH(cuLaunch, f);
}

HOOK(cuLaunchGrid)(CUfunction f, int grid_width, int grid_height) {
    LAUNCH(cuLaunchGrid, f, grid_width, grid_height);
}

HOOK(cuLaunchGridAsync)(CUfunction f, int grid_width, int grid_height, CUstream hStream) {
    LAUNCH(cuLaunchGridAsync, f, grid_width, grid_height, hStream);
}

HOOK(cuLaunchKernel)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                     unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream, void **kernelParams,
                     void **extra) {
    LAUNCH(cuLaunchKernel, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams, extra);
}

HOOK(cuLaunchKernel_ptsz)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                          unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                          void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernel_ptsz, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, kernelParams,
           extra);
}

HOOK(cuLaunchKernelEx)(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernelEx, config, f, kernelParams, extra);
}

HOOK(cuLaunchKernelEx_ptsz)(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    LAUNCH(cuLaunchKernelEx_ptsz, config, f, kernelParams, extra);
}

HOOK(cuLaunchCooperativeKernel)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                                unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                void **kernelParams) {
    LAUNCH(cuLaunchCooperativeKernel, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
           kernelParams);
}

HOOK(cuLaunchCooperativeKernel_ptsz)(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                     unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
                                     CUstream hStream, void **kernelParams) {
    LAUNCH(cuLaunchCooperativeKernel_ptsz, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
           kernelParams);
}

HOOK(cuLaunchCooperativeKernelMultiDevice)(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags) {
    LAUNCH(cuLaunchCooperativeKernelMultiDevice, launchParamsList, numDevices, flags);
}
