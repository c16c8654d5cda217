"""pGPU: whole GPUs as `nvidia.com/gpu`, one device ID for each, the GPU's UUID."""

from collections.abc import Sequence

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.cell import Cell
from agent.kubelet.api import Allocation, PreferenceRequest, Refused
from agent.model.ids import BadDeviceId, Unit, parse
from agent.plugins import encode
from agent.plugins.inject import Injector

RESOURCE = "nvidia.com/gpu"


class PgpuPlugin:
    """Advertises the whole GPUs of the inventory and hands them out."""

    resource = RESOURCE
    offers_preference = True
    needs_pre_start = False

    def __init__(self, inventory: Cell[Snapshot], injector: Injector, enabled: bool) -> None:
        self._inventory = inventory
        self._injector = injector
        self._enabled = enabled
        self.lists: Cell[bytes] = Cell(self._encoded(inventory.value))

    async def run(self) -> None:
        """Keep the list true: one publication for each change that the kubelet would notice."""
        async for snapshot in self._inventory.values():
            encoded = self._encoded(snapshot)
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
        if not self._sells(state):
            raise Refused(f"GPU {state.uuid} (index {state.gpu.index}) is not sold as {RESOURCE} now")
        if not state.healthy:
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is unhealthy: {state.cause}; "
                "it is handed out again when it has recovered"
            )
        return state

    def _sells(self, state: GpuState) -> bool:
        return self._enabled and not state.gpu.mig_enabled

    def _encoded(self, snapshot: Snapshot) -> bytes:
        return b"".join(
            encode.device(state.uuid, state.healthy, state.gpu.numa_node)
            for state in snapshot.gpus
            if self._sells(state)
        )
