"""The wing of pGPU: whole GPUs, or time slices of them. Nothing runs for it."""

from collections.abc import Sequence
from typing import ClassVar, Self

from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.wire import Allocation, Refused, ResourcePlugin
from agent.lists.single import SingleResource
from agent.model.holding import Holder
from agent.model.modes import (
    REPLICA,
    SEPARATOR,
    WHOLE,
    Assignment,
    BadDeviceId,
    DeviceId,
    GpuMode,
    Mode,
    parse,
)
from agent.model.placement import choose
from agent.model.resource_claim import ClaimedShare
from agent.modes.wing import Node, NotYet, Wing

# pGPU: whole GPUs as `nvidia.com/gpu`, one device ID for each, the GPU's UUID.
#
# A GPU may be time-sliced instead: it is then listed as N replicas, here or as `nvidia.com/gpu.shared`.

RESOURCE, SHARED_RESOURCE = Mode.PGPU.resources


class PgpuPlugin(SingleResource):
    """Advertises whole GPUs, their replicas or both, and hands them out by UUID."""

    def __init__(
        self,
        inventory: Cell[Snapshot],
        modes: Cell[Assignment],
        record: HoldingsWatch,
        injector: Injector,
        *,
        resource: str = RESOURCE,
        whole: bool = True,
        replicas: bool = True,
        refuse_more_than_one: bool = False,
    ) -> None:
        super().__init__(resource, inventory, modes, record)
        self._injector = injector
        self._whole = whole
        self._replicas = replicas
        self._refuse_more_than_one = refuse_more_than_one
        self.lists = Cell(self._encoded(modes.value))

    def _chosen(self, free: Sequence[str], chosen: Sequence[str], size: int) -> Sequence[str]:
        """Whole GPUs: the best connected set (`agent.model.placement`); replicas: the least shared GPUs."""
        if not any(SEPARATOR in text for text in (*free, *chosen)):
            return choose(self._inventory.value.topology, [*chosen, *free], chosen, size)
        picked, left = list(chosen), list(free)
        order = {state.uuid: state.gpu.index for state in self._inventory.value.gpus}
        load: dict[str, int] = {}
        for text in left:
            load[_gpu(text)] = load.get(_gpu(text), 0) - 1  # fewer free replicas: more shared
        while len(picked) < size and left:
            best = min(left, key=lambda text: (load[_gpu(text)], order.get(_gpu(text), 1 << 30), text))
            left.remove(best)
            picked.append(best)
            load[_gpu(best)] += 1
        return picked[:size]

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        for device_id in ids:
            self._sold(device_id)
        if self._refuse_more_than_one and len(ids) > 1 and any(parse(one).unit is REPLICA for one in ids):
            raise Refused(
                f"{len(ids)} time slices of {self.resource} were asked for, and more give no more of a GPU: "
                "ask for 1 (timeSlicing.refuseMoreThanOne is on)"
            )
        return await super().allocate(ids)

    def _given(self, ids: Sequence[str]) -> Allocation:
        by_uuid = self._inventory.value.by_uuid
        return self._injector.allocation([by_uuid[uuid].gpu for uuid in dict.fromkeys(map(_gpu, ids))])

    def _sold(self, device_id: str) -> None:
        try:
            parsed = parse(device_id)
        except BadDeviceId as error:
            raise Refused(f"{error}; {self.resource} is asked for by GPU UUID") from error
        if parsed.unit not in (WHOLE, REPLICA):
            raise Refused(f"device ID {device_id} belongs to another resource than {self.resource}")
        state = self._inventory.value.by_uuid.get(parsed.gpu)
        if state is None:
            raise Refused(
                f"device ID {device_id} names no GPU of this node; the kubelet's list is out of date"
            )
        # A GPU that closes still honours what the kubelet was admitting when its list changed.
        mode = self._modes.value.of(state.uuid)
        if device_id not in self._ids(state, mode):
            why = mode.reason or f"it is in mode {mode.mode.value}"
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is not offered as {self.resource} now: {why}"
            )
        if not state.healthy:
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is unhealthy: {state.cause}; "
                "it is handed out again when it has recovered"
            )

    def _ids(self, state: GpuState, mode: GpuMode) -> list[str]:
        if mode.plugin_mode is not Mode.PGPU:
            return []
        if mode.replicas == 1:
            return [state.uuid] if self._whole else []
        count = mode.replicas if self._replicas else 0
        return [str(DeviceId(state.uuid, REPLICA, number)) for number in range(count)]


def _gpu(device_id: str) -> str:
    return device_id.partition(SEPARATOR)[0]


class WholeWing(Wing):
    mode: ClassVar[Mode] = Mode.PGPU

    def __init__(self, plugins: Sequence[PgpuPlugin], injector: Injector) -> None:
        self._plugins = plugins
        self._injector = injector

    @classmethod
    async def build(cls, node: Node) -> Self:
        slicing = node.settings.time_slicing
        resources = [(RESOURCE, True, not slicing.rename)]
        if slicing.rename:
            resources.append((SHARED_RESOURCE, False, True))
        return cls(
            [
                PgpuPlugin(
                    node.snapshot,
                    node.assignment,
                    node.holdings,
                    node.injector,
                    resource=resource,
                    whole=whole,
                    replicas=replicas,
                    refuse_more_than_one=slicing.refuse_more_than_one,
                )
                for resource, whole, replicas in resources
            ],
            node.injector,
        )

    def plugins(self) -> Sequence[ResourcePlugin]:
        """`nvidia.com/gpu`, and where slices are renamed a resource of their own for them."""
        return self._plugins

    def unclaimable(self) -> str:
        return self._injector.claim_problem

    def claimed(
        self,
        share: ClaimedShare,
        holders: Sequence[Holder],  # noqa: ARG002
        *,
        owned: bool,  # noqa: ARG002
    ) -> Sequence[str]:
        if why := self.unclaimable():
            raise NotYet(why)
        return (self._injector.claim_device(share.gpu),)
