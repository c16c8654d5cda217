/* Modules, libraries, functions and launches. The name of a function says how long it runs: "name_250us"; one that ends
 * in "_grid" runs as many nanoseconds as its grid is wide. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_NS 10000u

struct code { /* a module, or a library, which costs memory once it is used */
    struct object base;
    uint64_t charged;
};

static uint64_t duration_of(const char *name) {
    const char *mark = strrchr(name, '_');
    unsigned long long number;
    char unit[4] = "";
    if (mark != NULL && sscanf(mark + 1, "%llu%3s", &number, unit) == 2) {
        return number * (strcmp(unit, "ms") == 0 ? 1000000u : strcmp(unit, "us") == 0 ? 1000u : 1u);
    }
    return DEFAULT_NS;
}

/* What a module takes when its load returns. Of a text it is what its variables do, as on an H200: the code itself has room
 * in the context, which grows by some MiB for thousands of them. */
static uint64_t size_of(const char *image, uint32_t device) {
    unsigned long long bytes = 0;
    if (image == NULL || strncmp(image, ".version", 8) != 0) {
        return cuda_machine->devices[device].module_bytes;
    }
    const char *variable = strstr(image, ".global .align");
    return variable != NULL && sscanf(variable, ".global .align %*u .b8 %*[^[][%llu]", &bytes) == 1 ? round_up(bytes, granule(device)) : 0;
}

static CUresult load(enum object_kind kind, const char *image, void **handle) {
    struct context *context;
    CUresult result = CUDA_SUCCESS;
    NEED(handle != NULL);
    TRY(current(&context));
    struct code *code = calloc(1, sizeof(*code));
    code->base.device = context->base.device;
    if (kind == MODULE) {
        code->charged = size_of(image, code->base.device);
        result = charge(code->base.device, SIM_CUDA_MEMORY_CODE, code->charged);
    }
    if (result != CUDA_SUCCESS) {
        free(code);
        return result;
    }
    objects_lock();
    object_add(&code->base, kind, (uint64_t)(uintptr_t)code);
    objects_unlock();
    *handle = code;
    return CUDA_SUCCESS;
}

static void forget_function(struct object *object, void *data) {
    struct function *function = (struct function *)object;
    if (function->owner == data) {
        object_remove(object);
        free(function);
    }
}

static CUresult unload(const void *handle, enum object_kind kind) {
    objects_lock();
    struct code *code = (struct code *)object_find_handle(handle, kind);
    if (code != NULL) {
        objects_each(FUNCTION, forget_function, code);
        object_remove(&code->base);
        discharge(code->base.device, SIM_CUDA_MEMORY_CODE, code->charged);
        free(code);
    }
    objects_unlock();
    return code == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

static CUresult get_function(void **made, const void *owner, enum object_kind kind, const char *name) {
    NEED(made != NULL && name != NULL);
    objects_lock();
    struct object *code = object_find_handle(owner, kind);
    if (code != NULL) {
        struct function *function = calloc(1, sizeof(*function));
        function->owner = code;
        function->duration_ns = duration_of(name);
        function->runs_grid = strlen(name) > 5 && strcmp(name + strlen(name) - 5, "_grid") == 0;
        snprintf(function->name, sizeof(function->name), "%s", name);
        object_add(&function->base, FUNCTION, (uint64_t)(uintptr_t)function);
        *made = function;
    }
    objects_unlock();
    return code == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

struct function *function_find(const void *handle) {
    objects_lock();
    struct function *function = (struct function *)object_find_handle(handle, FUNCTION);
    objects_unlock();
    return function;
}

CUresult model_cuModuleLoad(CUmodule *module, const char *fname) {
    NEED(fname != NULL);
    return load(MODULE, NULL, (void **)module);
}

CUresult model_cuModuleLoadData(CUmodule *module, const void *image) {
    NEED(image != NULL);
    return load(MODULE, image, (void **)module);
}

CUresult model_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
                                  void **optionValues) {
    NEED(image != NULL && (numOptions == 0 || (options != NULL && optionValues != NULL)));
    return load(MODULE, image, (void **)module);
}

CUresult model_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    NEED(fatCubin != NULL);
    return load(MODULE, NULL, (void **)module);
}

CUresult model_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    NEED(mode != NULL);
    *mode = CU_MODULE_LAZY_LOADING; /* the default since 12.2 */
    return CUDA_SUCCESS;
}

CUresult model_cuModuleUnload(CUmodule hmod) {
    return unload(hmod, MODULE);
}

CUresult model_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    return get_function((void **)hfunc, hmod, MODULE, name);
}

#ifdef HAVE_cuLibraryLoadData
CUresult model_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                 unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                 unsigned int numLibraryOptions) {
    NEED(code != NULL && (numJitOptions == 0 || (jitOptions != NULL && jitOptionsValues != NULL)));
    NEED(numLibraryOptions == 0 || (libraryOptions != NULL && libraryOptionValues != NULL));
    return load(LIBRARY, NULL, (void **)library);
}

CUresult model_cuLibraryUnload(CUlibrary library) {
    return unload(library, LIBRARY);
}

CUresult model_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name) {
    return get_function((void **)pKernel, library, LIBRARY, name);
}
#endif

/* Lazy loading: a library's code comes to the GPU with its first function or launch. */
static CUresult bring_in(struct function *function) {
    struct code *code = (struct code *)function->owner;
    if (code->base.kind == LIBRARY && code->charged == 0) {
        uint64_t bytes = cuda_machine->devices[code->base.device].module_bytes;
        TRY(charge(code->base.device, SIM_CUDA_MEMORY_CODE, bytes));
        code->charged = bytes;
    }
    return CUDA_SUCCESS;
}

#ifdef HAVE_cuKernelGetFunction
CUresult model_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel) {
    struct function *function = function_find(kernel);
    NEED(pFunc != NULL);
    if (function == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    TRY(bring_in(function));
    *pFunc = (CUfunction)function;
    return CUDA_SUCCESS;
}
#endif

static CUresult launch(CUfunction handle, unsigned int width, CUstream hStream) {
    struct stream *stream;
    struct function *function = function_find(handle);
    TRY(stream_of(hStream, &stream));
    if (function == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    uint64_t duration = function->runs_grid ? width : function->duration_ns;
    if (stream->capture != NULL) {
        return graph_capture_work(stream, duration);
    }
    TRY(bring_in(function));
    stream_work(stream, duration);
    return CUDA_SUCCESS;
}

CUresult model_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                              unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                              unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
    (void)sharedMemBytes;
    NEED(gridDimX > 0 && gridDimY > 0 && gridDimZ > 0 && blockDimX > 0 && blockDimY > 0 && blockDimZ > 0);
    NEED(kernelParams == NULL || extra == NULL);
    return launch(f, gridDimX, hStream);
}

#ifdef HAVE_cuLaunchKernelEx
CUresult model_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
    NEED(config != NULL && (kernelParams == NULL || extra == NULL));
    return launch(f, config->gridDimX, config->hStream);
}
#endif

CUresult model_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                         unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                         unsigned int sharedMemBytes, CUstream hStream, void **kernelParams) {
    return model_cuLaunchKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
                                kernelParams, NULL);
}

CUresult model_cuLaunch(CUfunction f) {
    return launch(f, 1, NULL);
}

CUresult model_cuLaunchGrid(CUfunction f, int grid_width, int grid_height) {
    NEED(grid_width > 0 && grid_height > 0);
    return launch(f, (unsigned int)grid_width, NULL);
}

CUresult model_cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream) {
    NEED(grid_width > 0 && grid_height > 0);
    return launch(f, (unsigned int)grid_width, hStream);
}
