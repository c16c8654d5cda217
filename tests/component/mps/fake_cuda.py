"""A fake of the driver's CUDA library, in C: it proves that the GPU tier's client makes the calls it means.

It has one GPU of 8 multiprocessors and counts memory against the client's own MPS limit less 300 MiB. Memory
is the process's own, kernels are known by name and run on the processor, and a write to nobody's address
is remembered as the error that it is on a GPU.
"""

import os
import subprocess
from pathlib import Path

MULTIPROCESSORS = 8
CONTEXT_MIB = 300

_SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int R; typedef uint64_t P;
static size_t taken; static R fatal; static int started, current;
static size_t limit(void) {
    const char *limit = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    if (!limit) return (size_t)8 << 30;
    return ((size_t)atol(limit + 2) << 30) - ((size_t)CONTEXT_MIB << 20);  /* 0=<N>G */
}
R cuInit(unsigned flags) { started = flags == 0; return started ? 0 : 1; }
R cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return started ? 0 : 3; }
R cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 40) return 101;
    *value = attribute == 16 ? MULTIPROCESSORS : attribute == 20 ? 0 : -1;
    return 0;
}
R cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; return device == 40 ? 0 : 101; }
R cuCtxSetCurrent(void *context) { current = context == &current; return current ? 0 : 201; }
R cuCtxSynchronize(void) { return fatal ? fatal : current ? 0 : 201; }
R cuMemAlloc_v2(P *address, size_t size) {
    if (fatal) return fatal;
    if (taken + size > limit()) return 2;
    taken += size;
    *address = (P)(uintptr_t)calloc(1, size < 65536 ? size : 65536);
    return 0;
}
R cuMemFree_v2(P address) { free((void *)(uintptr_t)address); return 0; }
R cuMemGetInfo_v2(size_t *left, size_t *total) {
    *left = limit() - taken; *total = (size_t)8 << 30; return 0;
}
R cuMemsetD32_v2(P address, unsigned value, size_t words) {
    (void)value; (void)words; return address ? 0 : 1;
}
R cuMemcpyDtoH_v2(void *to, P from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return 0; }
R cuModuleLoadData(void **module, const char *image) {
    *module = strdup(image); return strstr(image, ".version") ? 0 : 218;
}
R cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name); return strstr(module, name) ? 0 : 500;
}
R cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                 unsigned shared, void *stream, void **parameters, void **extra) {
    if (fatal) return fatal;
    if (gy * gz * by * bz != 1 || !bx || bx > 1024 || shared || stream || extra) return 1;
    P address = *(P *)parameters[0]; uint32_t number = *(uint32_t *)parameters[1];
    const char *cap = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    unsigned mine = MULTIPROCESSORS * (cap ? atoi(cap) : 100) / 100;
    if (!number) return 1;
    if (address < 4096) fatal = 700;
    else if (!strcmp(function, "where"))
        for (unsigned block = 0; block < gx; block++) ((uint32_t *)(uintptr_t)address)[block] = block % mine;
    return 0;
}
"""


def build(folder: Path) -> Path:
    """Compile it into `folder`; the library. A missing compiler fails the test. Blocks."""
    source, library = folder / "fake_cuda.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"),
            f"-DMULTIPROCESSORS={MULTIPROCESSORS}",
            f"-DCONTEXT_MIB={CONTEXT_MIB}",
            *(str(source), "-o", str(library)),
        ],
        check=True,
        timeout=60,
    )
    return library
