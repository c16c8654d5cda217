"""Pods that the kubelet refused, and whether anything excuses it.

kube-scheduler without an extender counts totals (`NodeResourcesFit`), so a pod that fits no single GPU is
bound and dies: that is Kubernetes' own limit, and the reason why there is an extender. A pod that did fit
must not die while nothing is wrong with the node.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain

import anyio

from agent.model.demand import CORES, MPS, VGPU
from agent.model.ids import parse
from agent.model.modes import Mode
from agent.model.units import Unit
from agent.modes.switch_state import Phase as SwitchPhase
from agent.simulator.kubelet.api_server import Pod
from agent.simulator.kubelet.device_tables import Allocation
from agent.simulator.kubelet.devices import DeviceManager
from agent.simulator.kubelet.life import Life
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.storm.pods import GPU
from tests.storm.world import World

ALL = 1 << 20  # units: more than any GPU has
# The agent hears of the end of a pod by its watch, and lists what is free at once.
OFFER_SECONDS = 0.05
NOT_LISTED = "no healthy devices present"  # the kubelet's words (`devicesToAllocate`)
SETTLED_SECONDS = 60.0  # how long nothing must have been wrong

Used = dict[str, Counter[Unit]]
Entry = tuple[str, str, str, Allocation]  # UID, container, resource


def observe(world: World, found: Callable[[str], None]) -> Callable[[], None]:
    """Call `found` with each refusal that nothing excuses; the answer ends it."""
    before, allocate, free = Life._reject, DeviceManager.allocate, DeviceManager.free_inactive
    offered: dict[str, Used] = {}  # by UID; one pod at a time is admitted
    freed: deque[tuple[float, list[Entry]]] = deque()  # what was in use until then

    async def seen(
        self: DeviceManager, pod: PodSpec, uid: str, container: ContainerSpec, running: bool
    ) -> None:
        if any(self.tables.knows(resource) for resource in container.limits):
            self.free_inactive()  # as the kubelet is about to do
            offered.clear()
            offered[uid] = _used(self, uid)
        await allocate(self, pod, uid, container, running)

    def free_inactive(self: DeviceManager) -> None:
        now, entries = anyio.current_time(), list(self.tables.pods.entries())
        free(self)
        while freed and now - freed[0][0] > OFFER_SECONDS:
            freed.popleft()
        if len(entries) != len(list(self.tables.pods.entries())):
            freed.append((now, entries))

    def reject(self: Life, pod: Pod, reason: str, message: str) -> None:
        # The kubelet looks once what is free: what has ended since then is not among what it offers.
        views = [_used(self.devices, pod.uid), *([offered[pod.uid]] if pod.uid in offered else [])]
        # What pods that have just ended held may not be back on the agent's lists.
        now, late = anyio.current_time(), freed if NOT_LISTED in message else ()
        views += [_sum(entries, pod.uid) for since, entries in late if now - since <= OFFER_SECONDS]
        if not excused(world) and all(_fits(world, used, pod) for used in views):
            found(f"pod {pod.spec.name} was refused though it fits: {reason}: {message}")
        before(self, pod, reason, message)

    DeviceManager.allocate = seen  # type: ignore[method-assign]
    DeviceManager.free_inactive = free_inactive  # type: ignore[method-assign]
    Life._reject = reject  # type: ignore[method-assign]

    def end() -> None:
        DeviceManager.allocate = allocate  # type: ignore[method-assign]
        DeviceManager.free_inactive = free  # type: ignore[method-assign]
        Life._reject = before  # type: ignore[method-assign]

    return end


def excused(world: World) -> bool:
    """Whether something is, or was a moment ago, wrong with the node."""
    now, agent = anyio.current_time(), world.running
    if agent is None or now - world.disturbed < SETTLED_SECONDS:
        return True
    troubled = not world.api_well or bool(world.http.silent) or world.nvml_faults or world.lost
    unwell = any(not state.healthy for state in agent.core.inventory.snapshot.value.gpus)
    daemons = world.daemons.refuses or any(each.hangs for each in world.daemons.daemons)
    settled = agent.switcher.state.value.phase is SwitchPhase.APPLIED
    # Units that containers have grown by are nobody else's, and in no record of the kubelet's.
    return bool(troubled or unwell or not world.kubelet_well or daemons or agent.grown.value or not settled)


def _fits(world: World, used: Used, pod: Pod) -> bool:
    """Whether one GPU has room beside `used` for the pod's only container; other shapes are not judged."""
    # One that is deleted while it is admitted needs nothing any more.
    if len(pod.spec.containers) != 1 or pod.spec.static or pod.deleting:
        return False
    if any(each.restartable for each in pod.spec.init_containers):
        return False
    before = max((each.limits.get(VGPU.core, 0) for each in pod.spec.init_containers), default=0)
    if before > CORES and pod.spec.containers[0].limits.get(VGPU.core, 0) < before:
        return False  # `agent.model.demand.init_group_of`: which of several GPUs it gets is not the agent's
    limits: Counter[str] = Counter()
    for each in (*pod.spec.init_containers, *pod.spec.containers):
        limits |= Counter(each.limits)  # the later one gets the earlier one's units, and what it lacks
    switcher = world.running.switcher if world.running else None
    modes = {one.uuid: one.active.mode for one in switcher.state.value.gpus} if switcher else {}
    if GPU in limits:
        free = [uuid for uuid, mode in modes.items() if mode is Mode.PGPU and uuid not in used]
        return len(free) >= limits[GPU]
    for pair, wanted in ((VGPU, Mode.VGPU), (MPS, Mode.MPS)):
        if not {pair.core, pair.memory} & limits.keys():
            continue
        rooms = []
        for uuid, mode in modes.items():
            if mode is wanted:
                taken = used.get(uuid, Counter())
                total = pair.blocks(world.machine.gpu(uuid).memory_total)
                rooms.append((CORES - taken[pair.core_unit], total - taken[pair.memory_unit], total))
        cores, blocks = limits.get(pair.core, 0), limits.get(pair.memory, 0)
        if pair is VGPU and cores >= CORES:
            return sum((core, memory) == (CORES, total) for core, memory, total in rooms) >= cores // CORES
        # Cores of a GPU without free memory are on no list, nor is the reverse (`offers.py`); node.status, by
        # which the pod was bound, may be older.
        return any(core >= max(cores, 1) and memory >= max(blocks, 1) for core, memory, _ in rooms)
    return False


def _used(devices: DeviceManager, but: str) -> Used:
    """GPU -> how many units of each kind pods other than `but` hold."""
    return _sum(devices.tables.pods.entries(), but)


def _sum(entries: Iterable[Entry], but: str) -> Used:
    found: Used = {}
    for uid, _, _, allocation in entries:
        for gpu, count in _counts(tuple(allocation.by_numa.values())) if uid != but else ():
            found.setdefault(gpu, Counter()).update(count)
    return found


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
