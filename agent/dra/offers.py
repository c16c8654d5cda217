"""Which GPUs of the node are devices now, and what keeps claims away from them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from agent.dra.slices import (
    RESERVED,
    UNAVAILABLE,
    UNHEALTHY,
    DeviceOffer,
    names,
    nvlink_groups,
)
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.cell import Cell
from agent.kubelet.claim_service import DeviceVerdict
from agent.model.claim_device import device_name, pool_of
from agent.model.gpu import Driver
from agent.model.modes import SHARES, Assignment, GpuMode, Mode
from agent.modes.claims import ClaimRequests
from agent.modes.switch_state import SwitchState
from agent.modes.wing import Wing

Taints = Mapping[Mode, tuple[tuple[str, str], ...]]


class Offers:
    """The devices by the newest snapshot and the modes in force."""

    def __init__(
        self,
        node: str,
        inventory: Cell[Snapshot],
        assignment: Cell[Assignment],
        switch: Cell[SwitchState],
        requests: ClaimRequests,
        wings: Mapping[Mode, Wing],
        reserve: int,
        most_clients: int | None,
    ) -> None:
        """`reserve`: how many GPUs, the last ones, take no shares. `most_clients`: of one, below MPS' own."""
        self._node = node
        self._inventory = inventory
        self._assignment = assignment
        self._switch = switch
        self._requests = requests
        self._wings = wings
        self._reserve = reserve
        self._most_clients = most_clients
        self._roots: dict[str, str] = {}  # PCIe root complexes, by bus ID
        self.cells = (inventory, assignment, switch)

    def is_ours(self, name: str) -> bool:
        """Whether a slice has a name of ours."""
        counters, devices = names(self._node)
        return name == counters or (name.startswith(devices) and name.removeprefix(devices).isdecimal())

    def driver(self) -> Driver | None:
        return self._inventory.value.driver

    async def look(self, sysfs: Path) -> None:
        """Find out where new GPUs are connected."""
        for state in self._inventory.value.gpus:
            bus = state.gpu.pci_bus_id
            if bus not in self._roots:
                self._roots[bus] = await anyio.to_thread.run_sync(pcie_root, sysfs, bus)

    def now(self) -> list[DeviceOffer]:
        """GPUs that are devices, and are to stay that."""
        snapshot, assignment = self._inventory.value, self._assignment.value
        wanted = {each.uuid: each.wanted for each in self._switch.value.gpus}
        staying = [
            state
            for state in snapshot.gpus
            if assignment.of(state.uuid).dra and (state.uuid not in wanted or wanted[state.uuid].dra)
        ]
        groups = nvlink_groups(snapshot.topology, [state.gpu for state in snapshot.gpus])
        last = sorted(staying, key=lambda each: each.gpu.index)[len(staying) - self._reserve :]
        reserved = {state.uuid for state in last} if self._reserve else set()
        return [
            DeviceOffer(
                state.gpu,
                self._requests.modes,
                self._clients(state),
                self._roots.get(state.gpu.pci_bus_id, ""),
                groups.get(state.uuid),
                self._taints(state, assignment.of(state.uuid), reserved=state.uuid in reserved),
            )
            for state in staying
        ]

    def _clients(self, state: GpuState) -> int:
        ceiling = SHARES.row.client_ceiling
        most = ceiling(state.gpu, self._inventory.value.driver) if ceiling else 0
        return min(most, self._most_clients or most)

    def sizes(self, uuid: str) -> tuple[int, int]:
        """GiB that shares of a GPU may have together, and how many there may be."""
        state, pair = self._inventory.value.by_uuid.get(uuid), SHARES.row.pair
        return (pair.blocks(state.gpu.memory_bytes), self._clients(state)) if state and pair else (0, 0)

    def _taints(self, state: GpuState, mode: GpuMode, *, reserved: bool) -> Taints:
        everywhere = []
        if not state.healthy:
            everywhere.append((UNHEALTHY, state.health.state.value))
        if not mode.claimable:
            everywhere.append((UNAVAILABLE, word_of(mode.reason)))
        shares = list(everywhere)
        if mode.claimable and (mode.reason or self._obstacle(state)):
            shares.append((UNAVAILABLE, "failed" if mode.reason else "impossible"))
        if reserved:
            shares.append((RESERVED, "whole"))
        return {each: tuple(shares if each is SHARES else everywhere) for each in self._requests.modes}

    def _obstacle(self, state: GpuState) -> str:
        wing = self._wings.get(SHARES)
        return wing.obstacle(state) if wing else ""

    def verdicts(self) -> list[DeviceVerdict]:
        """The health of each device, for statuses of pods."""
        pool = pool_of(self._node)
        return [
            DeviceVerdict(pool, device_name(state.uuid, mode), state.healthy, state.cause)
            for state in self._inventory.value.gpus
            for mode in self._requests.modes
        ]


def word_of(reason: str) -> str:
    """The value of a taint for a reason in words: its first one, or none that says anything."""
    word = re.match(r"[A-Za-z]{2,30}", reason)
    return word[0].lower() if word and word[0].lower() not in ("the", "it", "gpu") else "closed"


def pcie_root(sysfs: Path, bus: str) -> str:
    """The root complex above a PCI device, `pci0000:00`; empty where the machine names none. Blocks."""
    try:
        link = sysfs / "bus/pci/devices" / bus
        target = Path(os.path.normpath(link.parent / link.readlink()))
    except OSError:
        return ""
    return next((part for part in target.parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), "")
