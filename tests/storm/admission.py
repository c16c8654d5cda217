"""Pods that the kubelet refused, and whether anything excuses it.

kube-scheduler without an extender counts totals (`NodeResourcesFit`), so a pod that fits no single GPU is
bound and dies: that is Kubernetes' own limit, and the reason why there is an extender. A pod that did fit
must not die unless a cause that reaches its GPUs excuses it (`excuses.py`).
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from itertools import chain

import anyio

from agent.app.agent import Agent
from agent.model.modes import Mode, ResourcePair, Unit, parse
from agent.model.pod import CORES, MPS, VGPU
from agent.simulator.kubelet.api_server import Pod
from agent.simulator.kubelet.device_tables import Allocation
from agent.simulator.kubelet.devices import DeviceManager
from agent.simulator.kubelet.life import Life
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from agent.simulator.kubelet.workers import PodWorkers
from tests.storm.excuses import Excuses
from tests.storm.grown import grown_of
from tests.storm.holders import OURS
from tests.storm.neighbours import OTHERS
from tests.storm.pods import GPU
from tests.storm.world import World

ALL = 1 << 20  # units: more than any GPU has
# The agent hears of the end of a pod by its watch, and lists what is free at once.
OFFER_SECONDS = 0.05
# The kubelet's words (`devicesToAllocate`) where its lists have nothing, or too little.
NOT_LISTED = "no healthy devices present", "requested number of devices unavailable"
NOT_READ = "are still held is not known"  # the agent's, of whole GPUs that were handed out (`plugins.pgpu`)

STILL_HELD = "is held by another container, though the kubelet offers it"  # the agent's, of whole GPUs
BY_THE_AGENT = "rpc error"  # the kubelet's words where a plugin has answered
OUT_OF = "OutOf"  # begins the reason of the kubelet's own fit check, which counts what pods ask for

Used = dict[str, Counter[Unit]]
Entry = tuple[str, str, str, Allocation]  # UID, container, resource
Lists = dict[str, set[str]]  # healthy devices, by resource


def observe(world: World, excuses: Excuses, found: Callable[[str], None]) -> Callable[[], None]:
    """Call `found` with each refusal that nothing excuses; the answer ends it."""
    before, allocate, free = Life._reject, DeviceManager.allocate, DeviceManager.free_inactive
    begin = PodWorkers.start
    offered: dict[str, Used] = {}  # by UID; one pod at a time is admitted
    listed: Lists = {}  # as it was admitted
    freed: deque[tuple[float, list[Entry]]] = deque()  # what was in use until then
    turned_away: deque[tuple[float, list[Entry]]] = deque()  # what rejected pods had been given

    async def seen(
        self: DeviceManager, pod: PodSpec, uid: str, container: ContainerSpec, running: bool
    ) -> None:
        if any(self.tables.knows(resource) for resource in container.limits):
            self.free_inactive()  # as the kubelet is about to do
            offered.clear()
            offered[uid] = _used(world, self.tables.pods.entries(), uid)
            listed.clear()
            listed.update(self.tables.healthy)
        await allocate(self, pod, uid, container, running)

    def free_inactive(self: DeviceManager) -> None:
        now, entries = anyio.current_time(), list(self.tables.pods.entries())
        free(self)
        _recent(freed)
        _recent(turned_away)
        if len(entries) != len(list(self.tables.pods.entries())):
            freed.append((now, entries))

    def reject(self: Life, pod: Pod, reason: str, message: str) -> None:
        # The kubelet looks once what is free: what has ended since then is not among what it offers.
        entries = list(self.devices.tables.pods.entries())
        views = [
            _used(world, entries, pod.uid),
            *([offered[pod.uid]] if pod.uid in offered else []),
        ]
        # What pods that have just ended held may not be back on the agent's lists.
        late = _recent(freed) if any(map(message.__contains__, NOT_LISTED)) else ()
        views += [_used(world, held, pod.uid) for held in late]
        views.append(_used(world, _with_turned_away(entries, _recent(turned_away)), pod.uid))
        given = [each for each in entries if each[0] == pod.uid]
        turned_away.append((anyio.current_time(), given))
        excuses.note()
        lists = listed if pod.uid in offered else self.devices.tables.healthy
        judged = Judged(world, excuses, pod, message, lists)
        looked_at = not (OTHERS in message or pod.deleting or pod.spec.static)
        looked_at &= not (reason.startswith(OUT_OF) and _runs_without(self, reason.removeprefix(OUT_OF)))
        if looked_at and _unexcused(excuses, judged, views):
            found(f"pod {pod.spec.name} was refused though it fits: {reason}: {message}")
        before(self, pod, reason, message)

    def start(self: PodWorkers, pod: Pod) -> None:
        if not OURS.isdisjoint(pod.spec.resources):
            excuses.admissions.count(excused=False)
            excuses.unwell.count(excused=False)
        begin(self, pod)

    DeviceManager.allocate = seen  # type: ignore[method-assign]
    PodWorkers.start = start  # type: ignore[method-assign]
    DeviceManager.free_inactive = free_inactive  # type: ignore[method-assign]
    Life._reject = reject  # type: ignore[method-assign]

    def end() -> None:
        DeviceManager.allocate = allocate  # type: ignore[method-assign]
        DeviceManager.free_inactive = free  # type: ignore[method-assign]
        Life._reject = before  # type: ignore[method-assign]
        PodWorkers.start = begin  # type: ignore[method-assign]

    return end


class Judged:
    """A pod that was refused, and whether it would fit."""

    def __init__(self, world: World, excuses: Excuses, pod: Pod, message: str, listed: Lists) -> None:
        """`message`: why, in the kubelet's words and the agent's. `listed`: what the kubelet could offer."""
        self._world = world
        self._excuses = excuses
        self._pod = pod
        self._listed = listed
        # It could not read who holds the GPUs that were offered.
        self._unread = NOT_READ in message
        # Somebody holds one: who ended while the kubelet was away does so by all that can be read, until the
        # API server answers when it is asked.
        self._kept = STILL_HELD in message
        self._answered = BY_THE_AGENT in message
        agent = world.running
        # One that is closed, or a device of DRA, is nobody's to be given: `offers.py` looks if it should be.
        offered = [one for one in agent.switcher.state.value.gpus if one.active.offered] if agent else []
        begun = _begun_on(world, pod)
        self._modes = {one.uuid: one.active.mode for one in offered if not begun or one.uuid in begun}
        self._wants = _needs(pod.spec)
        self._known = agent is not None and agent.cluster is not None and pod.api_uid in _pods_known(agent)
        self._synced = agent is None or agent.cluster is None or agent.cluster.pods.reflector.synced
        self._grown = grown_units(agent)

    def fits(self, used: Used, *, strict: bool = False, well: bool = False) -> bool:
        """Whether there is room beside `used`; on GPUs that no cause reaches, or that are well."""
        limits = self._wants
        if limits is None:
            return False
        modes = {
            uuid: mode
            for uuid, mode in self._modes.items()
            if not (strict and self._reached(uuid, mode, used))
            and not (well and not self._excuses.applies(uuid))
        }
        if GPU in limits:
            if strict and self._forgotten(GPU):
                return False
            free = [uuid for uuid, mode in modes.items() if mode is Mode.PGPU and uuid not in used]
            return len(free) >= limits[GPU]
        for pair, wanted in ((VGPU, Mode.VGPU), (MPS, Mode.MPS)):
            if {pair.core, pair.memory} & limits.keys():
                # A pod of which the agent does not know has to be asked for, and so the API server.
                if strict and not self._known and self._excuses.calls_fail():
                    return False
                if strict and (self._forgotten(pair.core) or self._forgotten(pair.memory)):
                    return False
                if strict and (self._has_lost_equal(pair.core) or self._has_lost_equal(pair.memory)):
                    return False
                gpus = [uuid for uuid, mode in modes.items() if mode is wanted]
                return self._fits_one(pair, limits, [self._room(pair, each, used) for each in gpus])
        return False

    def _reached(self, uuid: str, mode: Mode, used: Used) -> bool:
        excuses = self._excuses
        # The agent chooses among what it is offered: what its lists lack it learns too late, asked or not.
        # One that has never seen the pods names entries of the checkpoint by who has the same units: for a
        # moment that may be the next pod (storm 8000043).
        answered = self._answered and self._synced and self._was_offered(uuid, mode, used)
        if not excuses.applies(uuid) or excuses.of(uuid, mode, answered=answered) is not None:
            return True
        # Whole GPUs that were handed out before are handed out again by a reading alone.
        return (self._unread and excuses.records_are_away()) or (self._kept and excuses.calls_fail())

    def _was_offered(self, uuid: str, mode: Mode, used: Used) -> bool:
        pair, wants, taken = MPS if mode is Mode.MPS else VGPU, self._wants or Counter(), used.get(uuid)
        units = {pair.core: pair.core_unit, pair.memory: pair.memory_unit}
        free = {
            name: sum(each.startswith(uuid) for each in self._listed.get(name, ()))
            - (taken[unit] if taken else 0)
            for name, unit in units.items()
        }
        return all(free[name] >= max(wants[name], 1) for name in units if name in wants)

    def _forgotten(self, resource: str) -> bool:
        """Whether the kubelet offers what it knows to be held (`acts.kubelets.forget`)."""
        life = self._world.kubelet._life
        tables = life.devices.tables if life else None
        return tables is not None and not tables.pods.in_use().get(resource, set()) <= tables.allocated.get(
            resource, set()
        )

    def _has_lost_equal(self, resource: str) -> bool:
        """Whether a pod runs that asks for as much, and whose devices the kubelet does not know of any more.

        By all that can be read it may be asking as well (`acts.kubelets.amnesia`).
        """
        life = self._world.kubelet._life
        sizes = {each.limits.get(resource, 0) for each in _containers(self._pod.spec)} - {0}
        return life is not None and any(
            each.limits.get(resource, 0) in sizes
            and not life.devices.tables.pods.of_container(pod.uid, each.name)
            for pod in self._world.kubelet.api.pods.values()
            if pod is not self._pod and pod.phase is Phase.RUNNING
            for each in pod.spec.containers
        )

    def _room(self, pair: ResourcePair, uuid: str, used: Used) -> tuple[int, int, int]:
        taken = used.get(uuid, Counter())
        total = pair.blocks(self._world.machine.gpu(uuid).memory_total)
        # Units that containers have grown by are nobody else's, and in no record of the kubelet's.
        return (
            CORES - taken[pair.core_unit],
            total - taken[pair.memory_unit] - self._grown.get(uuid, 0),
            total,
        )

    def _fits_one(self, pair: ResourcePair, limits: Counter[str], rooms: list[tuple[int, int, int]]) -> bool:
        if pair is VGPU and (whole := _whole_gpus(self._pod.spec)):
            return sum((core, memory) == (CORES, total) for core, memory, total in rooms) >= whole
        cores, blocks = limits.get(pair.core, 0), limits.get(pair.memory, 0)
        # Cores of a GPU without free memory are on no list, nor is the reverse (`offers.py`); node.status, by
        # which the pod was bound, may be older.
        return any(core >= max(cores, 1) and memory >= max(blocks, 1) for core, memory, _ in rooms)


def _runs_without(life: Life, resource: str) -> bool:
    """Whether a pod was admitted while its resource was unknown: the kubelet counts what it asks for."""
    return any(
        each.limits.get(resource, 0)
        and resource not in life.devices.tables.pods.of_container(pod.uid, each.name)
        for pod in life._pods.values()
        if pod.admitted or pod.phase is Phase.RUNNING
        for each in pod.spec.containers
    )


def _begun_on(world: World, pod: Pod) -> Collection[str]:
    """The GPUs of a pod's plain init container, whose units the kubelet gives to the next one first."""
    plain = {each.name for each in pod.spec.init_containers if not each.restartable}
    life = world.kubelet._life
    entries = life.devices.tables.pods.entries() if life and plain else ()
    return {
        gpu
        for uid, container, resource, allocation in entries
        if uid == pod.uid and container in plain and resource in OURS
        for gpu, _ in _counts(tuple(allocation.by_numa.values()))
    }


