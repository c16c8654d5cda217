"""Follows unbound pods: gangs learn of their members, and a pod that waits learns why by an event.

Only the leader does. kube-scheduler asks an extender only about nodes whose totals are large enough, so that
its calls do not show every pod that waits. Its own verdict does: the condition PodScheduled, False with the
reason Unschedulable.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import anyio
import anyio.lowlevel

from agent.cluster.api import KubeApi
from agent.cluster.event_recorder import Event, EventRecorder, Regarding
from agent.cluster.reflector import DeltaReflector
from agent.extender.choice import refusal
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import free_capacity
from agent.extender.gangs import Gangs, Member
from agent.extender.objects import PodCondition, WatchedPod, as_model, decode_pod, gang_of
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import WHOLE_GPU, PodDemand, Slot, pod_demand
from agent.extender.verdicts import NOT_REACHED, Verdicts
from agent.kit.tasks import Supervisor
from agent.model.modes import PAIRS, Mode
from agent.model.node_inventory import NodeInventory
from agent.model.pod import WAITING_FOR_GPU, Impossible, Metadata

UNBOUND = "spec.nodeName=,status.phase=Pending"
LOOK_SECONDS = 2.0
# A reason that changes is reported again; a full cluster is not searched for each pod all the time.
AGAIN_SECONDS = 60.0
PODS_A_LOOK = 32
MOST_REASONS = 2  # that an event names, the most frequent first
UNSCHEDULABLE = PodCondition("PodScheduled", "False", "Unschedulable")


@dataclass(frozen=True, slots=True)
class PendingPod:
    """A pod with GPUs that is not bound. `demand`: None where `problem` says why not."""

    about: Regarding
    demand: PodDemand | None
    problem: str = ""
    waits: bool = True  # kube-scheduler found no node for it
    member: Member | None = None  # of a gang


@dataclass(frozen=True, slots=True)
class WaitingReason:
    """`kind` stays the same while only figures change."""

    kind: str
    sentence: str


def read_pending(raw: bytes) -> tuple[Metadata, PendingPod | None]:
    """An unbound pod's JSON; None: it ends, or asks for no GPU. Raises msgspec.DecodeError."""
    pod = decode_pod(raw)
    return pod.metadata, _pending(pod)


def _pending(pod: WatchedPod) -> PendingPod | None:
    meta = pod.metadata
    if meta.deletion_timestamp or pod.spec.node_name:
        return None
    about = Regarding("Pod", meta.name, meta.namespace, meta.uid)
    waits = UNSCHEDULABLE in pod.status.conditions
    try:
        demand = pod_demand(as_model(pod))
    except Impossible as error:
        return PendingPod(about, None, str(error), waits)
    if demand.nothing:
        return None
    # For one that no scheduler looks at nothing is kept: only its owner would ask for it, and at any time.
    gang = "" if pod.spec.scheduling_gates else gang_of(pod)
    return PendingPod(about, demand, "", waits, Member(gang, demand) if gang else None)


@dataclass(slots=True)
class _Waiting:
    pod: PendingPod
    due: float  # when it is looked at next


def _in_turn(due: list[_Waiting]) -> list[_Waiting]:
    """One of each namespace, then the next of each, the longest due first: thousands of one tenant's pods
    neither keep those of others from being looked at, nor their own later ones.
    """
    before: Counter[str] = Counter()
    turns = []
    for each in sorted(due, key=lambda one: one.due):
        namespace = each.pod.about.namespace
        turns.append((before[namespace], each))
        before[namespace] += 1
    return [each for _, each in sorted(turns, key=lambda turn: turn[0])]


