"""A resource as the kubelet sees it, in the agent's own frozen types: wire messages stay behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from agent.kit.cell import Cell
from agent.model.modes import Assignment
from agent.model.mount import Mount


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node of the host shown in the container; `permissions` out of r, w and m."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer for a container's device IDs of one resource."""

    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()  # qualified names, vendor/class=device


def joined(*parts: Allocation) -> Allocation:
    """The parts together; where several set a variable or an annotation, the last one counts."""
    return Allocation(
        environment={name: value for part in parts for name, value in part.environment.items()},
        mounts=tuple(each for part in parts for each in part.mounts),
        device_nodes=tuple(each for part in parts for each in part.device_nodes),
        annotations={name: value for part in parts for name, value in part.annotations.items()},
        cdi_devices=tuple(each for part in parts for each in part.cdi_devices),
    )


@dataclass(frozen=True, slots=True)
class PreferenceRequest:
    """The kubelet asks which `size` of the `available` IDs a container should get; advice, not law."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


class Reason(Enum):
    """Why a request is refused; the value is the gRPC status of the answer."""

    INVALID = "INVALID_ARGUMENT"  # asking again will not help
    EXHAUSTED = "RESOURCE_EXHAUSTED"  # no GPU has room
    UNAVAILABLE = "UNAVAILABLE"  # a part of the agent or the node is not ready
    LATE = "DEADLINE_EXCEEDED"


class Refused(Exception):
    """A request that is not granted. The text reaches the pod's status: it names object, cause and remedy."""

    def __init__(self, message: str, reason: Reason = Reason.INVALID) -> None:
        self.reason = reason
        super().__init__(message)


class ResourcePlugin(Protocol):
    """One resource as it is advertised and handed out."""

    resource: str  # "nvidia.com/gpu"
    offers_preference: bool
    needs_pre_start: bool
    # The newest ListAndWatchResponse, encoded. Every publication goes to the kubelet as it is.
    lists: Cell[bytes]

    async def run(self) -> None:
        """Keep `lists` true, for ever."""

    def refresh(self) -> None:
        """Bring `lists` up to date now, rather than when the plugin's own task gets its turn."""

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        """Capacity and allocatable, as the kubelet would count them, if `assignment` were in force."""

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """Choose IDs; raises Refused. Blocks every pod of the node while it runs."""

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """Hand IDs to a container; raises Refused. Blocks every pod of the node while it runs."""

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Last act before a container starts; raises Refused. The kubelet gives it 30 s and tries again."""
