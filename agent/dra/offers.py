"""Which GPUs of the node are devices now, and what keeps claims away from them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from agent.dra.slices import RESERVED, UNAVAILABLE, UNHEALTHY, DeviceOffer, names
from agent.inventory.snapshot import GpuState, Snapshot, pcie_root
from agent.kit.tasks import Cell
from agent.kubelet.claim_service import DeviceVerdict
from agent.model.gpu import Driver
from agent.model.modes import SHARES, Assignment, GpuMode, Mode
from agent.model.resource_claim import WORDS, device_name, pool_of
from agent.modes.desired import ClaimRequests
from agent.modes.planner import SwitchState
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
        injection: Cell[Any],
    ) -> None:
        """`reserve`: how many GPUs, the last ones, take no shares. `most_clients`: of one, below MPS' own.

        `injection` is published when the way changes by which containers get GPUs.
        """
        self._node = node
        self._inventory = inventory
        self._assignment = assignment
        self._switch = switch
        self._requests = requests
        self._wings = wings
        self._reserve = reserve
        self._most_clients = most_clients
        self._roots: dict[str, str] = {}  # PCIe root complexes, by bus ID
        self.cells: tuple[Cell[Any], ...] = (inventory, assignment, switch, injection)

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
        groups = snapshot.topology.nvlink_groups()
        last = sorted(staying, key=lambda each: each.gpu.index)[max(0, len(staying) - self._reserve) :]
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
        found: dict[Mode, tuple[tuple[str, str], ...]] = {}
        for each in self._requests.modes:
            taints = []
            if not state.healthy:
                taints.append((UNHEALTHY, "blocked" if state.blocked else state.health.state.value))
            if not mode.claimable:
                taints.append((UNAVAILABLE, word_of(mode.reason)))
            elif self._obstacle(state, each):
                taints.append((UNAVAILABLE, "impossible"))
            elif mode.reason and each is SHARES:
                taints.append((UNAVAILABLE, "failed"))
            if reserved and each is SHARES:
                taints.append((RESERVED, "whole"))
            found[each] = tuple(taints)
        return found

    def _obstacle(self, state: GpuState, mode: Mode) -> str:
        """Why no claim can have a device, in words; empty: one can."""
        wing = self._wings[mode]
        return wing.obstacle(state) or wing.unclaimable()

    def remarks(self) -> list[str]:
        """Devices that no claim can have."""
        found = {
            (mode, why): None
            for offer in self.now()
            for mode in offer.modes
            if (why := self._obstacle(self._inventory.value.by_uuid[offer.gpu.uuid], mode))
        }
        return [f"no claim gets a GPU as {WORDS[mode]}: {why}" for mode, why in found]

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
