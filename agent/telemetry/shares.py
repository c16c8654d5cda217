"""Shares of each container in each GPU, from the kubelet's records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.model.demand import CORES
from agent.model.gpu import Gpu
from agent.model.holding import Record
from agent.model.ids import BadDeviceId, parse
from agent.model.modes import MODE_OF_UNIT, PAIRS, Mode

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

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Namespace, pod, container, GPU."""
        return (self.namespace, self.pod, self.container, self.gpu)

    @property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)


@dataclass(slots=True)
class _Units:
    mode: Mode
    whole: bool = False
    cores: int = 0
    memory: int = 0


def shares_of(pods: Record, gpus: Mapping[str, Gpu]) -> tuple[ContainerShare, ...]:
    """Every share of the GPUs that are known, by UUID. Resources of other plugins are passed over."""
    found: dict[tuple[str, str, str, str], _Units] = {}
    for holding in pods.holdings:
        if not holding.listed:
            continue  # plain init containers: their heirs have the same units, and run when they have ended
        if claimed := holding.share:
            pair, place = claimed.mode.row.pair, (holding.namespace, holding.pod, holding.container)
            device = found.setdefault((*place, claimed.gpu), _Units(claimed.mode, whole=pair is None))
            device.cores += claimed.cores
            device.memory += claimed.memory * (pair.block_bytes if pair else 0)
        for text in holding.ids:
            try:
                unit = parse(text)
            except BadDeviceId:
                continue
            key = (holding.namespace, holding.pod, holding.container, unit.gpu)
            units = found.get(key)
            if units is None:
                units = found[key] = _Units(MODE_OF_UNIT[unit.unit])
            if unit.unit in _CORES:
                units.cores += 1
            elif unit.unit in _BLOCK_BYTES:
                units.memory += _BLOCK_BYTES[unit.unit]
            else:
                units.whole = True
    return tuple(_share(key, units, gpus[key[3]]) for key, units in found.items() if key[3] in gpus)


def _share(key: tuple[str, str, str, str], units: _Units, gpu: Gpu) -> ContainerShare:
    pair = units.mode.row.pair
    # 100 cores may stand for the GPU with all its memory, whatever was asked of that.
    whole = units.whole or (pair is not None and pair.whole_gpus and units.cores == CORES)
    namespace, pod, container, uuid = key
    cores = 1.0 if whole else units.cores / CORES if units.cores else None
    memory = gpu.memory_bytes if whole else units.memory
    return ContainerShare(namespace, pod, container, uuid, gpu.index, units.mode, cores, memory)


def by_gpu(shares: Iterable[ContainerShare]) -> dict[str, list[ContainerShare]]:
    """The shares of each GPU, by UUID."""
    found: dict[str, list[ContainerShare]] = {}
    for share in shares:
        found.setdefault(share.gpu, []).append(share)
    return found
