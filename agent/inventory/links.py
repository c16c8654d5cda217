"""Reads how the GPUs are connected whenever their set changes; never inside an RPC."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from agent.model.gpu import Gpu
from agent.model.topology import Topology, Wires, count_wires, nvlinks_between, pair_score
from agent.nvml.nvml_errors import NvmlError
from agent.nvml.port import NvmlPort

UNKNOWN_LEVEL = -1


class LinkReading:
    """One reading on its way through a worker thread. A link that a GPU does not report counts as none."""

    def __init__(self, nvml: NvmlPort, gpus: Sequence[Gpu]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._at = time.monotonic()

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
        self._at = time.monotonic()
        try:
            links = self._nvml.links(gpu.uuid)
        except NvmlError:
            return Wires()
        return count_wires((link.peer.value, link.remote_bus_id) for link in links)

    def _level(self, one: str, other: str) -> int:
        self._at = time.monotonic()
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
