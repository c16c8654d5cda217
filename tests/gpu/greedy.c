/* greedy LIBRARY MOST: takes the GPU's memory in pieces of 64 MiB, at most so many, and prints how many it got and what
 * the driver answered last. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <cuda.h>

#define CALL(symbol) ((__typeof__(&symbol))dlsym(driver, NAME(symbol)))
#define NAME(symbol) NAME_(symbol)
#define NAME_(symbol) #symbol

int main(int argc, char **argv) {
    void *driver = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    CUcontext context;
    CUdevice device;
    CUdeviceptr piece;
    int got = 0, most = argc == 3 ? atoi(argv[2]) : 0;
    CUresult result = CUDA_SUCCESS;
    if (driver == NULL) {
        fprintf(stderr, "usage: greedy LIBRARY MOST: %s\n", argc == 3 ? dlerror() : "");
        return 2;
    }
    if (CALL(cuInit)(0) || CALL(cuDeviceGet)(&device, 0) || CALL(cuDevicePrimaryCtxRetain)(&context, device) ||
        CALL(cuCtxSetCurrent)(context)) {
        fprintf(stderr, "no context\n");
        return 3;
    }
    while (got < most && (result = CALL(cuMemAlloc)(&piece, (size_t)64 << 20)) == CUDA_SUCCESS) {
        got++;
    }
    printf("%d %d\n", got, (int)result);
    return 0;
}
