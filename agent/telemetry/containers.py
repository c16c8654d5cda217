"""Shares of containers in GPUs, and their use as far as the driver attributes it: pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from agent.model.cgroup import ContainerRef
from agent.model.gpu import Gpu, Instance
from agent.model.holding import Growth, Place, Record
from agent.model.modes import INSTANCE, MODE_OF_UNIT, PAIRS, REPLICA, BadDeviceId, Mode, parse
from agent.model.pod import CORES, Pod
from agent.nvml.port import Sample

# Shares of each container in each GPU, from the kubelet's records and what containers have grown by.

NO_SLICES: Mapping[str, int] = MappingProxyType({})
NO_GROWTH: Mapping[Place, Growth] = MappingProxyType({})
_NOT_GROWN = Growth()
_CORES = frozenset(pair.core_unit for pair in PAIRS.values())
_BLOCK_BYTES = {pair.memory_unit: pair.block_bytes for pair in PAIRS.values()}


@dataclass(frozen=True, slots=True)
class ContainerShare:
    namespace: str
    pod: str
    container: str
    gpu: str  # UUID
    index: int
    mode: Mode
    core_limit: float | None  # 0..1 of the GPU; None: nothing was said of cores
    memory_limit: int  # bytes
    # 0..1 of the GPU as bills count it: the larger of its parts of cores and memory, of instances that of
    # memory. None: not known.
    held: float | None = None
    sharers: int = 1  # containers that have it together, by one claim

    @property
    def key(self) -> Place:
        return (self.namespace, self.pod, self.container, self.gpu)

    @property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)


@dataclass(slots=True)
class _Units:
    mode: Mode
    whole: bool = False
    slices: int = 0
    instances: int = 0  # bytes of memory that they have
    billed: int = 0  # of these, those that no other compute instance of their GPU instance is charged for
    cores: int = 0
    memory: int = 0
    grown: Growth = _NOT_GROWN
    sharers: int = 1


def shares_of(
    pods: Record,
    gpus: Mapping[str, Gpu],
    slices: Mapping[str, int] = NO_SLICES,
    grown: Mapping[Place, Growth] = NO_GROWTH,
) -> tuple[ContainerShare, ...]:
    """Every share of the GPUs that are known, by UUID. Resources of other plugins are passed over.

    `slices`: of each GPU, as far as it is known. `grown`: what containers have beyond the kubelet's records.
    """
    found = _held(pods, gpus)
    for key, growth in grown.items():
        if key in found:
            found[key].grown = growth
    taken = Counter[str]()
    for key, units in found.items():
        taken[key[3]] += units.slices
    # More may be held than there are while a layout with fewer waits for its turn.
    there = {uuid: max(count, taken[uuid]) for uuid, count in slices.items()}
    return tuple(_share(key, units, gpus[key[3]], there) for key, units in found.items() if key[3] in gpus)


def _held(pods: Record, gpus: Mapping[str, Gpu]) -> dict[Place, _Units]:
    parts = {each.uuid: (uuid, each) for uuid, gpu in gpus.items() for each in gpu.instances}
    found = _claimed(pods)
    for holding in pods.holdings:
        if not holding.listed:
            continue  # plain init containers: their heirs have the same units, and run when they have ended
        for text in holding.ids:
            try:
                unit = parse(text)
            except BadDeviceId:
                continue
            gpu, instance = parts.get(unit.gpu, (unit.gpu, None))
            key = (holding.namespace, holding.pod, holding.container, gpu)
            units = found.get(key)
            if units is None:
                units = found[key] = _Units(MODE_OF_UNIT[unit.unit])
            if unit.unit in _CORES:
                units.cores += 1
            elif unit.unit in _BLOCK_BYTES:
                units.memory += _BLOCK_BYTES[unit.unit]
            elif unit.unit is REPLICA:
                units.slices += 1
            elif instance and unit.unit is INSTANCE:
                units.instances += instance.memory_bytes
                units.billed += _part(instance)
            else:
                units.whole = True
    return found


def _part(instance: Instance) -> int:
    """Bytes of memory: several compute instances see all of their GPU instance's, and divide its slices."""
    if 0 < instance.compute_slices < instance.slices:
        return instance.memory_bytes * instance.compute_slices // instance.slices
    return instance.memory_bytes


