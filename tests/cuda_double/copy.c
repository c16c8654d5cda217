/* Copies take time where the GPUs have a clock: between host and GPU on a copy engine, on the GPU as a kernel. */
#include "double.h"
#include "gpu_time.h"

#define HOST_BYTES_PER_US 25000u    /* 25 GB/s */
#define DEVICE_BYTES_PER_US 1500000u /* 1.5 TB/s */

static CUresult copy(CUstream handle, uint64_t bytes, int between) {
    struct stream *stream;
    TRY(stream_of(handle, &stream));
    uint64_t nanoseconds = bytes * 1000 / (between ? HOST_BYTES_PER_US : DEVICE_BYTES_PER_US);
    if (stream->capture != NULL) {
        return graph_capture_work(stream, nanoseconds);
    }
    if (time_on()) {
        time_push(stream, nanoseconds, 0, between);
    }
    return CUDA_SUCCESS;
}

CUresult model_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
    NEED(dstDevice != 0 && srcHost != NULL);
    return copy(hStream, ByteCount, 1);
}

CUresult model_cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    NEED(dstHost != NULL && srcDevice != 0);
    return copy(hStream, ByteCount, 1);
}

CUresult model_cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    NEED(dstDevice != 0 && srcDevice != 0);
    return copy(hStream, ByteCount, 0);
}
