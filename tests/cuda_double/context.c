/* Contexts: primary and others, the stack of each thread, and what they cost. */
#include "double.h"

#include <stdlib.h>

#define DEPTH 64
static struct context *primary[SIM_CUDA_DEVICES];
static uint32_t retained[SIM_CUDA_DEVICES]; /* of a primary context that was reset */
static _Thread_local struct context *stack[DEPTH];
static _Thread_local uint32_t depth;

static struct context *find(CUcontext handle) {
    objects_lock();
    struct context *context = (struct context *)object_find_handle(handle, CONTEXT);
    objects_unlock();
    return context;
}

CUresult current(struct context **context) {
    if (depth == 0 || stack[depth - 1] == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    objects_lock();
    *context = object_lives(stack[depth - 1], CONTEXT) ? stack[depth - 1] : NULL;
    objects_unlock();
    return *context == NULL ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult model_cuInit(unsigned int Flags) {
    static int initialised;
    CUresult result = CUDA_SUCCESS;
    NEED(Flags == 0);
    if (state_forked()) {
        return CUDA_ERROR_NOT_INITIALIZED; /* as the driver: contexts do not survive a fork */
    }
    struct sim_cuda_machine *machine = state_map();
    if (machine == NULL) {
        return CUDA_ERROR_NO_DEVICE;
    }
    objects_lock();
    if (!initialised) {
        result = state_register();
        if (result == CUDA_SUCCESS) {
            __atomic_store_n(&cuda_machine, machine, __ATOMIC_RELEASE);
            result = devices_find();
            initialised = result == CUDA_SUCCESS;
            if (!initialised) {
                __atomic_store_n(&cuda_machine, NULL, __ATOMIC_RELEASE);
            }
        }
    }
    objects_unlock();
    return result;
}

/* The object lock is held. */
static CUresult make(uint32_t device, unsigned int flags, struct context **made) {
    TRY(charge(device, SIM_CUDA_MEMORY_CONTEXT, cuda_machine->devices[device].context_bytes));
    struct context *context = calloc(1, sizeof(*context));
    context->base.device = device;
    context->flags = flags;
    object_add(&context->base, CONTEXT, (uint64_t)(uintptr_t)context);
    *made = context;
    return CUDA_SUCCESS;
}

static void free_if_of(struct object *object, void *data) {
    struct memory *memory = (struct memory *)object;
    if (memory->context == data) {
        memory_free(memory);
    }
}

/* The object lock is held. */
static void unmake(struct context *context) {
    objects_each(MEMORY, free_if_of, context);
    object_retire(&context->base);
    discharge(context->base.device, SIM_CUDA_MEMORY_CONTEXT, cuda_machine->devices[context->base.device].context_bytes);
}

static CUresult create(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    uint32_t index;
    struct context *context = NULL;
    NEED(pctx != NULL && depth < DEPTH);
    TRY(device_index(dev, &index));
    objects_lock();
    CUresult result = make(index, flags, &context);
    objects_unlock();
    TRY(result);
    stack[depth++] = context;
    *pctx = (CUcontext)context;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    return create(pctx, flags, dev);
}

CUresult model_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    return create(pctx, flags, dev);
}

CUresult model_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
                              CUdevice dev) {
    NEED(numParams == 0 || paramsArray != NULL);
    return create(pctx, flags, dev);
}

#ifdef HAVE_cuCtxCreate_v4
CUresult model_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev) {
    (void)ctxCreateParams; /* may be NULL */
    return create(pctx, flags, dev);
}
#endif

CUresult model_cuCtxDestroy_v2(CUcontext ctx) {
    CUresult result = CUDA_ERROR_INVALID_CONTEXT;
    objects_lock();
    struct context *context = (struct context *)object_find_handle(ctx, CONTEXT);
    if (context != NULL && primary[context->base.device] != context) {
        unmake(context);
        result = CUDA_SUCCESS;
        if (depth > 0 && stack[depth - 1] == context) {
            depth--;
        }
    }
    objects_unlock();
    return result;
}

CUresult model_cuCtxDestroy(CUcontext ctx) {
    return model_cuCtxDestroy_v2(ctx);
}