def _claimed(pods: Record) -> dict[Place, _Units]:
    """Those by claims. Of several claims on one GPU the one with the fewest sharers counts for all."""
    found: dict[Place, _Units] = {}
    claimed = [(each, each.share) for each in pods.holdings if each.share]
    sharers = Counter((each.namespace, share.claim, share.share_id, share.gpu) for each, share in claimed)
    for holding, share in claimed:
        pair, place = share.mode.row.pair, (holding.namespace, holding.pod, holding.container)
        together = sharers[holding.namespace, share.claim, share.share_id, share.gpu] if share.claim else 1
        units = found.get((*place, share.gpu))
        if units is None:
            units = found[*place, share.gpu] = _Units(share.mode, whole=pair is None, sharers=together)
        units.sharers = min(units.sharers, together)
        units.cores += share.cores
        units.memory += share.memory * (pair.block_bytes if pair else 0)
    return found


def _share(key: Place, units: _Units, gpu: Gpu, slices: Mapping[str, int]) -> ContainerShare:
    pair = units.mode.row.pair
    # 100 cores that a pod asked for may stand for the GPU with all its memory, whatever was asked of that.
    whole = units.whole or (pair is not None and pair.whole_gpus and units.cores == CORES)
    namespace, pod, container, uuid = key
    promised = units.cores + units.grown.cores
    cores = 1.0 if whole or units.slices else promised / CORES if promised else None
    memory = gpu.memory_bytes if whole or units.slices else units.memory + units.grown.memory_bytes
    memory += units.instances
    held: float | None
    if units.slices:
        held = units.slices / slices[uuid] if uuid in slices else None
    elif units.mode.row.partitioned:
        held = min(1.0, units.billed / gpu.memory_bytes) if gpu.memory_bytes else None
    elif whole or pair is None:
        held = 1.0
    else:
        # Less than the GPU has, where a server needs some.
        offered = pair.blocks(gpu.memory_bytes) * pair.block_bytes
        held = min(1.0, max(cores or 0.0, memory / offered if offered else 0.0))
    held = held and held / units.sharers
    mode, sharers = units.mode, units.sharers
    return ContainerShare(namespace, pod, container, uuid, gpu.index, mode, cores, memory, held, sharers)


def by_gpu(shares: Iterable[ContainerShare]) -> dict[str, list[ContainerShare]]:
    """The shares of each GPU, by UUID."""
    found: dict[str, list[ContainerShare]] = {}
    for share in shares:
        found.setdefault(share.gpu, []).append(share)
    return found


# Attributes the use of a GPU to containers: pure.
#
# Three grades, shown with each figure. *Measured*: the driver reports it by process, all of which are known.
# *Estimated*: the rest of the driver's figures is shared out by limits, never above a container's own limit.
# *Allocated*: the driver reports nothing, only limits are known; there is no figure of the use.
#
# NVIDIA documents the memory of each client of an MPS server but not its use of the multiprocessors, which
# drivers may put down to the server: then the server's use is shared out among its clients.
#
# Where processes take turns on a GPU the driver puts each of its samples down to one of them (H200, driver
# 580): of several containers only the sum is measured, and shared out among those that have processes there.


class Attribution(Enum):
    """How a figure was obtained; the value is a label."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    ALLOCATED = "allocated"


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a GPU by a container now. A figure whose grade is ALLOCATED is not known; it stands as 0."""

    share: ContainerShare
    memory: int = 0  # bytes
    memory_grade: Attribution = Attribution.ALLOCATED
    utilization: float = 0.0  # 0..1 of the GPU
    utilization_grade: Attribution = Attribution.ALLOCATED
    pids: tuple[int, ...] = ()  # of its processes, where the driver reports each
    working: int = 0  # of its processes, those that the driver saw using the GPU

    @property
    def processes(self) -> int:
        """How many processes it has on the GPU."""
        return len(self.pids)


