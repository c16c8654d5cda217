"""A double of libcuda.so.1, generated from NVIDIA's own headers: memory as counters that processes share."""
