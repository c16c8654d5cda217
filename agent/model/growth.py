"""Resources that vGPU containers of a GPU have beyond what their pods asked for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one GPU, all containers together: nobody else is offered it."""

    memory_bytes: int = 0
    cores: int = 0  # percent of the GPU
