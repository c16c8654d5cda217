"""pGPU: whole GPUs as `nvidia.com/gpu`, one device ID for each, the GPU's UUID."""

from collections.abc import Sequence

import anyio

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.cell import Cell
from agent.kubelet.api import Allocation, PreferenceRequest, Refused
from agent.model.ids import BadDeviceId, Unit, parse
from agent.model.modes import Assignment, Mode
from agent.plugins import encode
from agent.plugins.inject import Injector

RESOURCE = "nvidia.com/gpu"


class PgpuPlugin:
    """Advertises the whole GPUs of the inventory and hands them out."""

    resource = RESOURCE
    offers_preference = True
    needs_pre_start = False

    def __init__(self, inventory: Cell[Snapshot], modes: Cell[Assignment], injector: Injector) -> None:
        self._inventory = inventory
        self._modes = modes
        self._injector = injector
        self.lists: Cell[bytes] = Cell(self._encoded())

    async def run(self) -> None:
        """Keep the list true: one publication for each change that the kubelet would notice."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow, self._inventory)
            group.start_soon(self._follow, self._modes)

    async def _follow(self, source: Cell[Snapshot] | Cell[Assignment]) -> None:
        async for _ in source.values():
            encoded = self._encoded()
            if encoded != self.lists.value:
                self.lists.publish(encoded)

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """The must-include IDs, then the lowest indices."""
        order = {state.uuid: state.gpu.index for state in self._inventory.value.gpus}
        free = sorted(
            set(request.available) - set(request.must_include), key=lambda uuid: order.get(uuid, 1 << 30)
        )
        return [*request.must_include, *free][: request.size]

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """Hand out GPUs by UUID. Refuses unknown, foreign and unhealthy ones; nothing changes then."""
        return self._injector.allocation([self._sold(device_id).gpu for device_id in dict.fromkeys(ids)])

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Nothing to do: not asked for."""

    def _sold(self, device_id: str) -> GpuState:
        try:
            parsed = parse(device_id)
        except BadDeviceId as error:
            raise Refused(f"{error}; {RESOURCE} is asked for by GPU UUID") from error
        if parsed.unit is not Unit.WHOLE:
            raise Refused(f"device ID {device_id} belongs to another resource than {RESOURCE}")
        state = self._inventory.value.by_uuid.get(parsed.gpu)
        if state is None:
            raise Refused(
                f"device ID {device_id} names no GPU of this node; the kubelet's list is out of date"
            )
        mode = self._modes.value.of(state.uuid)
        if mode.mode is not Mode.PGPU or not mode.selling:
            why = mode.reason or f"it is in mode {mode.mode.value}"
            raise Refused(f"GPU {state.uuid} (index {state.gpu.index}) is not sold as {RESOURCE}: {why}")
        if not state.healthy:
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is unhealthy: {state.cause}; "
                "it is handed out again when it has recovered"
            )
        return state

    def _encoded(self) -> bytes:
        return b"".join(
            encode.device(state.uuid, state.healthy, state.gpu.numa_node)
            for state in self._inventory.value.gpus
            if self._modes.value.sold_as(state.uuid, Mode.PGPU)
        )