@dataclass(frozen=True, slots=True)
class Attributed:
    """The uses of one GPU, and its memory that belongs to no holder."""

    uses: tuple[Use, ...]
    foreign_memory: int = 0  # of processes outside pods, an MPS server among them
    unknown_memory: int = 0  # of processes that cannot be attributed
    others_work: bool = False  # or may: processes of no holder are there, or nobody knows who is


NO_PODS: Mapping[str, Pod] = MappingProxyType({})


def attribute(
    shares: Sequence[ContainerShare],
    sample: Sample | None,
    work: Mapping[int, float] | None,
    owners: Mapping[int, ContainerRef | None],
    pods: Mapping[str, Pod] = NO_PODS,
) -> Attributed:
    """Divide the use of one GPU among its shares.

    `work` is each process's use (0..1), None where the GPU has no such figures. `owners` are the processes
    that could be looked up; None: in no pod. `pods` are known ones by UID as cgroups name it; without them,
    processes of a pod are recognised by elimination.
    """
    if sample is None:
        return Attributed(tuple(Use(share) for share in shares))
    split = _Split(shares, owners, pods)
    split.sort(each.pid for each in sample.processes or ())
    memory, foreign, unknown = _memory(split, sample)
    utilization = _utilization(split, sample, work)
    uses = tuple(
        Use(
            share,
            round(memory[n][0]),
            memory[n][1],
            *utilization[n],
            pids=tuple(split.processes[n]),
            working=split.working[n],
        )
        for n, share in enumerate(shares)
    )
    # Listed ones count as well: of those that take turns the driver need not name each.
    there = {
        *(each.pid for each in sample.processes or ()),
        *(pid for pid, ratio in (work or {}).items() if ratio),
    }
    others = sample.processes is None or any(split.of(pid) is None for pid in there)
    return Attributed(uses, foreign, unknown, others)


class _Split:
    """Which process belongs to which share."""

    def __init__(
        self,
        shares: Sequence[ContainerShare],
        owners: Mapping[int, ContainerRef | None],
        pods: Mapping[str, Pod],
    ) -> None:
        self.shares = shares
        self.processes: list[list[int]] = [[] for _ in shares]
        self.working = [0] * len(shares)
        self._owners = owners
        self._pods = pods
        self._found: dict[int, int | None] = {}
        self._of_pod: dict[tuple[str, str], list[int]] = {}
        for number, share in enumerate(shares):
            self._of_pod.setdefault(share.pod_key, []).append(number)

    def sort(self, pids: Iterable[int]) -> None:
        """Take in the processes that the driver lists."""
        for pid in pids:
            number = self.of(pid)
            if number is not None:
                self.processes[number].append(pid)

    def foreign(self, pid: int) -> bool:
        """Whether the process is known to be in no pod."""
        return pid in self._owners and self._owners[pid] is None

    def complete(self, pids: Iterable[int]) -> bool:
        """Whether each process is either somebody's or foreign."""
        return all(self.of(pid) is not None or self.foreign(pid) for pid in pids)

    def takes_turns(self, sample: Sample, work: Mapping[int, float]) -> bool:
        """Whether processes of several containers, or of none beside them, have the GPU in turn.

        One of the host's that was not seen at work is left out: a monitor's, by which bills would end.
        """
        if any(share.mode.row.client_ceiling for share in self.shares):
            return False
        pids = {*(each.pid for each in sample.processes or ()), *work}
        return len({self.of(pid) for pid in pids if work.get(pid) or not self.foreign(pid)}) > 1

    def of(self, pid: int) -> int | None:
        """The position of a process's share; None: it is foreign, or unknown."""
        if pid not in self._found:
            ref = self._owners.get(pid)
            self._found[pid] = None if ref is None else self._share_of(ref)
        return self._found[pid]

    def _share_of(self, ref: ContainerRef) -> int | None:
        pod = self._pods.get(ref.pod_uid)
        if pod is not None:
            candidates = self._of_pod.get(pod.key, [])
            name = pod.container_names.get(ref.container_id)
            if name is not None:
                candidates = [n for n in candidates if self.shares[n].container == name]
        else:
            unknown = [key for key in self._of_pod if key not in {known.key for known in self._pods.values()}]
            candidates = self._of_pod[unknown[0]] if len(unknown) == 1 else []
        return candidates[0] if len(candidates) == 1 else None


