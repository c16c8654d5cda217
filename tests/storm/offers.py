"""Units that nobody holds have to be on offer."""

from collections.abc import Iterator
from functools import cache

import anyio

from agent.model.demand import CORES, MPS, VGPU
from agent.model.ids import SEPARATOR
from agent.model.modes import Mode
from agent.model.units import ResourcePair
from tests.storm.admission import OFFER_SECONDS, excused
from tests.storm.holders import Holders
from tests.storm.pods import GPU
from tests.storm.world import World

# That a mode may be in force before its first list arrives: the kubelet looks for new plugins each second
# (kubelet 1.36, pkg/kubelet/pluginmanager/plugin_manager.go, loopSleepDuration).
REGISTERED_SECONDS = 2.0


class Offers:
    """Which units nobody holds and nobody can have, and since when."""

    def __init__(self, world: World, holders: Holders) -> None:
        self._world = world
        self._holders = holders
        self._since: dict[str, float] = {}
        self._modes: dict[str, Mode] = {}
        self._changed = 0.0  # when they were last seen to be others

    def withheld(self) -> str | None:
        """The faults, in words."""
        now = anyio.current_time()
        agent = self._world.running
        modes = {one.uuid: one.active.mode for one in agent.switcher.state.value.gpus} if agent else {}
        if modes != self._modes:
            self._modes, self._changed = modes, now
        if excused(self._world) or now - self._changed < REGISTERED_SECONDS:
            self._since.clear()
            return None
        found = frozenset(self._missing())
        self._since = {each: self._since.get(each, now) for each in found}
        late = sorted(each for each, since in self._since.items() if now - since > OFFER_SECONDS)
        if not late:
            return None
        return f"nobody holds {late[0]} and {len(late) - 1} more, and nobody is offered them"

    def _missing(self) -> Iterator[str]:
        agent, life = self._world.running, self._world.kubelet._life
        if agent is None or life is None:
            return
        parts = self._holders.held().values()
        held = {each for resources in parts for ids in resources.values() for each in ids}
        touched = {each.partition(SEPARATOR)[0] for each in held}
        healthy = life.devices.tables.healthy
        for one in agent.switcher.state.value.gpus:
            mode = one.active.mode
            if mode is Mode.PGPU and one.uuid not in touched:
                yield from {one.uuid} - healthy.get(GPU, set())
            # Free cores of a GPU without free memory are of no use to anybody, and not offered; nor is the
            # rest of a GPU that has as many clients of MPS as it can have.
            elif mode is Mode.VGPU or (mode is Mode.MPS and one.uuid not in touched):
                yield from self._of_pair(VGPU if mode is Mode.VGPU else MPS, one.uuid, held)

    def _of_pair(self, pair: ResourcePair, uuid: str, held: set[str]) -> Iterator[str]:
        life = self._world.kubelet._life
        blocks = pair.blocks(self._world.machine.gpu(uuid).memory_total)
        free = []
        for resource, unit, count in (
            (pair.core, pair.core_unit, CORES),
            (pair.memory, pair.memory_unit, blocks),
        ):
            ids = _all(uuid, unit.mark, count) - held
            free.append((ids, life.devices.tables.healthy.get(resource, set()) if life else set()))
        if all(ids for ids, _ in free):
            for ids, healthy in free:
                yield from ids - healthy


@cache
def _all(uuid: str, mark: str, count: int) -> frozenset[str]:
    """The units of one kind that a GPU has."""
    return frozenset(f"{uuid}{SEPARATOR}{mark}{number}" for number in range(count))