class PendingPods:
    """One watch, and a look at the pods that it shows. `gangs` learn of each member of theirs."""

    def __init__(
        self,
        api: KubeApi,
        fleet: Fleet,
        verdicts: Verdicts,
        events: EventRecorder,
        supervisor: Supervisor,
        complete: Callable[[], bool],
        gangs: Gangs,
    ) -> None:
        """`complete`: whether the ledger has all nodes and bound pods; else GPUs would be called free."""
        self._fleet = fleet
        self._verdicts = verdicts
        self._events = events
        self._supervisor = supervisor
        self._complete = complete
        self._gangs = gangs
        self._waiting: dict[str, _Waiting] = {}
        self._watch = DeltaReflector(
            api, "/api/v1/pods", {"fieldSelector": UNBOUND}, read_pending, self, "pending pods"
        )

    @property
    def problem(self) -> str:
        """Why pods may be missing; empty: all are known."""
        if not self._watch.synced:
            return "the list of pending pods is not complete yet"
        return self._watch.problem or ""

    def replaced(self, values: Mapping[str, PendingPod | None]) -> None:
        for uid in (self._waiting.keys() | self._gangs.shown) - values.keys():
            self._gone(uid, ended=False)
        for uid, pod in values.items():
            self.changed(uid, pod)
        self._gangs.listed()

    def changed(self, uid: str, value: PendingPod | None) -> None:
        if value is None:  # it is being deleted
            self._gone(uid, ended=True)
            return
        if value.member:
            self._gangs.show(uid, value.member)
        else:
            self._gangs.hide(uid, ended=True)  # perhaps its label was taken away
        known = self._waiting.get(uid)
        if not value.waits:
            self._waiting.pop(uid, None)
        elif known:
            known.pod = value
        else:
            self._waiting[uid] = _Waiting(value, anyio.current_time())
            self._gangs.give_up(uid)

    def removed(self, uid: str, value: PendingPod | None) -> None:
        del value  # as it was before: it does not say whether the pod is bound
        self._gone(uid, ended=False)

    def _gone(self, uid: str, *, ended: bool) -> None:
        self._waiting.pop(uid, None)
        self._gangs.hide(uid, ended=ended)

    async def run(self) -> None:
        """Watch, and write events while the ledger is complete, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._supervisor.restarting, "pending pod watch", self._watch.run)
            group.start_soon(self._supervisor.restarting, "pod events", self._events.run)
            while True:
                await anyio.sleep(LOOK_SECONDS)
                if self._complete():
                    await self._look()

    async def _look(self) -> None:
        now = anyio.current_time()
        due = _in_turn([each for each in self._waiting.values() if each.due <= now])[:PODS_A_LOOK]
        found: dict[PodDemand, WaitingReason | None] = {}
        for each in due:
            each.due = now + AGAIN_SECONDS
            pod = each.pod
            if pod.demand is None:
                reason: WaitingReason | None = WaitingReason(
                    "impossible", f"{pod.problem}; correct the limits and create the pod again"
                )
            else:
                if pod.demand not in found:
                    found[pod.demand] = await self._reason(pod.demand)
                reason = found[pod.demand]
            if reason:
                self._events.emit(
                    Event(pod.about, WAITING_FOR_GPU, reason.sentence, warning=True, key=reason.kind)
                )

    async def _reason(self, demand: PodDemand) -> WaitingReason | None:
        """None: there is room, and the pod waits for something else or for the scheduler's next attempt."""
        # kube-scheduler did not find room by another door.
        names = [name for name in self._fleet.nodes if not self._fleet.of_other_doors(name, demand)]
        fitting, refused = await self._verdicts.judge(demand, names)
        if fitting:
            return None
        await anyio.lowlevel.checkpoint()
        return waiting_reason(self._fleet, demand, refused)


