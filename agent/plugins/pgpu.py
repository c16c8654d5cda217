"""pGPU: whole GPUs as `nvidia.com/gpu`, one device ID for each, the GPU's UUID.

A GPU may be time-sliced instead: it is then listed as N replicas, here or as `nvidia.com/gpu.shared`.
"""

from collections.abc import Callable, Iterator, Sequence

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.cell import Cell
from agent.kubelet.api import Allocation, PreferenceRequest, Refused
from agent.kubelet.podresources import PodList
from agent.model.ids import SEPARATOR, BadDeviceId, DeviceId, Unit, parse
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.preference import choose
from agent.plugins import encode
from agent.plugins.follow import follow
from agent.plugins.inject import Injector

RESOURCE = "nvidia.com/gpu"
SHARED_RESOURCE = "nvidia.com/gpu.shared"

# Chooses IDs of whole GPUs: (available, must include, size) -> chosen.
WholeChooser = Callable[[Sequence[str], Sequence[str], int], Sequence[str]]


class PgpuPlugin:
    """Advertises whole GPUs, their replicas or both, and hands them out."""

    offers_preference = True
    needs_pre_start = False

    def __init__(
        self,
        inventory: Cell[Snapshot],
        modes: Cell[Assignment],
        holdings: Cell[PodList | None],
        injector: Injector,
        *,
        resource: str = RESOURCE,
        whole: bool = True,
        replicas: bool = True,
        refuse_more_than_one: bool = False,
    ) -> None:
        self.resource = resource
        self._inventory = inventory
        self._modes = modes
        self._holdings = holdings
        self._injector = injector
        self._whole = whole
        self._replicas = replicas
        self._refuse_more_than_one = refuse_more_than_one
        self.lists: Cell[bytes] = Cell(self._encoded(modes.value))

    async def run(self) -> None:
        """Keep the list true: one publication for each change that the kubelet would notice."""
        await follow(self.refresh, self._inventory, self._modes, self._holdings)

    def refresh(self) -> None:
        """Bring the list up to date now."""
        encoded = self._encoded(self._modes.value)
        if encoded != self.lists.value:
            self.lists.publish(encoded)

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        """Capacity and allocatable as the kubelet will count them under an assignment."""
        devices = list(self._devices(assignment))
        return len(devices), sum(healthy for _, healthy, _ in devices)

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """Whole GPUs: the best connected set (`agent.model.preference`); replicas: the least shared GPUs."""
        if not any(SEPARATOR in text for text in (*request.available, *request.must_include)):
            topology = self._inventory.value.topology
            return choose(topology, request.available, request.must_include, request.size)
        order = {state.uuid: state.gpu.index for state in self._inventory.value.gpus}
        chosen = list(request.must_include)
        free = [text for text in request.available if text not in set(chosen)]
        load: dict[str, int] = {}
        for text in free:
            load[_gpu(text)] = load.get(_gpu(text), 0) - 1  # fewer free replicas: more shared
        while len(chosen) < request.size and free:
            best = min(free, key=lambda text: (load[_gpu(text)], order.get(_gpu(text), 1 << 30), text))
            free.remove(best)
            chosen.append(best)
            load[_gpu(best)] += 1
        return chosen[: request.size]

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """Hand out GPUs by UUID. Refuses unknown, foreign and unhealthy ones; nothing changes then."""
        states = [self._sold(device_id) for device_id in dict.fromkeys(ids)]
        if (
            self._refuse_more_than_one
            and len(ids) > 1
            and any(parse(one).unit is Unit.REPLICA for one in ids)
        ):
            raise Refused(
                f"{len(ids)} time slices of {self.resource} were asked for, and more give no more of a GPU: "
                "ask for 1 (timeSlicing.refuseMoreThanOne is on)"
            )
        return self._injector.allocation(list(dict.fromkeys(state.gpu for state in states)))

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Nothing to do: not asked for."""

    def _sold(self, device_id: str) -> GpuState:
        try:
            parsed = parse(device_id)
        except BadDeviceId as error:
            raise Refused(f"{error}; {self.resource} is asked for by GPU UUID") from error
        if parsed.unit not in (Unit.WHOLE, Unit.REPLICA):
            raise Refused(f"device ID {device_id} belongs to another resource than {self.resource}")
        state = self._inventory.value.by_uuid.get(parsed.gpu)
        if state is None:
            raise Refused(
                f"device ID {device_id} names no GPU of this node; the kubelet's list is out of date"
            )
        # A GPU that drains still honours what the kubelet was admitting when its list changed.
        mode = self._modes.value.of(state.uuid)
        if device_id not in self._ids(state, mode):
            why = mode.reason or f"it is in mode {mode.mode.value}"
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is not sold as {self.resource} now: {why}"
            )
        if not state.healthy:
            raise Refused(
                f"GPU {state.uuid} (index {state.gpu.index}) is unhealthy: {state.cause}; "
                "it is handed out again when it has recovered"
            )
        return state

    def _ids(self, state: GpuState, mode: GpuMode) -> list[str]:
        """The IDs that a GPU has in this resource, sold at the moment or not."""
        if mode.mode is not Mode.PGPU:
            return []
        if mode.replicas == 1:
            return [state.uuid] if self._whole else []
        count = mode.replicas if self._replicas else 0
        return [str(DeviceId(state.uuid, Unit.REPLICA, number)) for number in range(count)]

    def _devices(self, assignment: Assignment) -> Iterator[tuple[str, bool, int | None]]:
        held = self._held()
        for state in self._inventory.value.gpus:
            mode = assignment.of(state.uuid)
            for text in self._ids(state, mode):
                if mode.selling:
                    yield text, state.healthy, state.gpu.numa_node
                elif mode.leaving or text in held:
                    yield text, False, state.gpu.numa_node

    def _held(self) -> frozenset[str]:
        pods = self._holdings.value
        if pods is None:
            return frozenset()
        return frozenset(
            text for holding in pods.holdings if holding.resource == self.resource for text in holding.ids
        )

    def _encoded(self, assignment: Assignment) -> bytes:
        return b"".join(encode.device(*device) for device in self._devices(assignment))


def _gpu(device_id: str) -> str:
    return device_id.partition("::")[0]
