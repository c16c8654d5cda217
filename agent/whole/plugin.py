"""pGPU: whole GPUs as `nvidia.com/gpu`, one device ID for each, the GPU's UUID.

A GPU may be time-sliced instead: it is then listed as N replicas, here or as `nvidia.com/gpu.shared`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from time import monotonic

import structlog

from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import follow
from agent.kubelet.plugin_types import Allocation, PreferenceRequest, Reason, Refused
from agent.kubelet.podresources import PATIENCE_SECONDS, PodResourcesUnavailable
from agent.lists import encode
from agent.model.holding import Holding, Record
from agent.model.ids import SEPARATOR, BadDeviceId, DeviceId, parse
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.preference import choose
from agent.model.units import REPLICA, WHOLE

log = structlog.get_logger()

RESOURCE, SHARED_RESOURCE = Mode.PGPU.resources


class PgpuPlugin:
    """Advertises whole GPUs, their replicas or both, and hands them out."""

    offers_preference = True
    needs_pre_start = False

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
        self.resource = resource
        self._inventory = inventory
        self._modes = modes
        self._record = record
        self._known = Record((), ())  # as read last: while nobody can read it the lists stay as they are
        # Handed out, by the monotonic clock, and not shown by any later reading of the record.
        self._granted: dict[str, float] = {}
        self._injector = injector
        self._whole = whole
        self._replicas = replicas
        self._refuse_more_than_one = refuse_more_than_one
        self.lists: Cell[bytes] = Cell(self._encoded(modes.value))

    async def run(self) -> None:
        await follow(self.refresh, self._inventory, self._modes, self._record.cell)

    def refresh(self) -> None:
        encoded = self._encoded(self._modes.value)
        if encoded != self.lists.value:
            self.lists.publish(encoded)

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        devices = list(self._devices(assignment))
        return len(devices), sum(healthy for _, healthy, _ in devices)

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """Whole GPUs: the best connected set (`agent.model.preference`); replicas: the least shared GPUs.

        Never IDs that somebody holds, though the kubelet offers some at times: a List during an Allocate has
        it forget what is in flight (kubernetes PR 137534). Raises Refused when too few are left.
        """
        chosen = list(dict.fromkeys(request.must_include))
        offered = set(request.available).difference(chosen)
        taken, _ = await self._taken(offered)
        free = [text for text in dict.fromkeys(request.available) if text in offered and text not in taken]
        if taken and len(chosen) + len(free) < request.size:
            taken = await self._confirmed(taken)
            free = [text for text in dict.fromkeys(request.available) if text in offered.difference(taken)]
            if len(chosen) + len(free) < request.size:
                raise self._held_already(taken)
        if not any(SEPARATOR in text for text in (*free, *chosen)):
            topology = self._inventory.value.topology
            return choose(topology, [*chosen, *free], chosen, request.size)
        order = {state.uuid: state.gpu.index for state in self._inventory.value.gpus}
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
        if len(set(ids)) < len(ids):
            raise Refused(f"the same device ID of {self.resource} stands twice among those asked for")
        for device_id in ids:
            self._sold(device_id)
        if self._refuse_more_than_one and len(ids) > 1 and any(parse(one).unit is REPLICA for one in ids):
            raise Refused(
                f"{len(ids)} time slices of {self.resource} were asked for, and more give no more of a GPU: "
                "ask for 1 (timeSlicing.refuseMoreThanOne is on)"
            )
        taken, record = await self._taken(ids)
        refused = {text: held for text, held in taken.items() if not self._inherited(held, record)}
        if refused and (confirmed := await self._confirmed(refused)):
            raise self._held_already(confirmed)
        # Once more: while the kubelet was asked a GPU may have changed its mode or fallen ill.
        gpus = dict.fromkeys(self._sold(device_id).gpu for device_id in ids)
        self._granted |= dict.fromkeys(ids, monotonic())
        return self._injector.allocation(list(gpus))

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Nothing to do: not asked for."""

    async def _taken(self, ids: Collection[str]) -> tuple[Mapping[str, Holding], Record]:
        """Those of `ids` that somebody holds, and the record that says so. Raises Refused.

        A reading is made only for IDs whose last holder is not known to have ended: those that the record at
        hand shows as held, and those that were handed out and that no record has shown since.
        """
        if not (self._held() | self._granted.keys()).intersection(ids):
            return {}, self._known
        try:
            record = self._known = await self._record.look(PATIENCE_SECONDS)
        except PodResourcesUnavailable as error:
            text = f"whether GPUs of {self.resource} are still held is not known: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        # What the kubelet does not show by now was refused elsewhere, or its holder has ended.
        self._granted = {text: when for text, when in self._granted.items() if when >= record.began}
        return self._holders(ids, record), record

    async def _confirmed(self, taken: Mapping[str, Holding]) -> Mapping[str, Holding]:
        """Those of `taken` that are still held when the API server was asked for their holders."""
        record = await self._record.confirm(tuple(taken.values()))
        if record.began >= self._known.began:
            self._known = record
        return self._holders(taken, record)

    def _holders(self, ids: Collection[str], record: Record) -> Mapping[str, Holding]:
        # Of a pod that nobody can name only the checkpoint speaks, which is older than the kubelet's offer.
        named = [held for held in record.holdings if held.namespace and held.resource == self.resource]
        holders = {text: held for held in named for text in held.ids}
        return {text: holders[text] for text in ids if text in holders}

    def _inherited(self, held: Holding, record: Record) -> bool:
        """Whether a later container of the pod may be asking: the kubelet hands on what this one had.

        All of them are served before the kubelet turns to another pod.
        """
        pod = (held.namespace, held.pod)
        same = [one for one in record.holdings if one.resource == held.resource]
        served = {one.container for one in same if (one.namespace, one.pod) == pod}
        waits = any(names[:2] == pod and names[2] not in served for names in record.containers)
        return waits and not held.listed

    def _held_already(self, taken: Mapping[str, Holding]) -> Refused:
        text, held = min(taken.items())
        # The refusal reaches the owner of the pod that asks, who may belong to another namespace: the log is
        # for administrators only.
        log.warning(
            "held_device_offered",
            resource=self.resource,
            device=text,
            pod=f"{held.namespace}/{held.pod}",
            container=held.container,
        )
        return Refused(
            f"device ID {text} of {self.resource} is held by another container, though the kubelet "
            "offers it; nothing is handed out twice, create the pod again",
            Reason.UNAVAILABLE,
        )

    def _sold(self, device_id: str) -> GpuState:
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
        # A GPU that drains still honours what the kubelet was admitting when its list changed.
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
        return state

    def _ids(self, state: GpuState, mode: GpuMode) -> list[str]:
        """The IDs that a GPU has in this resource, offered at the moment or not."""
        if mode.plugin_mode is not Mode.PGPU:
            return []
        if mode.replicas == 1:
            return [state.uuid] if self._whole else []
        count = mode.replicas if self._replicas else 0
        return [str(DeviceId(state.uuid, REPLICA, number)) for number in range(count)]

    def _devices(self, assignment: Assignment) -> Iterator[tuple[str, bool, int | None]]:
        held = self._held()
        for state in self._inventory.value.gpus:
            mode = assignment.of(state.uuid)
            for text in self._ids(state, mode):
                if mode.offered:
                    yield text, state.healthy, state.gpu.numa_node
                elif mode.leaving or text in held:
                    yield text, False, state.gpu.numa_node

    def _held(self) -> frozenset[str]:
        """The holdings by the newest record. From now on it speaks for grants that it is newer than."""
        record = self._record.cell.value
        if record is not None and record.began >= self._known.began:
            self._known = record
        held = frozenset(
            text for held in self._known.holdings if held.resource == self.resource for text in held.ids
        )
        for text in held & self._granted.keys():
            if self._granted[text] < self._known.began:
                del self._granted[text]
        return held

    def _encoded(self, assignment: Assignment) -> bytes:
        return b"".join(encode.device(*device) for device in self._devices(assignment))


def _gpu(device_id: str) -> str:
    return device_id.partition("::")[0]
