"""A resource of one kind of unit: its list, and nothing handed out twice. What a unit is says the plugin."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from time import monotonic

import structlog

from agent.holdings.holdings import HoldingsWatch
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, follow
from agent.kubelet import wire
from agent.kubelet.podresources import PATIENCE_SECONDS, PodResourcesUnavailable
from agent.kubelet.wire import Allocation, PreferenceRequest, Reason, Refused
from agent.model.holding import Holder, Holding, Record, Source
from agent.model.modes import Assignment, GpuMode

log = structlog.get_logger()


class SingleResource(ABC):
    """A `ResourcePlugin` of which a plugin says what a GPU has in it, and how containers get that."""

    offers_preference = True
    needs_pre_start = False

    def __init__(
        self, resource: str, inventory: Cell[Snapshot], modes: Cell[Assignment], record: HoldingsWatch
    ) -> None:
        self.resource = resource
        self._inventory = inventory
        self._modes = modes
        self._record = record
        self._known = Record((), ())  # as read last: while nobody can read it the lists stay as they are
        # Handed out, by the monotonic clock, and not shown by any later reading of the record.
        self._granted: dict[str, float] = {}
        self.lists: Cell[bytes] = Cell(b"")

    @abstractmethod
    def _ids(self, state: GpuState, mode: GpuMode) -> Sequence[str]:
        """The IDs that a GPU has in this resource, offered at the moment or not."""

    @abstractmethod
    def _chosen(self, free: Sequence[str], chosen: Sequence[str], size: int) -> Sequence[str]:
        """`size` IDs, those of `chosen` first and all of them, the others from `free`, which has enough."""

    @abstractmethod
    def _sold(self, device_id: str) -> None:
        """Look again at an ID that is asked for. Raises Refused: it is not to be handed out."""

    @abstractmethod
    def _given(self, ids: Sequence[str]) -> Allocation:
        """Answer what a container gets that is given these IDs."""

    def _healthy(self, state: GpuState, device_id: str) -> bool:  # noqa: ARG002
        return state.healthy

    def _lingers(self, device_id: str) -> bool:  # noqa: ARG002
        """Whether it stays listed for a while though its GPU is offered no more."""
        return False

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
        """Never IDs that somebody holds, though the kubelet offers some at times.

        A List during an Allocate has it forget what is in flight (kubernetes PR 137534). Raises Refused when
        too few are left.
        """
        chosen = list(dict.fromkeys(request.must_include))
        offered = set(request.available).difference(chosen)
        taken, _ = await self._taken(offered)
        gone = self._unlisted(offered)
        left = offered.difference(taken, gone)
        if taken and len(chosen) + len(left) < request.size:
            taken = await self._confirmed(taken)
            gone = self._unlisted(offered)
            left = offered.difference(taken, gone)
            if len(chosen) + len(left) < request.size:
                left |= (offered - gone) & self._lost_by_the_asking(request.size)
        if (taken or gone) and len(chosen) + len(left) < request.size:
            raise self._no_longer_offered(gone) if gone else self._held_already(taken)
        # Those that fell ill, or began to leave, since the kubelet looked: one of them may be refused.
        ill = {text for text, healthy, _ in self._devices(self._modes.value) if not healthy}
        if len(chosen) + len(left - ill) >= request.size:
            left -= ill
        free = [text for text in dict.fromkeys(request.available) if text in left]
        return self._chosen(free, chosen, request.size)

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """Refuses unknown, foreign and unhealthy ones; nothing changes then."""
        if len(set(ids)) < len(ids):
            raise Refused(f"the same device ID of {self.resource} stands twice among those asked for")
        self._still_sold(ids)
        taken, record = await self._taken(ids)
        refused = {text: held for text, held in taken.items() if not self._inherited(held, record)}
        if refused and (confirmed := await self._confirmed(refused)):
            again = self._lost_by_the_asking(len(ids))
            if others := {text: held for text, held in confirmed.items() if text not in again}:
                raise self._held_already(others)
        # Once more: while the kubelet was asked a GPU may have changed its mode or fallen ill.
        self._still_sold(ids)
        self._granted |= dict.fromkeys(ids, monotonic())
        return self._given(ids)

    def _still_sold(self, ids: Sequence[str]) -> None:
        """Raises Refused: one of these is not to be handed out."""
        for device_id in ids:
            self._sold(device_id)
        if gone := self._unlisted(ids):
            raise self._no_longer_offered(gone)

    def _unlisted(self, ids: Collection[str]) -> frozenset[str]:
        """Those of `ids` that stand on the list no more, or never did.

        A kubelet that is given one ends by a nil pointer: it looks the device up after the call
        (`manager.go`, `allocateContainerResources`), and may have taken in the shorter list by then.
        """
        return frozenset(ids).difference(text for text, *_ in self._devices(self._modes.value))

    def _no_longer_offered(self, gone: Collection[str]) -> Refused:
        return Refused(
            f"device ID {min(gone)} of {self.resource} is not offered any more: its GPU changes its mode or "
            "is withheld; create the pod again",
            Reason.UNAVAILABLE,
        )

    async def pre_start(self, ids: Sequence[str]) -> None:  # noqa: B027
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
        # The kubelet's own word counts where it has handed out again what it had lost.
        named.sort(key=lambda held: held.source is not Source.FORGOTTEN)
        holders = {text: held for held in named for text in held.ids}
        return {text: holders[text] for text in ids if text in holders}

    def _inherited(self, held: Holding, record: Record) -> bool:
        """Whether a later container of the pod may be asking: the kubelet hands on what this one had.

        All of them are served before the kubelet turns to another pod.
        """
        served = {
            one.container
            for one in record.holdings
            if (one.resource, one.pod_key) == (held.resource, held.pod_key)
            and one.source is not Source.FORGOTTEN
        }
        waits = any(names[:2] == held.pod_key and names[2] not in served for names in record.containers)
        return waits and held.source is Source.CHECKPOINT

    def _lost_by_the_asking(self, size: int) -> frozenset[str]:
        """IDs that a container may have again whose kubelet lost them with its checkpoint.

        It asks again when it starts the container again. None where another container may be asking.
        """
        record, pods = self._known, {pod.key: pod for pod in self._record.view().pods.values()}
        ours = [each for each in record.holdings if each.resource == self.resource]
        lost = {each.holder: each.id_set for each in ours if each.source is Source.FORGOTTEN}
        sure = [each for each in ours if each.source is not Source.FORGOTTEN]
        served, having = {each.holder for each in sure}, {each.pod_key for each in sure}
        if any(key not in pods and key not in having for key in record.pods):
            return frozenset()
        living = [pods[key] for key in record.pods if key in pods and not pods[key].finished]

        def may_ask(*, over: bool) -> set[Holder]:
            return {
                Holder(*pod.key, name)
                for pod in living
                for name in pod.starting(self.resource, size, over=over)
            } - served

        asking = may_ask(over=False)
        if not asking:
            # A kubelet that has just started asks for init containers that are over, too. Where others have
            # lost something one of these may have ended a moment ago.
            alone = len({each.pod_key for each in lost}) == 1
            asking = may_ask(over=True) if alone else set()
        if not asking <= lost.keys():
            return frozenset()
        again = frozenset[str]().union(*(lost[each] for each in asking))
        if len({each.pod_key for each in asking}) > 1:
            # What runs of one pod is nothing that a container of another may have.
            again = again.difference(*(ids for each, ids in lost.items() if each not in asking))
        return again.difference(*(each.ids for each in sure))

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

    def _devices(self, assignment: Assignment) -> Iterator[tuple[str, bool, int | None]]:
        held = self._held()
        for state in self._inventory.value.gpus:
            mode = assignment.of(state.uuid)
            for text in self._ids(state, mode):
                if mode.offered:
                    yield text, self._healthy(state, text), state.gpu.numa_node
                elif mode.leaving or text in held or self._lingers(text):
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
        return b"".join(wire.device(*device) for device in self._devices(assignment))