def _memory(split: _Split, sample: Sample) -> tuple[list[tuple[float, Attribution]], int, int]:
    shares = split.shares
    limits = [float(share.memory_limit) for share in shares]
    processes = sample.processes
    if processes is None or any(each.memory_bytes is None for each in processes):
        if not sample.memory_total_bytes:
            return [(0.0, Attribution.ALLOCATED)] * len(shares), 0, 0
        # A container with a process must have memory; where processes are hidden, all may have.
        return _shared_out([None] * len(shares), float(sample.memory_used_bytes), limits, limits), 0, 0
    own: list[float | None] = [None] * len(shares)
    foreign = unknown = 0
    for each in processes:
        number, used = split.of(each.pid), each.memory_bytes or 0
        if number is not None:
            own[number] = (own[number] or 0.0) + used
        elif split.foreign(each.pid):
            foreign += used
        else:
            unknown += used
    return _shared_out(own, float(unknown), limits, limits), foreign, unknown


def _utilization(
    split: _Split, sample: Sample, work: Mapping[int, float] | None
) -> list[tuple[float, Attribution]]:
    shares, device = split.shares, sample.gpu_utilization_ratio
    weights = [1.0 if share.core_limit is None else share.core_limit for share in shares]
    # NVML has no such figure of instances' processes, and what there is of the GPU is nobody's.
    parted = any(share.mode.row.partitioned for share in shares)
    if work is None or parted:
        if device is None or parted:
            return [(0.0, Attribution.ALLOCATED)] * len(shares)
        return _shared_out([None] * len(shares), device, weights, weights)
    own: list[float | None] = [None] * len(shares)
    left, servers = 0.0, 0.0
    for pid, ratio in work.items():
        number = split.of(pid)
        if number is not None:
            own[number] = min(1.0, (own[number] or 0.0) + ratio)
            split.working[number] += ratio > 0
        elif split.foreign(pid):
            servers += ratio
        else:
            left += ratio
    if any(share.mode.row.client_ceiling for share in shares):
        left += servers or (device or 0.0 if not work else 0.0)
    if sample.processes is not None and split.complete(each.pid for each in sample.processes):
        # A container that is known to have no process uses nothing.
        own = [
            0.0 if value is None and not split.processes[number] else value
            for number, value in enumerate(own)
        ]
    limits = weights
    if split.takes_turns(sample, work):
        left += sum(value or 0.0 for value in own)
        own = [0.0 if value == 0.0 and not split.processes[n] else None for n, value in enumerate(own)]
        limits = [1.0] * len(shares)  # where nothing holds them to what they asked for, they have used it all
    # What some are known to use is nobody else's: together they never have more than the GPU.
    free = max(0.0, 1.0 - sum(value or 0.0 for value in own))
    return _shared_out(own, min(free, left), weights, limits)


def _shared_out(
    own: Sequence[float | None], left: float, weights: Sequence[float], limits: Sequence[float]
) -> list[tuple[float, Attribution]]:
    """Each one's own figure; those without one share the rest by weight, up to their limits."""
    if not left:
        return [(value or 0.0, Attribution.MEASURED) for value in own]
    total = sum(weight for weight, value in zip(weights, own, strict=True) if value is None)
    found = []
    for value, weight, limit in zip(own, weights, limits, strict=True):
        if value is not None:
            found.append((value, Attribution.MEASURED))
        else:
            part = left * weight / total if total else 0.0
            found.append((min(part, limit), Attribution.ESTIMATED))
    return found
