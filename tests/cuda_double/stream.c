/* Streams and events: work has a device time, and waiting lasts until it is over. */
#include "double.h"
#include "gpu_time.h"

#include <stdlib.h>
#include <time.h>

struct event {
    struct object base;
    uint64_t at;
    int recorded;
    uint32_t stamp; /* of the GPUs' time, where the machine has one */
};

/* The default streams of each GPU: the legacy one, and that of each thread, which is in the list of streams, too. */
static struct stream defaults[SIM_CUDA_DEVICES];
static _Thread_local struct stream *of_thread[SIM_CUDA_DEVICES];

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_until(uint64_t when) {
    struct timespec limit = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    while (now_ns() < when) {
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &limit, NULL);
    }
}

static struct stream *default_of_thread(uint32_t device) {
    if (of_thread[device] == NULL) {
        struct stream *stream = of_thread[device] = calloc(1, sizeof(*stream));
        stream->base.device = device;
        objects_lock();
        object_add(&stream->base, STREAM, (uint64_t)(uintptr_t)stream);
        objects_unlock();
    }
    return of_thread[device];
}

CUresult stream_of(CUstream handle, struct stream **stream) {
    struct context *context;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        TRY(current(&context));
        uint32_t device = context->base.device;
        *stream = handle == CU_STREAM_PER_THREAD ? default_of_thread(device) : &defaults[device];
        (*stream)->base.device = device;
        return CUDA_SUCCESS;
    }
    objects_lock();
    *stream = (struct stream *)object_find_handle(handle, STREAM);
    objects_unlock();
    return *stream == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

void stream_work(struct stream *stream, uint64_t nanoseconds) {
    struct sim_cuda_use *use = &state_slot()->uses[stream->base.device];
    if (time_on()) {
        __atomic_fetch_add(&use->launches, 1, __ATOMIC_RELAXED);
        time_push(stream, nanoseconds, 0, 0);
        return;
    }
    uint64_t now = now_ns();
    uint64_t ends = __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED), begins;
    do {
        begins = ends > now ? ends : now;
    } while (!__atomic_compare_exchange_n(&stream->busy_until, &ends, begins + nanoseconds, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    __atomic_fetch_add(&use->launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&use->busy_ns, nanoseconds, __ATOMIC_RELAXED);
}

uint64_t stream_busy_until(const struct stream *stream) {
    uint64_t ends = time_on() ? 0 : __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED);
    return ends > now_ns() ? ends : 0;
}

static CUresult create(CUstream *handle, unsigned int flags, int priority) {
    struct context *context;
    NEED(handle != NULL && (flags & ~1u) == 0);
    TRY(current(&context));
    struct stream *stream = calloc(1, sizeof(*stream));
    stream->base.device = context->base.device;
    stream->flags = flags;
    stream->priority = priority;
    objects_lock();
    object_add(&stream->base, STREAM, (uint64_t)(uintptr_t)stream);
    objects_unlock();
    *handle = (CUstream)stream;
    return CUDA_SUCCESS;
}

CUresult model_cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    return create(phStream, Flags, 0);
}

CUresult model_cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
    return create(phStream, flags, priority);
}

CUresult model_cuStreamDestroy_v2(CUstream hStream) {
    objects_lock();
    struct stream *stream = (struct stream *)object_find_handle(hStream, STREAM);
    if (stream != NULL) {
        graph_stream_gone(stream);
        time_stream_gone(stream);
        pool_stream_gone(stream);
        object_remove(&stream->base);
        free(stream);
    }
    objects_unlock();
    return stream == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult model_cuStreamDestroy(CUstream hStream) {
    return model_cuStreamDestroy_v2(hStream);
}

/* Pools give memory back when the host waits for the GPU. */
static void waited(uint32_t device) {
    objects_lock();
    pools_trim(device);
    objects_unlock();
}

CUresult model_cuStreamSynchronize(CUstream hStream) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    if (stream->capture != NULL) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (time_on()) {
        time_wait_stream(stream);
    } else {
        sleep_until(__atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED));
    }
    waited(stream->base.device);
    return CUDA_SUCCESS;
}

CUresult model_cuStreamQuery(CUstream hStream) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    if (time_on()) {
        return time_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    }
    return now_ns() < __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

struct latest {
    uint32_t device;
    uint64_t when;
};

static void later(struct object *object, void *data) {
    struct latest *latest = data;
    uint64_t ends = __atomic_load_n(&((struct stream *)object)->busy_until, __ATOMIC_RELAXED);
    if (object->device == latest->device && ends > latest->when) {
        latest->when = ends;
    }
}

