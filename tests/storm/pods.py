"""Pods of every shape that a storm makes."""

import random
from collections.abc import Callable

from agent.model.demand import VGPU
from agent.simulator.kubelet.pods import ContainerSpec, PodSpec

GPU = "nvidia.com/gpu"


def _whole(rng: random.Random) -> dict[str, int]:
    return {GPU: rng.choice((1, 1, 1, 2))}


def _share(rng: random.Random) -> dict[str, int]:
    return {VGPU.core: rng.choice((5, 10, 25, 40, 60, 90)), VGPU.memory: rng.choice((1, 20, 60, 120))}


def _memory_only(rng: random.Random) -> dict[str, int]:
    return {VGPU.memory: rng.choice((1, 30, 90))}


def _whole_card(rng: random.Random) -> dict[str, int]:
    return {VGPU.core: 100 * rng.choice((1, 1, 2))}


LIMITS: tuple[Callable[[random.Random], dict[str, int]], ...] = (
    _whole,
    _share,
    _share,
    _share,
    _memory_only,
    _whole_card,
)


def random_pod(rng: random.Random, name: str) -> PodSpec:
    """A pod with one to three containers that ask for GPUs."""
    limits = rng.choice(LIMITS)
    shape = rng.random()
    exits = rng.random() < 0.2

    def container(each: str, *, sidecar: bool = False) -> ContainerSpec:
        return ContainerSpec(each, limits(rng), restartable=sidecar, exits=exits and not sidecar)

    if shape < 0.6:
        return PodSpec(name, (container("main"),))
    if shape < 0.75:
        return PodSpec(name, (container("main"),), init_containers=(container("init"),))
    if shape < 0.85:
        side = container("side", sidecar=True)
        return PodSpec(name, (container("main"),), init_containers=(side,))
    return PodSpec(name, (container("main"), container("second")))
