/* Code on the GPU. What a module takes shows when it is loaded, by what of the GPU is free then and was before. That is
 * believed of the only process of a container that has any memory: what others of it charge and take meanwhile, one after
 * the other, would look like a module. What the driver loads later, at the first launch, the agent measures. */
#include "caps.h"

#define MOST (UINT64_C(64) << 20) /* more is another container's memory, or for the agent to measure */

struct loading {
    int record; /* -1: no context: nothing is put on a GPU yet */
    bool is_sole;
    uint64_t free, charged;
};

static void look(struct loading *now) {
    const struct gna_usage_slot *slot = gna_attach();
    size_t free = 0, all;
    now->is_sole = slot != NULL && gna_usage_sound() && REAL(cuMemGetInfo_v2)(&free, &all) == CUDA_SUCCESS;
    now->free = free;
    now->charged = now->is_sole ? __atomic_load_n(&slot->device[now->record].charged, __ATOMIC_RELAXED) : 0;
    now->is_sole = now->is_sole && now->charged == gna_sum_of_slots((unsigned)now->record);
}

static CUresult begin(struct loading *loading, bool is_module) {
    *loading = (struct loading){.record = -1};
    if (gna_current_record(&loading->record) != CUDA_SUCCESS) {
        loading->record = -1;
        return CUDA_SUCCESS;
    }
    CUresult result = gna_reserve_hard(loading->record, GNA_GRANULE);
    if (result == CUDA_SUCCESS && is_module) {
        look(loading);
    }
    return result;
}

static uint64_t taken(const struct loading *before) {
    struct loading now = {.record = before->record};
    look(&now);
    if (!before->is_sole || !now.is_sole || now.charged != before->charged) {
        return GNA_GRANULE;
    }
    uint64_t bytes = before->free > now.free ? before->free - now.free : 0;
    return bytes < MOST ? bytes : MOST;
}

static CUresult loaded(CUresult result, const struct loading *loading, uint64_t handle, bool is_module) {
    CUcontext context = NULL;
    int record = loading->record;
    if (record < 0) {
        return result;
    }
    uint64_t bytes = result == CUDA_SUCCESS && is_module ? taken(loading) : GNA_GRANULE;
    if (bytes > GNA_GRANULE && gna_reserve_hard(record, bytes - GNA_GRANULE) != CUDA_SUCCESS) {
        REAL(cuModuleUnload)((CUmodule)(uintptr_t)handle);
        gna_release(record, GNA_GRANULE);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    gna_release(record, bytes < GNA_GRANULE ? GNA_GRANULE - bytes : 0);
    REAL(cuCtxGetCurrent)(&context);
    struct gna_entry entry = {.kind = GNA_CODE, .key = handle, .bytes = bytes, .record = record, .other = (uintptr_t)context};
    if (result != CUDA_SUCCESS || !gna_put(&entry)) {
        gna_release(record, bytes);
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

#define LOAD(symbol, out, is_module, ...)                   \
    struct loading loading;                                 \
    if (begin(&loading, is_module) != CUDA_SUCCESS) {       \
        return CUDA_ERROR_OUT_OF_MEMORY;                    \
    }                                                       \
    CUresult result = REAL(symbol)(__VA_ARGS__);            \
    return loaded(result, &loading, result == CUDA_SUCCESS ? (uintptr_t)*(out) : 0, is_module)

HOOK(cuModuleLoad)(CUmodule *module, const char *fname) {
    LOAD(cuModuleLoad, module, true, module, fname);
}

HOOK(cuModuleLoadData)(CUmodule *module, const void *image) {
    LOAD(cuModuleLoadData, module, true, module, image);
}

HOOK(cuModuleLoadDataEx)(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues) {
    LOAD(cuModuleLoadDataEx, module, true, module, image, numOptions, options, optionValues);
}

HOOK(cuModuleLoadFatBinary)(CUmodule *module, const void *fatCubin) {
    LOAD(cuModuleLoadFatBinary, module, true, module, fatCubin);
}

HOOK(cuModuleUnload)(CUmodule hmod) {
    return unloaded(REAL(cuModuleUnload)(hmod), (uintptr_t)hmod);
}

HOOK(cuLibraryLoadData)(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                        unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                        unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadData, library, false, library, code, jitOptions, jitOptionsValues, numJitOptions, libraryOptions, libraryOptionValues,
         numLibraryOptions);
}

HOOK(cuLibraryLoadFromFile)(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues,
                            unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                            unsigned int numLibraryOptions) {
    LOAD(cuLibraryLoadFromFile, library, false, library, fileName, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
         libraryOptionValues, numLibraryOptions);
}

HOOK(cuLibraryUnload)(CUlibrary library) {
    return unloaded(REAL(cuLibraryUnload)(library), (uintptr_t)library);
}
