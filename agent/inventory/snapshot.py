"""The node's GPUs at one moment, and how they are connected: immutable, shared by all readers."""

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.model.gpu import Driver, Gpu, Topology, Wires, count_wires, nvlinks_between, pair_score
from agent.model.health import HEALTHY, Fault, FaultKind, Health
from agent.model.xids import XidClass
from agent.nvml.port import NvmlError, NvmlPort


def boot_seconds() -> float:
    """Seconds since the machine was booted, time asleep included: the clock of verdicts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Reads how the GPUs are connected whenever their set changes; never inside an RPC.

UNKNOWN_LEVEL = -1


class LinkReading:
    """One reading on its way through a worker thread. A link that a GPU does not report counts as none.

    `without` are the UUIDs of GPUs that are not asked.
    """

    def __init__(self, nvml: NvmlPort, gpus: Sequence[Gpu], without: Collection[str] = ()) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._without = frozenset(without)
        self._asked: str | None = None
        self._at = time.monotonic()

    def about(self) -> str | None:
        """The UUID of the GPU that is being asked."""
        return self._asked

    def got_on(self) -> float:
        """When the newest call began, on `time.monotonic()`'s clock."""
        return self._at

    def run(self) -> Topology:
        """Read everything; blocks."""
        wires = [self._wires(gpu) for gpu in self._gpus]
        pairs: dict[tuple[str, str], int] = {}
        for number, one in enumerate(self._gpus):
            for earlier, other in enumerate(self._gpus[:number]):
                links = nvlinks_between(wires[number], one.pci_bus_id, wires[earlier], other.pci_bus_id)
                pairs[one.uuid, other.uuid] = pair_score(self._level(one.uuid, other.uuid), links)
        return Topology.of([gpu.uuid for gpu in self._gpus], pairs)

    def _wires(self, gpu: Gpu) -> Wires:
        if gpu.uuid in self._without:
            return Wires()
        self._at, self._asked = time.monotonic(), gpu.uuid
        try:
            links = self._nvml.links(gpu.uuid)
        except NvmlError:
            return Wires()
        return count_wires((link.peer.value, link.remote_bus_id) for link in links)

    def _level(self, one: str, other: str) -> int:
        if not self._without.isdisjoint((one, other)):
            return UNKNOWN_LEVEL
        self._at, self._asked = time.monotonic(), one
        try:
            return int(self._nvml.ancestor(one, other))
        except NvmlError:
            return UNKNOWN_LEVEL


def pcie_root(sysfs: Path, bus: str) -> str:
    """The root complex above a PCI device, `pci0000:00`; empty where the machine names none. Blocks."""
    try:
        link = sysfs / "bus/pci/devices" / bus
        target = Path(os.path.normpath(link.parent / link.readlink()))
    except OSError:
        return ""
    return next((part for part in target.parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), "")


# The node's GPUs at one moment: immutable, shared by all readers.

NOT_YET = "NVML is not initialised yet"


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU and how it is. A GPU that was seen once stays known, lost or not."""

    gpu: Gpu
    health: Health = HEALTHY
    # Why the node as a whole cannot serve it now (NVML is closed or cannot be used); its own verdict stays.
    blocked: str = ""
    # Instances of which the driver said that something is wrong with them alone, by UUID.
    sick: Mapping[str, Health] = field(default_factory=dict)

    @property
    def uuid(self) -> str:
        return self.gpu.uuid

    @property
    def healthy(self) -> bool:
        """Whether its units may be handed out."""
        return not self.blocked and self.health.offered

    def trouble_of(self, instance: str) -> str:
        """Why an instance may not be handed out, in words; empty: it may."""
        sick = self.sick.get(instance)
        return self.cause or (sick.cause if sick and not sick.offered else "")

    @property
    def cause(self) -> str:
        """Why it is not healthy, in words; empty when it is."""
        if self.healthy:
            return ""
        return self.blocked or self.health.cause


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An enumeration index at which NVML could not describe a GPU."""

    index: int
    cause: str


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The entry of the verdict file for one GPU that is not healthy.

    `listed` False: the verdict is of an earlier boot, and the GPU may not be in the machine any more.
    """

    gpu: Gpu
    health: Health
    listed: bool = True


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An Xid found in the kernel log; `bus` is domain, bus and device: `0000:1b:00`.

    `new` False: nobody knows whether the agent saw it, nor what was done about it since.
    """

    bus: str
    number: int
    new: bool = True
    xid_class: XidClass | None = None  # by the rest of the line, where it decides

    @property
    def fault(self) -> Fault:
        return Fault(FaultKind.XID, self.number, self.xid_class)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inventory. `generation` grows with each change; equal inventories are never published twice."""

    generation: int = 0
    driver: Driver | None = None
    problem: str | None = NOT_YET  # why the node as a whole cannot serve
    gpus: tuple[GpuState, ...] = ()  # in order of index, lost ones behind the present ones
    unreadable: tuple[Unreadable, ...] = ()
    topology: Topology = field(default_factory=Topology)
    # Seconds since boot at which NVML is opened again, while it is released for maintenance.
    released_until: float | None = None
    # Whether it is closed meanwhile: empty: it is; None: not yet; else why it cannot be closed.
    let_go: str | None = None
    # Verdicts of earlier runs on GPUs that were not seen yet, by UUID, and Xids that await their GPU.
    remembered: Mapping[str, HealthRecord] = field(default_factory=dict, repr=False)
    awaiting: tuple[KernelXid, ...] = field(default=(), repr=False)
    by_uuid: dict[str, GpuState] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parents(self) -> Mapping[str, str]:
        """The GPU of each instance, both by UUID."""
        return {each.uuid: state.uuid for state in self.gpus for each in state.gpu.instances}