def _containers(spec: PodSpec) -> tuple[ContainerSpec, ...]:
    return (*spec.init_containers, *spec.containers)


def _whole_gpus(spec: PodSpec) -> int:
    """How many GPUs of nobody else's are enough for it; 0: it asks for shares alone, however many."""
    asked = [each.limits.get(VGPU.core, 0) for each in _containers(spec)]
    if max(asked) < CORES:
        return 0
    if any(not each.restartable for each in spec.init_containers):
        return max(asked) // CORES  # the later one gets the earlier one's
    return sum(cores // CORES or 1 for cores in asked)


def _unexcused(excuses: Excuses, judged: Judged, views: Collection[Used]) -> bool:
    """Whether a pod that was refused fits without a fault that reaches it; it is counted."""
    bare = all(judged.fits(used, strict=True) for used in views)
    fits = bare or all(judged.fits(used) for used in views)
    # As of offers: what fits only where nobody could offer anything is no look.
    unwell = fits and not bare and not all(judged.fits(used, well=True) for used in views)
    excuses.unwell.count(excused=unwell)
    if not unwell:
        excuses.refusals.count(excused=fits and not bare)
        excuses.admissions.count(excused=fits and not bare)
    return bare


def _needs(spec: PodSpec) -> Counter[str] | None:
    """Room that one GPU needs for the pod to fit whatever is chosen for each container; None: not judged."""
    plain = [each for each in spec.init_containers if not each.restartable]
    limits: Counter[str] = Counter()
    if not plain:
        # Wherever the containers before lie, the GPU that has room for all of them has it for the next.
        for each in (*spec.init_containers, *spec.containers):
            limits.update(each.limits)
        return limits
    if len(spec.containers) != 1 or len(plain) != len(spec.init_containers):
        return None
    before = max(each.limits.get(VGPU.core, 0) for each in plain)
    if before > CORES and spec.containers[0].limits.get(VGPU.core, 0) < before:
        return None  # `agent.model.pod.init_group_of`: which of several GPUs it gets is not the agent's
    for each in (*plain, *spec.containers):
        limits |= Counter(each.limits)  # the later one gets the earlier one's units, and what it lacks
    return limits


def _pods_known(agent: Agent) -> Collection[str]:
    return agent.cluster.pods.reflector.items.value.keys() if agent.cluster else ()


def grown_units(agent: Agent | None) -> dict[str, int]:
    """How many blocks of memory containers have grown by, by GPU."""
    return {uuid: len(ids) for uuid, ids in grown_of(agent).items()}


def _used(world: World, entries: Iterable[Entry], but: str) -> Used:
    """GPU -> how many units of each kind pods other than `but` hold, or run on unknown to their kubelet."""
    found: Used = {}
    for uid, _, resource, allocation in chain(entries, world.lost_devices.entries()):
        if uid == but or resource not in OURS:
            continue
        for gpu, count in _counts(tuple(allocation.by_numa.values())):
            found.setdefault(gpu, Counter()).update(count)
    return found


def _recent(past: deque[tuple[float, list[Entry]]]) -> list[list[Entry]]:
    """Drop all that is older than OFFER_SECONDS, and return the rest, the oldest first."""
    while past and anyio.current_time() - past[0][0] > OFFER_SECONDS:
        past.popleft()
    return [entries for _, entries in past]


def _with_turned_away(entries: Iterable[Entry], recent: Iterable[Iterable[Entry]]) -> Iterable[Entry]:
    """The agent takes a pod that was rejected a moment ago for a holder until it hears of the end.

    So long its lists lack what is of no use beside that one.
    """
    return {each[:3]: each for each in chain(entries, *recent)}.values()


@lru_cache(maxsize=512)
def _counts(devices: tuple[tuple[str, ...], ...]) -> list[tuple[str, Counter[Unit]]]:
    """How many units of each kind, by GPU; for devices by NUMA node."""
    counts: dict[str, Counter[Unit]] = {}
    for each in chain.from_iterable(devices):
        device = parse(each)
        counts.setdefault(device.gpu, Counter())[device.unit] += 1
    for count in counts.values():
        if count[VGPU.core_unit] == CORES:  # the whole GPU, memory included, that nobody asked for by units
            count[VGPU.memory_unit] = ALL
    return list(counts.items())
