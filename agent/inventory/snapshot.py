"""What the agent knows of the node's GPUs at one moment: immutable, shared by all readers."""

from dataclasses import dataclass, field

from agent.model.gpu import Driver, Gpu


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU and how it is. A GPU that was seen once stays known, lost or not."""

    gpu: Gpu
    healthy: bool = True
    cause: str = ""  # in words, empty when healthy

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An enumeration index at which NVML could not describe a GPU."""

    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inventory. `generation` grows with each change; equal inventories are never published twice."""

    generation: int = 0
    driver: Driver | None = None
    problem: str | None = "NVML is not initialised yet"  # why the node as a whole cannot serve
    gpus: tuple[GpuState, ...] = ()  # in order of index
    unreadable: tuple[Unreadable, ...] = ()
    by_uuid: dict[str, GpuState] = field(default_factory=dict, compare=False, repr=False)
