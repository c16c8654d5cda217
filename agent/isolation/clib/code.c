/* Code on the GPU. How much of an image is loaded, and when, is the driver's own business (most of it lazily, at the
 * first launch), so a granule is charged for each module; the rest is part of what the agent measures. */
#include "caps.h"

static CUresult charge(int *record) {
    if (gna_current_record(record) != CUDA_SUCCESS) {
        *record = -1; /* no context: nothing is put on a GPU yet */
        return CUDA_SUCCESS;
    }
    return gna_reserve_hard(*record, GNA_GRANULE);
}

static CUresult loaded(CUresult result, int record, uint64_t handle) {
    CUcontext context = NULL;
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = GNA_CODE, .key = handle, .bytes = GNA_GRANULE, .record = record, .other = (uintptr_t)context};
    if (record >= 0 && (result != CUDA_SUCCESS || !gna_put(&entry))) {
        gna_release(record, GNA_GRANULE);
    }
    return result;
}

static CUresult unloaded(CUresult result, uint64_t handle) {
    struct gna_entry entry;
    gna_attach();
    if (result == CUDA_SUCCESS && gna_take(GNA_CODE, handle, &entry)) {
        gna_release(entry.record, entry.bytes);
    }
    return result;
}

#define LOAD(symbol, out, ...)                              \
    int record;                                             \
    if (charge(&record) != CUDA_SUCCESS) {                  \
        return CUDA_ERROR_OUT_OF_MEMORY;                    \
    }                                                       \
    CUresult result = REAL(symbol)(__VA_ARGS__);            \
    return loaded(result, record, result == CUDA_SUCCESS ? (uintptr_t)*(out) : 0)

HOOK(cuModuleLoad)(CUmodule *module, const char *fname) {
    LOAD(cuModuleLoad, module, module, fname);
}

HOOK(cuModuleLoadData)(CUmodule *module, const void *image) {
    LOAD(cuModuleLoadData, module, module, image);
}

HOOK(cuModuleLoadDataEx)(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues) {
    LOAD(cuModuleLoadDataEx, module, module, image, numOptions, options, optionValues);
}

HOOK(cuModuleLoadFatBinary)(CUmodule *module, const void *fatCubin) {
    LOAD(cuModuleLoadFatBinary, module, module, fatCubin);
}

HOOK(cuModuleUnload)(CUmodule hmod) {
    return unloaded(REAL(cuModuleUnload)(hmod), (uintptr_t)hmod);
}

HOOK(cuLibraryLoadData)(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                        unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                        unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadData, library, library, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions, libraryOptionValues,
         numLibraryOptions);
}

HOOK(cuLibraryLoadFromFile)(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues,
                            unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                            unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadFromFile, library, library, fileName, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
         libraryOptionValues, numLibraryOptions);
}

HOOK(cuLibraryUnload)(CUlibrary library) {
    return unloaded(REAL(cuLibraryUnload)(library), (uintptr_t)library);
}