def waiting_reason(fleet: Fleet, demand: PodDemand, refused: Mapping[str, str]) -> WaitingReason:
    """Why no node has room, in one sentence with the remedy, for the pod's owner.

    `refused`: every node that was looked at, with the reason. The sentence names no other pods, which may be
    other tenants'.
    """
    nodes = [node for name in refused if (node := fleet.nodes.get(name))]
    ours = {node.name: node.inventory for node in nodes if node.inventory}
    # Other agents' GPUs: nothing is known of them but their number.
    others = [
        node.name
        for node in nodes
        if node.inventory is None and all(node.totals.get(each, 0) for each, _ in demand.totals)
    ]
    if others:
        return _full(demand, refused, [*ours, *others])
    if not ours:
        return WaitingReason(
            "no GPUs",
            "no node offers GPUs by this agent; an administrator gives a node a mode with the label "
            "nvidia-device-enable",
        )
    lacking = _modes_nobody_offers(ours.values(), demand)
    if lacking:
        return WaitingReason("no mode", _no_mode(lacking))
    if not _would_fit_when_empty(ours.values(), demand):
        return WaitingReason(
            "too large", f"no node could hold {_in_words(demand)} even if it were empty; {_less(demand)}"
        )
    return _full(demand, refused, ours)


def _full(demand: PodDemand, refused: Mapping[str, str], names: Iterable[str]) -> WaitingReason:
    seen = Counter(refused[name] for name in names if refused[name] != NOT_REACHED)
    most = ", ".join(
        f"{reason} ({count} node{'s' if count > 1 else ''})"
        for reason, count in seen.most_common(MOST_REASONS)
    )
    seen_text = f": {most}" if most else ""
    return WaitingReason(
        "full",
        f"no node has room now for {_in_words(demand)}{seen_text}; ask for less, or wait: the pod starts "
        "when enough is free",
    )


def _modes_nobody_offers(inventories: Iterable[NodeInventory], demand: PodDemand) -> list[Mode]:
    wanted = {slot.mode for slot in demand.slots} | ({Mode.PGPU} if demand.gpus else set())
    offered = {gpu.mode for inventory in inventories for gpu in inventory.gpus}
    return sorted(wanted - offered, key=lambda mode: mode.value)


def _no_mode(lacking: list[Mode]) -> str:
    wanted = " and ".join(PAIRS[mode].core if mode in PAIRS else WHOLE_GPU for mode in lacking)
    labels = " or ".join(f"nvidia-device-enable={mode.value}" for mode in lacking)
    return (
        f"no node offers {wanted}; ask for the resources of a mode that nodes are in, or have an "
        f"administrator label a node {labels}"
    )


def _would_fit_when_empty(inventories: Iterable[NodeInventory], demand: PodDemand) -> bool:
    tried: set[tuple[tuple[Mode, int, int], ...]] = set()  # nodes come in a few kinds
    for inventory in inventories:
        # GPUs that are unhealthy or drain now may be used again: wait for them.
        gpus = tuple(replace(gpu, trouble="", offered=True) for gpu in inventory.gpus)
        kind = tuple((gpu.mode, gpu.memory_mib, gpu.replicas) for gpu in gpus)
        if kind in tried:
            continue
        tried.add(kind)
        empty = replace(inventory, gpus=gpus)
        if not refusal(free_capacity(empty, ()), demand, empty, SearchWork()):
            return True
    return False


def _in_words(demand: PodDemand) -> str:
    parts = [f"{demand.gpus} x {' and '.join(demand.whole_gpus)}"] if demand.gpus else []
    parts += [_slot_in_words(slot, count) for slot, count in Counter(demand.slots).items()]
    return " and ".join(parts)


def _slot_in_words(slot: Slot, count: int) -> str:
    pair = PAIRS[slot.mode]
    want = slot.demand
    if want.whole:
        text = f"{want.whole} whole GPU{'s' if want.whole > 1 else ''} in mode {slot.mode.value}"
    else:
        cores = f"{want.cores} {pair.core} and " if want.cores else ""
        text = f"{cores}{want.blocks} {pair.memory} of one GPU"
    return text if count == 1 else f"{count} times {text}"


def _less(demand: PodDemand) -> str:
    several = len(demand.slots) > 1 or demand.gpus > 1 or any(slot.demand.whole > 1 for slot in demand.slots)
    spread = ", or spread the work over more pods" if several else ""
    return f"ask for less{spread}, or for nodes with larger GPUs"
