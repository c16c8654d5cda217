"""The NVML binding on whatever GPUs this machine has: `make test-gpu`. Fails where there is no driver."""
