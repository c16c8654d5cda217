"""MIG of the simulated machine: the profiles that a GPU has, and where instances have room.

By NVIDIA's MIG user guide, for A100, H100, H200 and B200: seven slices of compute, eight of memory. A
profile is named by its slices and its share of the memory in GB, rounded.
"""

import math
import uuid
from dataclasses import dataclass

from agent.simulator.profile import MIB
from agent.simulator.state import GpuState, InstanceState

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "instances.gpu-node-agent.io")
# Slices of compute, eighths of memory, where it may begin, whether it has the media engines.
_SHAPES = (
    (1, 1, range(7), False),
    (1, 1, range(7), True),
    (1, 2, range(0, 8, 2), False),
    (2, 2, range(0, 6, 2), False),
    (3, 4, range(0, 8, 4), False),
    (4, 4, range(1), False),
    (7, 8, range(1), False),
)


@dataclass(frozen=True, slots=True)
class MigProfile:
    name: str  # "1g.18gb"
    slices: int
    eighths: int
    starts: range
    media: bool


def profiles_of(gpu: GpuState) -> dict[str, MigProfile]:
    """The profiles of a GPU by name."""
    whole = math.ceil(gpu.memory_total / (1024 * MIB))
    found = {}
    for slices, eighths, starts, media in _SHAPES:
        size = math.floor(whole * eighths / 8 + 0.5)
        name = f"{slices}g.{size}gb{'+me' if media else ''}"
        found[name] = MigProfile(name, slices, eighths, starts, media)
    return found


def make(gpu: GpuState, name: str) -> InstanceState:
    """An instance at the first place that has room. Raises ValueError."""
    profiles = profiles_of(gpu)
    if not gpu.mig_mode or name not in profiles:
        raise ValueError(f"{gpu.name.decode()} has no MIG profile {name}; it has {', '.join(profiles)}")
    profile = profiles[name]
    there = [each for each in gpu.instances if each.used]
    taken = {eighth for each in there for eighth in range(each.start, each.start + each.eighths)}
    room = 7 - sum(each.slices for each in there)
    start = next((one for one in profile.starts if taken.isdisjoint(range(one, one + profile.eighths))), None)
    if start is None or room < profile.slices:
        raise ValueError(f"there is no room for {name}")
    one = next(each for each in gpu.instances if not each.used)
    numbers = {each.gpu_instance for each in there}
    one.gpu_instance = next(number for number in range(1, 15) if number not in numbers)
    one.compute_instance = 0
    one.slices, one.start, one.eighths, one.media = profile.slices, start, profile.eighths, profile.media
    one.multiprocessors = 16 * profile.slices
    one.memory_total, one.memory_used = gpu.memory_total // 8 * profile.eighths // MIB * MIB, 0
    one.profile = name.encode()
    one.uuid = f"MIG-{uuid.uuid5(_NAMESPACE, f'{gpu.uuid.decode()}/{one.gpu_instance}/0')}".encode()
    one.used = 1
    return one


def destroy(gpu: GpuState, instance: str) -> None:
    """By UUID. Raises ValueError."""
    found = next((each for each in gpu.instances if each.used and each.uuid.decode() == instance), None)
    if found is None:
        raise ValueError(f"there is no instance {instance}")
    found.used = 0
