"""The request for a container that is admitted, and its limits: plain values."""

from dataclasses import dataclass
from enum import Enum

from agent.model.mount import Mount
from agent.vgpu.folders import About


class Policy(Enum):
    """Levels of enforcement of memory; each includes the ones before it."""

    OFF = "off"
    REPORT = "report"  # containers that use more than their cap are reported
    LIBRARY = "library"  # the enforcement library refuses allocations, where it can be shown
    STRICT = "strict"  # no container starts without it, and what it does not know is refused

    @property
    def enforces(self) -> bool:
        """Whether containers are held to their cap, and not only measured."""
        return self in (Policy.LIBRARY, Policy.STRICT)


@dataclass(frozen=True, slots=True)
class Admission:
    """The enforcement of a container that starts now; none where both are empty."""

    mounts: tuple[Mount, ...] = ()
    driver: bool = False  # whether the driver is to be given the limit


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a running container.

    `injected` None: no process of it was seen on the GPU yet. `limited`: what the driver says of a container
    that it is to hold to its cap; None: it was not asked yet.
    """

    about: About
    memory_bytes: int
    injected: bool | None = None
    limited: bool | None = None
