"""MIG of the simulated machine: the profiles that a GPU has, and where instances have room.

By NVIDIA's MIG user guide and `nvidia-smi mig -lgip`, for A100, H100, H200 and B200: seven slices of
compute, eight of memory. A profile is named by its slices and its share of the memory in GB, rounded.
"""

import math

from agent.nvml.port import NvmlCode
from agent.simulator.profile import MIB
from agent.simulator.state import GpuState, InstanceState, MigProfileState

# NVML's number and kind, slices of compute, eighths of memory, places, how many, with the media engines.
_SHAPES = (
    (19, 0x0, 1, 1, range(7), 7, False),
    (20, 0x7, 1, 1, range(7), 1, True),
    (15, 0x9, 1, 2, range(0, 8, 2), 4, False),
    (14, 0x1, 2, 2, range(0, 6, 2), 3, False),
    (9, 0x2, 3, 4, range(0, 8, 4), 2, False),
    (5, 0x3, 4, 4, range(1), 1, False),
    (0, 0x4, 7, 8, range(1), 1, False),
)
_MULTIPROCESSORS = {7: 14, 9: 16, 10: 18}  # of a slice, by the GPU's generation


class Refusal(ValueError):
    """NVIDIA's refusal to do something; `code` is NVML's."""

    def __init__(self, code: NvmlCode, text: str) -> None:
        self.code = code
        super().__init__(text)


def fill_profiles(gpu: GpuState) -> None:
    whole = math.ceil(gpu.memory_total / (1024 * MIB))
    for entry, (number, kind, slices, eighths, starts, most, media) in zip(
        gpu.mig_profiles, _SHAPES, strict=False
    ):
        size = math.floor(whole * eighths / 8 + 0.5)
        entry.name = f"{slices}g.{size}gb{'+me' if media else ''}".encode()
        entry.number, entry.kind, entry.slices, entry.eighths = number, kind, slices, eighths
        entry.starts, entry.most, entry.media = sum(1 << start for start in starts), most, media
        entry.multiprocessors = _MULTIPROCESSORS.get(gpu.architecture, 16) * slices
        entry.memory_total = gpu.memory_total // 8 * eighths // MIB * MIB


def profiles_of(gpu: GpuState) -> dict[str, MigProfileState]:
    """The profiles of a GPU by name."""
    return {each.name.decode(): each for each in gpu.mig_profiles if each.slices}


def there(gpu: GpuState) -> list[InstanceState]:
    """Its GPU instances, with a compute instance or without."""
    return [each for each in gpu.instances if each.used or each.bare]


def begin(gpu: GpuState, profile: MigProfileState, start: int | None = None) -> InstanceState:
    """A GPU instance without a compute instance, at a place or at the first that has room. Raises Refusal."""
    name, present = profile.name.decode(), there(gpu)
    taken = {eighth for each in present for eighth in range(each.start, each.start + each.eighths)}
    places = [
        one
        for one in range(8)
        if profile.starts >> one & 1 and taken.isdisjoint(range(one, one + profile.eighths))
    ]
    alike = sum(each.profile_number == profile.number for each in present)
    slices = sum(each.slices for each in present) + profile.slices
    if start not in (None, *places) or not places or slices > 7 or alike >= profile.most:
        raise Refusal(NvmlCode.INSUFFICIENT_RESOURCES, f"there is no room for {name}")
    one = next(each for each in gpu.instances if not (each.used or each.bare))
    numbers = {each.gpu_instance for each in present}
    one.gpu_instance = next(number for number in range(1, 15) if number not in numbers)
    one.compute_instance = 0
    one.start = places[0] if start is None else start
    one.slices, one.eighths, one.media = profile.slices, profile.eighths, profile.media
    one.multiprocessors, one.profile_number = profile.multiprocessors, profile.number
    one.memory_total, one.memory_used = profile.memory_total, 0
    one.profile = profile.name
    # As the driver does, the same again for one that is made again at its place.
    one.uuid = f"MIG-{gpu.uuid.decode()[4:-2]}{one.gpu_instance:02x}".encode()
    one.bare = 1
    return one


def make(gpu: GpuState, name: str) -> InstanceState:
    """An instance at the first place that has room. Raises ValueError."""
    profiles = profiles_of(gpu)
    if not gpu.mig_mode or name not in profiles:
        raise ValueError(f"{gpu.name.decode()} has no MIG profile {name}; it has {', '.join(profiles)}")
    one = begin(gpu, profiles[name])
    one.used, one.bare = 1, 0
    return one


def destroy(gpu: GpuState, instance: str) -> None:
    """By UUID, held or not. Raises ValueError."""
    found = next((each for each in there(gpu) if each.uuid.decode() == instance), None)
    if found is None:
        raise ValueError(f"there is no instance {instance}")
    found.used = found.bare = 0


def switch(gpu: GpuState, *, enabled: bool) -> None:
    """MIG mode; instances go with it."""
    gpu.mig_mode = gpu.mig_pending = int(enabled)
    for each in gpu.instances:
        each.used = each.bare = 0
