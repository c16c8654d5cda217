/* Takes GPU memory until it is refused.
 *
 * usage: fill LIBCUDA
 * Prints pieces of 2 MiB got, the refusal's code, and free and total bytes as the driver says them then. */
#include <stdio.h>

#include "holdings.h"

int main(int argc, char **argv) {
    CUcontext context;
    CUdeviceptr address;
    size_t unused = 1, total = 0;
    unsigned got = 0;
    CUresult result;
    driver = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (driver == NULL) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: fill LIBCUDA");
        return 2;
    }
    if (CALL(cuInit)(0) != CUDA_SUCCESS || CALL(cuDevicePrimaryCtxRetain)(&context, 0) != CUDA_SUCCESS) {
        return 3;
    }
    CALL(cuCtxSetCurrent)(context);
    while ((result = CALL(cuMemAlloc)(&address, 2 * MIB)) == CUDA_SUCCESS) {
        got++;
    }
    CALL(cuMemGetInfo)(&unused, &total);
    printf("%u %d %zu %zu\n", got, (int)result, unused, total);
    return 0;
}