CUresult model_cuCtxSynchronize(void) {
    struct context *context;
    TRY(current(&context));
    TRY(capture_forbids()); /* it would wait for the captured stream, too: CUDA Programming Guide, prohibited operations */
    if (time_on()) {
        time_wait_device(context->base.device);
        waited(context->base.device);
        return CUDA_SUCCESS;
    }
    struct latest latest = {.device = context->base.device};
    objects_lock();
    objects_each(STREAM, later, &latest);
    objects_unlock();
    defaults[latest.device].base.device = latest.device;
    later(&defaults[latest.device].base, &latest);
    sleep_until(latest.when);
    waited(context->base.device);
    return CUDA_SUCCESS;
}

#ifdef HAVE_cuCtxSynchronize_v2
CUresult model_cuCtxSynchronize_v2(CUcontext ctx) {
    if (ctx == NULL) {
        return model_cuCtxSynchronize();
    }
    TRY(model_cuCtxPushCurrent_v2(ctx));
    CUresult result = model_cuCtxSynchronize();
    TRY(model_cuCtxPopCurrent_v2(NULL));
    return result;
}
#endif

#ifdef HAVE_cuStreamGetDevice
CUresult model_cuStreamGetDevice(CUstream hStream, CUdevice *device) {
    struct stream *stream;
    NEED(device != NULL);
    TRY(stream_of(hStream, &stream));
    *device = device_ordinal(stream->base.device);
    return CUDA_SUCCESS;
}
#endif

CUresult model_cuStreamGetCtx(CUstream hStream, CUcontext *pctx) {
    struct stream *stream;
    NEED(pctx != NULL);
    TRY(stream_of(hStream, &stream));
    return model_cuCtxGetCurrent(pctx);
}

CUresult model_cuStreamGetFlags(CUstream hStream, unsigned int *flags) {
    struct stream *stream;
    NEED(flags != NULL);
    TRY(stream_of(hStream, &stream));
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult model_cuStreamGetPriority(CUstream hStream, int *priority) {
    struct stream *stream;
    NEED(priority != NULL);
    TRY(stream_of(hStream, &stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

static struct event *event_of(CUevent handle) {
    objects_lock();
    struct event *event = (struct event *)object_find_handle(handle, EVENT);
    objects_unlock();
    return event;
}

CUresult model_cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    struct context *context;
    NEED(phEvent != NULL && (Flags & ~7u) == 0);
    TRY(current(&context));
    struct event *event = calloc(1, sizeof(*event));
    event->base.device = context->base.device;
    objects_lock();
    object_add(&event->base, EVENT, (uint64_t)(uintptr_t)event);
    objects_unlock();
    *phEvent = (CUevent)event;
    return CUDA_SUCCESS;
}

CUresult model_cuEventDestroy_v2(CUevent hEvent) {
    objects_lock();
    struct event *event = (struct event *)object_find_handle(hEvent, EVENT);
    if (event != NULL) {
        if (event->stamp != 0) {
            time_stamp_free(event->stamp);
        }
        object_remove(&event->base);
        free(event);
    }
    objects_unlock();
    return event == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult model_cuEventDestroy(CUevent hEvent) {
    return model_cuEventDestroy_v2(hEvent);
}

CUresult model_cuEventRecord(CUevent hEvent, CUstream hStream) {
    struct event *event = event_of(hEvent);
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    event->recorded = 1;
    if (stream->capture != NULL) {
        return graph_capture_work(stream, 0);
    }
    if (time_on()) {
        event->stamp = time_stamp(event->stamp);
        time_push(stream, 0, event->stamp, 0);
        return event->stamp == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    uint64_t now = now_ns(), ends = __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED);
    event->at = ends > now ? ends : now;
    return CUDA_SUCCESS;
}

static int is_pending(const struct event *event) {
    return event->stamp != 0 ? time_stamped(event->stamp) == 0 : now_ns() < event->at;
}

CUresult model_cuEventQuery(CUevent hEvent) {
    struct event *event = event_of(hEvent);
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    TRY(capture_forbids());
    return is_pending(event) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult model_cuEventSynchronize(CUevent hEvent) {
    struct event *event = event_of(hEvent);
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    TRY(capture_forbids());
    if (event->stamp != 0) {
        time_wait_stamp(event->stamp);
    } else {
        sleep_until(event->at);
    }
    waited(event->base.device);
    return CUDA_SUCCESS;
}

CUresult model_cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
    struct event *start = event_of(hStart), *end = event_of(hEnd);
    NEED(pMilliseconds != NULL);
    if (start == NULL || end == NULL || !start->recorded || !end->recorded) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    TRY(capture_forbids());
    if (is_pending(start) || is_pending(end)) {
        return CUDA_ERROR_NOT_READY;
    }
    uint64_t began = start->stamp != 0 ? time_stamped(start->stamp) : start->at;
    uint64_t ended = end->stamp != 0 ? time_stamped(end->stamp) : end->at;
    *pMilliseconds = (float)((double)((int64_t)ended - (int64_t)began) / 1e6);
    return CUDA_SUCCESS;
}

void stream_defaults_each(uint32_t device, void (*visit)(struct object *, void *)) {
    defaults[device].base.device = device;
    visit(&defaults[device].base, &device);
}
