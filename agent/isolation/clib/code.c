/* Code on the GPU. What a module takes shows when it is loaded, by what of the GPU is free then and was before; what the
 * driver loads later, at the first launch, is part of what the agent measures. A library is loaded at its first use: a
 * granule is charged for it. */
#include "caps.h"

#define MOST (UINT64_C(64) << 20) /* more is others' memory, or for the agent to measure */

static struct gna_mutex lock;

struct loading {
    int record; /* -1: no context: nothing is put on a GPU yet */
    uint64_t free, total, bytes;
};

static void look(struct loading *now) {
    size_t free = 0, all;
    REAL(cuMemGetInfo_v2)(&free, &all);
    now->free = free;
    now->total = gna_usage_sound() ? gna_sum_of_slots((unsigned)now->record) : 0;
}

static CUresult begin(struct loading *loading, uint64_t bytes) {
    *loading = (struct loading){.bytes = bytes};
    if (gna_current_record(&loading->record) != CUDA_SUCCESS) {
        loading->record = -1;
        return CUDA_SUCCESS;
    }
    CUresult result = gna_reserve_hard(loading->record, bytes);
    if (result == CUDA_SUCCESS && bytes == 0) {
        result = gna_attach() == NULL || loading->record < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS) {
        look(loading);
    }
    return result;
}

/* What this container's other threads and processes were charged meanwhile is not the module's. */
static uint64_t taken(const struct loading *before) {
    struct loading now = {.record = before->record};
    look(&now);
    int64_t bytes = (int64_t)(before->free - now.free) - (int64_t)(now.total - before->total);
    return bytes <= 0 ? 0 : (uint64_t)bytes < MOST ? (uint64_t)bytes : MOST;
}

static CUresult loaded(CUresult result, struct loading *loading, uint64_t handle, bool is_module) {
    CUcontext context = NULL;
    if (loading->record < 0) {
        return result;
    }
    gna_enter(&lock); /* two that load at once do not both pay for both; and nothing is waited for under it */
    uint64_t found = result == CUDA_SUCCESS && is_module ? taken(loading) : 0;
    bool fits = gna_reserve(loading->record, found) == CUDA_SUCCESS;
    gna_leave(&lock);
    if (!fits && gna_reserve_hard(loading->record, found) != CUDA_SUCCESS) {
        REAL(cuModuleUnload)((CUmodule)(uintptr_t)handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    loading->bytes += found;
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = GNA_CODE, .key = handle, .bytes = loading->bytes, .record = loading->record, .other = (uintptr_t)context};
    if (result != CUDA_SUCCESS || !gna_put(&entry)) {
        gna_release(loading->record, loading->bytes);
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

#define LOAD(symbol, out, estimate, ...)                    \
    struct loading loading;                                 \
    if (begin(&loading, estimate) != CUDA_SUCCESS) {        \
        return CUDA_ERROR_OUT_OF_MEMORY;                    \
    }                                                       \
    CUresult result = REAL(symbol)(__VA_ARGS__);            \
    return loaded(result, &loading, result == CUDA_SUCCESS ? (uintptr_t)*(out) : 0, (estimate) == 0)

HOOK(cuModuleLoad)(CUmodule *module, const char *fname) {
    LOAD(cuModuleLoad, module, 0, module, fname);
}

HOOK(cuModuleLoadData)(CUmodule *module, const void *image) {
    LOAD(cuModuleLoadData, module, 0, module, image);
}

HOOK(cuModuleLoadDataEx)(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues) {
    LOAD(cuModuleLoadDataEx, module, 0, module, image, numOptions, options, optionValues);
}

HOOK(cuModuleLoadFatBinary)(CUmodule *module, const void *fatCubin) {
    LOAD(cuModuleLoadFatBinary, module, 0, module, fatCubin);
}

HOOK(cuModuleUnload)(CUmodule hmod) {
    return unloaded(REAL(cuModuleUnload)(hmod), (uintptr_t)hmod);
}

HOOK(cuLibraryLoadData)(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                        unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                        unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadData, library, GNA_GRANULE, library, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions, libraryOptionValues,
         numLibraryOptions);
}

HOOK(cuLibraryLoadFromFile)(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues,
                            unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                            unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadFromFile, library, GNA_GRANULE, library, fileName, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
         libraryOptionValues, numLibraryOptions);
}

HOOK(cuLibraryUnload)(CUlibrary library) {
    return unloaded(REAL(cuLibraryUnload)(library), (uintptr_t)library);
}