CUresult model_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    uint32_t index;
    CUresult result = CUDA_SUCCESS;
    NEED(pctx != NULL);
    TRY(device_index(dev, &index));
    objects_lock();
    if (primary[index] == NULL) {
        result = make(index, 0, &primary[index]);
        if (result == CUDA_SUCCESS) {
            primary[index]->references = retained[index];
            retained[index] = 0;
        }
    }
    if (result == CUDA_SUCCESS) {
        primary[index]->references++;
        *pctx = (CUcontext)primary[index];
    }
    objects_unlock();
    return result;
}

/* "Resetting the primary context does not release it": cuda.h, of cuDevicePrimaryCtxReset. */
static CUresult release(CUdevice dev, int reset) {
    uint32_t index;
    CUresult result = CUDA_SUCCESS;
    TRY(device_index(dev, &index));
    objects_lock();
    if (primary[index] == NULL) {
        result = reset || retained[index] > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
        retained[index] -= !reset && retained[index] > 0;
    } else if (reset || --primary[index]->references == 0) {
        retained[index] = reset ? primary[index]->references : 0;
        pools_reset(index);
        unmake(primary[index]);
        primary[index] = NULL;
    }
    objects_unlock();
    return result;
}

CUresult model_cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    return release(dev, 0);
}

CUresult model_cuDevicePrimaryCtxRelease(CUdevice dev) {
    return release(dev, 0);
}

CUresult model_cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    return release(dev, 1);
}

CUresult model_cuDevicePrimaryCtxReset(CUdevice dev) {
    return release(dev, 1);
}

CUresult model_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    uint32_t index;
    NEED(flags != NULL && active != NULL);
    TRY(device_index(dev, &index));
    *flags = 0;
    *active = primary[index] != NULL;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxSetCurrent(CUcontext ctx) {
    if (ctx == NULL) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    struct context *context = find(ctx);
    if (context == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[depth > 0 ? depth - 1 : depth++] = context;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxPushCurrent_v2(CUcontext ctx) {
    struct context *context = find(ctx);
    if (context == NULL || depth == DEPTH) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxPushCurrent(CUcontext ctx) {
    return model_cuCtxPushCurrent_v2(ctx);
}

CUresult model_cuCtxPopCurrent_v2(CUcontext *pctx) {
    if (depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth--;
    if (pctx != NULL) {
        *pctx = (CUcontext)stack[depth];
    }
    return CUDA_SUCCESS;
}

CUresult model_cuCtxPopCurrent(CUcontext *pctx) {
    return model_cuCtxPopCurrent_v2(pctx);
}

CUresult model_cuCtxGetCurrent(CUcontext *pctx) {
    NEED(pctx != NULL);
    *pctx = depth == 0 ? NULL : (CUcontext)stack[depth - 1];
    return CUDA_SUCCESS;
}

CUresult model_cuCtxGetDevice(CUdevice *device) {
    struct context *context;
    NEED(device != NULL);
    TRY(current(&context));
    *device = device_ordinal(context->base.device);
    return CUDA_SUCCESS;
}

#ifdef HAVE_cuCtxGetDevice_v2
CUresult model_cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx) {
    struct context *context = ctx == NULL ? NULL : find(ctx);
    NEED(device != NULL);
    if (ctx == NULL) {
        return model_cuCtxGetDevice(device);
    }
    if (context == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = device_ordinal(context->base.device);
    return CUDA_SUCCESS;
}
#endif

CUresult model_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version) {
    NEED(version != NULL);
    if (ctx != NULL && find(ctx) == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxSetLimit(CUlimit limit, size_t value) {
    struct context *context;
    TRY(current(&context));
    NEED((unsigned int)limit < sizeof(context->limits) / sizeof(context->limits[0]));
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult model_cuCtxGetLimit(size_t *pvalue, CUlimit limit) {
    struct context *context;
    NEED(pvalue != NULL);
    TRY(current(&context));
    NEED((unsigned int)limit < sizeof(context->limits) / sizeof(context->limits[0]));
    *pvalue = context->limits[limit];
    return CUDA_SUCCESS;
}
