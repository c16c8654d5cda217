"""The instances of a GPU in MIG mode, as NVML names them. No privilege is needed to see them."""

import re

from agent.model.gpu import Instance
from agent.nvml.nvml_errors import NvmlCode, NvmlError
from agent.nvml.worker_thread import Opaque, call, offered

# "NVIDIA H200 MIG 1c.3g.71gb": what stands behind MIG is the profile's name.
_PROFILE = re.compile(r" MIG (?P<profile>(?:\d+c\.)?\d+g\.\d+gb(?:[+-][a-z][a-z.+-]*)?)$")
_MIB = 1 << 20
# An instance that is gone, or may not be looked at, hides no other one, and not its GPU.
PASSED_OVER = (NvmlCode.NOT_FOUND, NvmlCode.INVALID_ARGUMENT, NvmlCode.NO_PERMISSION, NvmlCode.NOT_SUPPORTED)


def instances_of(handle: Opaque) -> tuple[Instance, ...]:
    """Those that a GPU has now, in NVML's order. What is made or destroyed meanwhile is in the next look."""
    found = []
    for number in range(offered("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            mig = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            found.append(_described(mig))
        except NvmlError as error:
            if error.code not in PASSED_OVER:
                raise
    return tuple(found)


def _described(mig: Opaque) -> Instance:
    shape = call("nvmlDeviceGetAttributes_v2", mig)
    name = call("nvmlDeviceGetName", mig)
    return Instance(
        uuid=call("nvmlDeviceGetUUID", mig),
        gpu_instance=call("nvmlDeviceGetGpuInstanceId", mig),
        compute_instance=call("nvmlDeviceGetComputeInstanceId", mig),
        profile=profile_in(name if isinstance(name, str) else name.decode()),
        memory_bytes=shape.memorySizeMB * _MIB,
        multiprocessors=shape.multiprocessorCount,
        slices=shape.gpuInstanceSliceCount,
        compute_slices=shape.computeInstanceSliceCount,
        engines=(
            shape.sharedCopyEngineCount,
            shape.sharedDecoderCount,
            shape.sharedEncoderCount,
            shape.sharedJpegCount,
            shape.sharedOfaCount,
        ),
    )


def profile_in(name: str) -> str:
    """The profile in an instance's name; empty: it names none, and nobody can ask for it."""
    found = _PROFILE.search(name)
    return found["profile"] if found else ""
