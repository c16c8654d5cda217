"""Containers with limits that never were."""

from agent.vgpu.folders import About

GIB = 1 << 30
BLOCK = 256 << 20
GPU = "GPU-11111111-2222-3333-4444-555555555555"


def units(first: int = 0, count: int = 4, gpu: str = GPU) -> tuple[str, ...]:
    """Memory units of a GPU."""
    return tuple(f"{gpu}::m{number}" for number in range(first, first + count))


def about(pod: str, first: int = 0, count: int = 4, cores: int = 0, build: str = "") -> About:
    """A container of a pod, with units from `first` on."""
    ids = units(first, count)
    return About(f"uid-{pod}", "default", pod, "main", GPU, ids, count * BLOCK, cores, "library", build)
