"""Instances of GPUs in MIG mode: their names, their places, how they are made and destroyed."""

import re
from collections.abc import Iterator
from contextlib import suppress
from ctypes import byref, c_uint

import pynvml

from agent.model.gpu import Instance
from agent.nvml.event_watch import Opaque, call, offered
from agent.nvml.port import (
    GpuInstance,
    MigProfile,
    NvmlCode,
    NvmlError,
    NvmlLeftOver,
    NvmlNotSupported,
    Partition,
    error_for,
)
from agent.nvml.sampling import read_fields

# The instances of a GPU in MIG mode, as NVML names them. No privilege is needed to see them.

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


# Making and destroying instances of a GPU in MIG mode, and what the driver says of their places.

_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
# A kind of profile that this GPU, or this driver, does not have.
_NO_SUCH_KIND = (NvmlCode.NOT_SUPPORTED, NvmlCode.INVALID_ARGUMENT)
_SHARED = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_WITHOUT_RESET = pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED


def partition_of(handle: Opaque) -> Partition:
    """Profiles, places and instances. Raises NvmlError."""
    mode = offered("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        raise NvmlNotSupported(NvmlCode.NOT_SUPPORTED, "nvmlDeviceGetMigMode", "the GPU is not in MIG mode")
    infos = list({info.id: info for info in _profiles(handle)}.values())
    found = tuple(each for info in infos for each in _instances(handle, info))
    return Partition(tuple(_profile(handle, info) for info in infos), found, instances_of(handle))


def _profiles(handle: Opaque) -> Iterator[Opaque]:
    for kind in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            yield call("nvmlDeviceGetGpuInstanceProfileInfo", handle, kind)
        except NvmlError as error:
            if error.code not in _NO_SUCH_KIND:
                raise


def _profile(handle: Opaque, info: Opaque) -> MigProfile:
    count = c_uint(0)
    call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, info.id, None, byref(count))
    places = (pynvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, info.id, places, byref(count))
    there = places[: count.value]
    name = info.name if isinstance(info.name, str) else info.name.decode()
    size = there[0].size if there else 0
    starts = tuple(sorted(place.start for place in there))
    # "MIG 1g.18gb" with some drivers, "1g.18gb" with others.
    called = profile_in(f" MIG {name.removeprefix('MIG ')}")
    return MigProfile(info.id, called, info.sliceCount, size, starts, info.instanceCount)


def _instances(handle: Opaque, info: Opaque) -> Iterator[GpuInstance]:
    count = c_uint(info.instanceCount)
    handles = (pynvml.c_nvmlGpuInstance_t * max(1, info.instanceCount))()
    call("nvmlDeviceGetGpuInstances", handle, info.id, handles, byref(count))
    for instance in handles[: count.value]:
        about = call("nvmlGpuInstanceGetInfo", instance)
        place, numbers, whole = about.placement, [], False
        for kind, compute in _computes(instance):
            numbers.append(call("nvmlComputeInstanceGetInfo", compute).id)
            whole = kind.sliceCount == info.sliceCount
        yield GpuInstance(
            about.id, info.id, place.start, place.size, tuple(numbers), whole and len(numbers) == 1
        )


def _computes(instance: Opaque) -> Iterator[tuple[Opaque, Opaque]]:
    """The compute instances of a GPU instance, each behind its profile."""
    for kind in _compute_profiles(instance):
        count = c_uint(kind.instanceCount)
        handles = (pynvml.c_nvmlComputeInstance_t * max(1, kind.instanceCount))()
        call("nvmlGpuInstanceGetComputeInstances", instance, kind.id, handles, byref(count))
        for compute in handles[: count.value]:
            yield kind, compute


def _compute_profiles(instance: Opaque) -> Iterator[Opaque]:
    for kind in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            yield call("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, kind, _SHARED)
        except NvmlError as error:
            if error.code not in _NO_SUCH_KIND:
                raise


def make(handle: Opaque, profile: MigProfile, start: int) -> int:
    """See the port."""
    place = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
    instance = call("nvmlDeviceCreateGpuInstanceWithPlacement", handle, profile.number, byref(place))
    try:
        number = int(call("nvmlGpuInstanceGetInfo", instance).id)
        fitting = (kind for kind in _compute_profiles(instance) if kind.sliceCount == profile.slices)
        if (kind := next(fitting, None)) is None:
            text = f"the driver has no compute instance that takes all of {profile.name}"
            raise error_for(NvmlCode.NOT_SUPPORTED, "nvmlGpuInstanceGetComputeInstanceProfileInfo", text)
        call("nvmlGpuInstanceCreateComputeInstance", instance, kind.id)
    except NvmlError as error:
        try:
            call("nvmlGpuInstanceDestroy", instance)
        except NvmlError as again:
            text = f"{error}; and what was made of it cannot be destroyed: {again}"
            raise NvmlLeftOver(error.code, error.call, text) from error
        raise
    return number


def destroy(handle: Opaque, expected: GpuInstance, device: str) -> None:
    """See the port."""
    number = expected.number
    instance = call("nvmlDeviceGetGpuInstanceById", handle, number)
    about = call("nvmlGpuInstanceGetInfo", instance)
    computes = [compute for _, compute in _computes(instance)]
    numbers = tuple(call("nvmlComputeInstanceGetInfo", compute).id for compute in computes)
    there = (about.profileId, about.placement.start, numbers)
    if there != (expected.profile, expected.start, expected.computes):
        raise _another(number)
    for index in range(offered("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            mig = call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if call("nvmlDeviceGetGpuInstanceId", mig) != number:
                continue
        except NvmlError as error:
            if error.code != NvmlCode.NOT_FOUND:
                raise
            continue
        if device and call("nvmlDeviceGetUUID", mig) != device:
            raise _another(number)
        for name in _PROCESSES:
            if found := offered(name, mig):
                pids = ", ".join(str(each.pid) for each in found[:5])
                raise error_for(NvmlCode.IN_USE, name, f"processes are on it: {pids}")
    for compute in computes:
        call("nvmlComputeInstanceDestroy", compute)
    call("nvmlGpuInstanceDestroy", instance)


def _another(number: int) -> NvmlError:
    return error_for(
        NvmlCode.NOT_FOUND, "nvmlDeviceGetGpuInstanceById", f"GPU instance {number} is another one by now"
    )


def way_of_switching(handle: Opaque) -> str:
    """See `Gpu.mig_switch`."""
    return "live" if read_fields(handle, [_WITHOUT_RESET]).get(_WITHOUT_RESET) else "reset"


def switch(handle: Opaque, enabled: bool) -> None:
    if status := call("nvmlDeviceSetMigMode", handle, int(enabled)):
        # It is pending, and would come with the next reset, under those who have the GPU then.
        with suppress(NvmlError):
            call("nvmlDeviceSetMigMode", handle, int(not enabled))
        raise error_for(status, "nvmlDeviceSetMigMode")
