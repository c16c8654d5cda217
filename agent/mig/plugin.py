"""Instances of GPUs in MIG mode, by the resource names of NVIDIA's plugin; the ID is the instance's UUID."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from time import monotonic
from types import MappingProxyType

from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, repeat
from agent.kubelet.wire import Allocation, Refused
from agent.lists.single import SingleResource
from agent.model.gpu import Instance
from agent.model.modes import Assignment, GpuMode, Mode

# How long one that was destroyed stays listed, as Unhealthy: an ID that leaves the list while the kubelet is
# allocating it crashes kubelet 1.36. One that is held stays until its holder has ended.
LINGER_SECONDS = 10.0


def resource_of(profile: str) -> str:
    """`nvidia.com/mig-1g.18gb.me` of profile `1g.18gb+me`, as NVIDIA's plugin has it."""
    return f"{Mode.MIG.row.prefix}{profile.replace('+', '.')}"


class MigPlugin(SingleResource):
    def __init__(
        self,
        resource: str,
        inventory: Cell[Snapshot],
        modes: Cell[Assignment],
        record: HoldingsWatch,
        injector: Injector,
        *,
        of_all: Callable[[], Collection[str]] | None = None,
        leaving: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`of_all`: the resource is for all profiles, as long as no layout names some.

        `leaving`: why an instance is handed out no more, in words, by its UUID.
        """
        super().__init__(resource, inventory, modes, record)
        self._injector = injector
        self._of_all = of_all
        self._leaving = leaving
        self._seen: dict[str, tuple[str, float]] = {}  # GPU of each ID; since when it is gone, or inf
        self.lists = Cell(self._encoded(modes.value))

    async def run(self) -> None:
        await repeat(self._round, self._inventory, self._modes, self._record.cell, self._injector.named)

    async def _round(self) -> float | None:
        self.refresh()
        return LINGER_SECONDS if any(map(self._lingers, self._seen)) else None

    def _ids(self, state: GpuState, mode: GpuMode) -> Sequence[str]:
        now, there = monotonic(), [each.uuid for each in state.gpu.instances if self._sells(each)]
        if mode.mode is Mode.MIG:
            self._seen |= dict.fromkeys(there, (state.uuid, inf))
        else:  # those that are there have left with the mode; one that was destroyed lingers in any
            self._seen = {uuid: seen for uuid, seen in self._seen.items() if uuid not in there}
            there = []
        gone = [uuid for uuid, (gpu, _) in self._seen.items() if gpu == state.uuid and uuid not in there]
        for uuid in gone:
            self._seen[uuid] = state.uuid, (since := min(self._seen[uuid][1], now))
            if now - since > LINGER_SECONDS and uuid not in self._held():
                del self._seen[uuid]
        return [*there, *(uuid for uuid in gone if uuid in self._seen)]

    def _lingers(self, device_id: str) -> bool:
        return self._seen.get(device_id, ("", inf))[1] < inf

    def _sells(self, instance: Instance) -> bool:
        if self._of_all is None:
            return resource_of(instance.profile) == self.resource
        wanted = self._of_all()
        return not wanted or instance.profile in wanted

    def _healthy(self, state: GpuState, device_id: str) -> bool:
        return not self._trouble(state, device_id)

    def _chosen(self, free: Sequence[str], chosen: Sequence[str], size: int) -> Sequence[str]:
        """Those of GPUs with the fewest free ones: GPUs without a holder stay so as long as possible."""
        parents = self._inventory.value.parents
        order = {state.uuid: number for number, state in enumerate(self._inventory.value.gpus)}
        left = [parents.get(text, "") for text in free]

        def rank(text: str) -> tuple[int, int]:
            gpu = parents.get(text, "")
            return left.count(gpu), order.get(gpu, len(order))

        return [*chosen, *sorted(free, key=rank)][:size]

    def _sold(self, device_id: str) -> None:
        snapshot = self._inventory.value
        state = snapshot.by_uuid.get(snapshot.parents.get(device_id, ""))
        if state is None:
            raise Refused(
                f"device ID {device_id[:80]} names no instance of this node: it was destroyed, or the "
                f"kubelet's list is out of date; {self.resource} is asked for by the UUID of a MIG instance"
            )
        mode = self._modes.value.of(state.uuid)
        where = f"instance {device_id} of GPU {state.uuid} (index {state.gpu.index})"
        if device_id not in self._ids(state, mode):
            raise Refused(
                f"{where} is not offered as {self.resource} now: {mode.reason or 'it has another profile'}"
            )
        if trouble := self._trouble(state, device_id):
            raise Refused(f"{where} is unhealthy: {trouble}; it is handed out again when it has recovered")

    def _given(self, ids: Sequence[str]) -> Allocation:
        found = [
            (state.gpu, each)
            for state in self._inventory.value.gpus
            for each in state.gpu.instances
            if each.uuid in ids
        ]
        return self._injector.instances(found)

    def _trouble(self, state: GpuState, instance: str) -> str:
        # The driver may give one of another profile, made in its place, the same UUID.
        if not any(each.uuid == instance and self._sells(each) for each in state.gpu.instances):
            return "the driver lists it no more"
        if leaving := self._leaving.get(instance):
            return leaving
        return state.trouble_of(instance) or self._injector.lacks_device(instance)
