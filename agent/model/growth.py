"""Resources that vGPU containers have beyond what their pods asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[str, str, str, str]  # namespace, pod, container, GPU (UUID)


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one container, or of all of a GPU together: nobody else is offered it."""

    memory_bytes: int = 0
    cores: int = 0  # percent of the GPU


def by_gpu(grown: Mapping[Place, Growth]) -> dict[str, Growth]:
    """By GPU (UUID), of containers by namespace, pod, name and GPU."""
    found: dict[str, Growth] = {}
    for (_, _, _, gpu), growth in grown.items():
        before = found.get(gpu, Growth())
        found[gpu] = Growth(before.memory_bytes + growth.memory_bytes, before.cores + growth.cores)
    return found
