/* Capture of streams, and what a capture forbids meanwhile: by its mode, whole classes of calls to all threads. */
#include "double.h"
#include "graph.h"

/* The mode of each thread, and the captures of this process in which all threads are held to it. */
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static uint32_t strict_captures, broken_captures;

CUresult capture_forbids(void) {
    if (__atomic_load_n(&strict_captures, __ATOMIC_RELAXED) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_SUCCESS;
    }
    __atomic_store_n(&broken_captures, 1, __ATOMIC_RELAXED);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult model_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    NEED(mode != NULL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(CUstream hStream, CUstreamCaptureMode mode) {
    struct stream *stream;
    TRY(stream_of(hStream, &stream));
    if (stream->capture != NULL || hStream == NULL || hStream == CU_STREAM_LEGACY) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    objects_lock();
    stream->capture = graph_make(stream->base.device);
    stream->capture_strict = mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    strict_captures += stream->capture_strict;
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult model_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    NEED(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    return begin_capture(hStream, mode);
}

CUresult model_cuStreamBeginCapture(CUstream hStream) {
    return begin_capture(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult model_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
    struct stream *stream;
    NEED(phGraph != NULL);
    TRY(stream_of(hStream, &stream));
    if (stream->capture == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    objects_lock();
    int is_broken = stream->capture_strict && broken_captures;
    *phGraph = is_broken ? NULL : (CUgraph)stream->capture;
    strict_captures -= stream->capture_strict;
    broken_captures = strict_captures == 0 ? 0 : broken_captures;
    stream->capture = NULL;
    objects_unlock();
    return is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult model_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus) {
    struct stream *stream;
    NEED(captureStatus != NULL);
    TRY(stream_of(hStream, &stream));
    *captureStatus = stream->capture != NULL ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult model_cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out) {
    struct stream *stream;
    TRY(model_cuStreamIsCapturing(hStream, captureStatus_out));
    TRY(stream_of(hStream, &stream));
    if (id_out != NULL) {
        *id_out = (uint64_t)(uintptr_t)stream->capture;
    }
    return CUDA_SUCCESS;
}

CUresult model_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                         CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                         size_t *numDependencies_out) {
    struct stream *stream;
    TRY(model_cuStreamGetCaptureInfo(hStream, captureStatus_out, id_out));
    TRY(stream_of(hStream, &stream));
    if (graph_out != NULL) {
        *graph_out = (CUgraph)stream->capture;
    }
    if (dependencies_out != NULL) {
        *dependencies_out = NULL;
    }
    if (numDependencies_out != NULL) {
        *numDependencies_out = 0;
    }
    return CUDA_SUCCESS;
}

#ifdef HAVE_cuStreamGetCaptureInfo_v3
CUresult model_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                         CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                         const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out) {
    if (edgeData_out != NULL) {
        *edgeData_out = NULL;
    }
    return model_cuStreamGetCaptureInfo_v2(hStream, captureStatus_out, id_out, graph_out, dependencies_out,
                                           numDependencies_out);
}
#endif

CUresult graph_capture_alloc(struct stream *stream, uint32_t device, uint64_t bytes, CUdeviceptr *address) {
    objects_lock();
    struct node *node = graph_append(stream->capture, NODE_ALLOC);
    node->base.device = device;
    node->bytes = bytes;
    *address = node->address = address_take(bytes, ALIGNMENT);
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult graph_capture_free(struct stream *stream, CUdeviceptr address) {
    objects_lock();
    graph_append(stream->capture, NODE_FREE)->address = address;
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult graph_capture_work(struct stream *stream, uint64_t nanoseconds) {
    objects_lock();
    graph_append(stream->capture, NODE_WORK)->duration_ns = nanoseconds;
    objects_unlock();
    return CUDA_SUCCESS;
}

CUresult graph_capture_child(struct stream *stream, struct exec *exec) {
    return graph_capture_work(stream, exec->duration_ns);
}
