"""Who holds what by the kubelet's own tables, and on which lists GPUs stand."""

from collections.abc import Mapping

from agent.model.modes import Mode
from agent.model.pod import MPS, VGPU
from agent.simulator.kubelet.device_tables import Allocation
from tests.storm.lost_devices import unfinished
from tests.storm.pods import GPU
from tests.storm.world import World

Held = dict[str, dict[tuple[str, str], frozenset[str]]]
MODES = {VGPU.core: Mode.VGPU, VGPU.memory: Mode.VGPU, MPS.core: Mode.MPS, MPS.memory: Mode.MPS}

OURS = frozenset((*MODES, GPU))  # other plugins' devices are not judged


class Holders:
    """Answers from the tables, worked out again only where they changed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ids: dict[int, tuple[Allocation, frozenset[str]]] = {}
        self._gpus: dict[int, tuple[object, frozenset[str]]] = {}

    def signature(self) -> tuple[object, ...]:
        """The same as long as nobody holds anything else."""
        life = self._world.kubelet._life
        entries = life.devices.tables.pods.entries() if life else ()
        alive = unfinished(self._world.kubelet)
        return tuple((uid, place, id(one)) for uid, place, _, one in entries if uid in alive)

    def held(self) -> Held:
        """Pod UID -> (container, resource) -> device IDs, of pods that have not ended."""
        life = self._world.kubelet._life
        found: Held = {}
        alive = unfinished(self._world.kubelet)
        for uid, container, resource, allocation in life.devices.tables.pods.entries() if life else ():
            if uid in alive and resource in OURS:
                found.setdefault(uid, {})[container, resource] = self._of(allocation)
        return found

    def _of(self, allocation: Allocation) -> frozenset[str]:
        known = self._ids.get(id(allocation))
        if known is None or known[0] is not allocation:
            known = self._ids[id(allocation)] = allocation, allocation.ids
        return known[1]

    def listed(self) -> Mapping[str, set[Mode]]:
        """GPU -> the modes on whose lists it stands; lists of plugins that are gone do not count."""
        life = self._world.kubelet._life
        found: dict[str, set[Mode]] = {}
        for resource, endpoint in life.devices.tables.endpoints.items() if life else ():
            if resource not in OURS:
                continue
            if endpoint.stopped_at is None and endpoint.calls is not None and life is not None:
                devices = life.devices.tables.all.get(resource, {})
                known = self._gpus.get(id(devices))
                if known is None or known[0] is not devices:
                    gpus = frozenset(each.partition("::")[0] for each in devices)
                    known = self._gpus[id(devices)] = devices, gpus
                for gpu in known[1]:
                    found.setdefault(gpu, set()).add(MODES.get(resource, Mode.PGPU))
        return found
