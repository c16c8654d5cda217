"""Shares of each container in each GPU, from the kubelet's records and what containers have grown by."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent.model.demand import CORES
from agent.model.gpu import Gpu
from agent.model.growth import Growth, Place
from agent.model.holding import Record
from agent.model.ids import BadDeviceId, parse
from agent.model.modes import MODE_OF_UNIT, PAIRS, Mode
from agent.model.units import INSTANCE, REPLICA

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
    parts = {each.uuid: (uuid, each.memory_bytes) for uuid, gpu in gpus.items() for each in gpu.instances}
    found = _claimed(pods)
    for holding in pods.holdings:
        if not holding.listed:
            continue  # plain init containers: their heirs have the same units, and run when they have ended
        for text in holding.ids:
            try:
                unit = parse(text)
            except BadDeviceId:
                continue
            gpu, size = parts.get(unit.gpu, (unit.gpu, 0))
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
            elif unit.unit is INSTANCE:
                units.instances += size
            else:
                units.whole = True
    return found


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
        held = min(1.0, memory / gpu.memory_bytes) if gpu.memory_bytes else None
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
