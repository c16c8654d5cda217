"""Pods of every shape that a storm makes."""

import random
from collections.abc import Callable, Collection

from agent.model.pod import MPS, VGPU
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec

GPU = "nvidia.com/gpu"
INIT_SECONDS = (0.0, 0.0, 1.0, 20.0)  # that an init container runs


def _whole(rng: random.Random) -> dict[str, int]:
    return {GPU: rng.choice((1, 1, 1, 2))}


def _share(rng: random.Random) -> dict[str, int]:
    return {VGPU.core: rng.choice((5, 10, 25, 40, 60, 90)), VGPU.memory: rng.choice((1, 6, 16, 30))}


def _memory_only(rng: random.Random) -> dict[str, int]:
    return {VGPU.memory: rng.choice((1, 8, 24))}


def _whole_card(rng: random.Random) -> dict[str, int]:
    return {VGPU.core: 100 * rng.choice((1, 1, 2))}


def _mps_share(rng: random.Random) -> dict[str, int]:
    return {MPS.core: rng.choice((5, 10, 25, 50, 100)), MPS.memory: rng.choice((1, 2, 6))}


Limits = Callable[[random.Random], dict[str, int]]
# What pods ask for, and by which resource: most pods ask for something that the node offers.
LIMITS: tuple[tuple[Limits, str], ...] = (
    (_whole, GPU),
    (_whole, GPU),
    (_share, VGPU.core),
    (_share, VGPU.core),
    (_share, VGPU.core),
    (_memory_only, VGPU.core),
    (_whole_card, VGPU.core),
)
PARTS = tuple(f"nvidia.com/mig-{profile}" for profile in ("1g.2gb", "1g.3gb", "2g.3gb", "3g.6gb"))


def _part_of(resource: str) -> Limits:
    return lambda rng: {resource: rng.choice((1, 1, 1, 2))}


PART_LIMITS: tuple[tuple[Limits, str], ...] = tuple((_part_of(each), each) for each in PARTS) * 2
MPS_LIMITS: tuple[tuple[Limits, str], ...] = (*LIMITS, *(((_mps_share, MPS.core),) * 4))


def static_pod_of(rng: random.Random, name: str, node: str) -> PodSpec:
    """A static pod, which can have whole GPUs alone; some ask for a share all the same."""
    limits = rng.choice((_whole, _whole, _share))(rng)
    return PodSpec(f"{name}-{node}", (ContainerSpec("main", limits),), static=True)


def random_pod(
    rng: random.Random, name: str, *, mps: bool = False, mig: bool = False, offered: Collection[str] = ()
) -> PodSpec:
    """A pod with one to three containers that ask for GPUs, in most cases by a resource that is `offered`."""
    known = (*(MPS_LIMITS if mps else LIMITS), *(PART_LIMITS if mig else ()))
    if rng.random() < 0.8:
        known = tuple(each for each in known if each[1] in offered) or known
    limits = rng.choice(known)[0]
    shape = rng.random()
    exits = rng.random() < 0.2

    def container(each: str, *, sidecar: bool = False, seconds: float = 0.0) -> ContainerSpec:
        ends = exits and not sidecar
        return ContainerSpec(each, limits(rng), restartable=sidecar, exits=ends, seconds=seconds)

    if shape < 0.6:
        return PodSpec(name, (container("main"),))
    if shape < 0.75:
        return PodSpec(
            name, (container("main"),), init_containers=(container("init", seconds=rng.choice(INIT_SECONDS)),)
        )
    if shape < 0.85:
        side = container("side", sidecar=True)
        return PodSpec(name, (container("main"),), init_containers=(side,))
    return PodSpec(name, (container("main"), container("second")))
