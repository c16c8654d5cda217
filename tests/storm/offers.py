"""Units that nobody holds have to be on offer."""

from collections.abc import Iterator
from functools import cache

import anyio

from agent.model.modes import SEPARATOR, Mode, ResourcePair
from agent.model.pod import CORES, MPS, VGPU
from tests.storm.admission import OFFER_SECONDS
from tests.storm.excuses import Excuses
from tests.storm.grown import grown_of
from tests.storm.holders import Holders
from tests.storm.pods import GPU
from tests.storm.world import World


class Offers:
    """Which units nobody holds and nobody can have, and since when."""

    def __init__(self, world: World, holders: Holders, excuses: Excuses) -> None:
        self._world = world
        self._holders = holders
        self._excuses = excuses
        self._since: dict[str, float] = {}

    def withheld(self) -> str | None:
        """The faults, in words."""
        agent, now = self._world.running, anyio.current_time()
        found: dict[str, float] = {}
        problem: str | None = None
        held = self._held()
        hanging = {uuid for _, uuid, _, _ in self._world.outliving.values()}  # nobody is to be offered those
        touched = {each.partition(SEPARATOR)[0] for each in held}
        for one in agent.switcher.state.value.gpus if agent else ():
            uuid, mode = one.uuid, one.active.plugin_mode
            if mode is Mode.OFF or uuid in hanging or not self._excuses.applies(uuid):
                continue
            missing = {each: self._since.get(each, now) for each in self._missing(uuid, mode, held, touched)}
            found |= missing
            lasts = now - min(missing.values(), default=now)
            late = lasts > OFFER_SECONDS
            cause = self._excuses.of(uuid, mode, lasts) if late else None
            if cause != "agent":  # one that has just begun can offer as little as one that is gone
                self._excuses.offers.count(excused=cause is not None)
            if late and cause is None:
                problem = f"for {lasts:.2f} s nobody holds {min(missing)}, and nobody is offered it"
        self._since = found
        return problem

    def _held(self) -> set[str]:
        """Units that pods hold, that containers have grown by, and that kubelets have lost."""
        parts = self._holders.held().values()
        held = {each for resources in parts for ids in resources.values() for each in ids}
        held.update(*grown_of(self._world.running).values())
        held.update(*(allocation.ids for *_, allocation in self._world.lost_devices.entries()))
        return held

    def _missing(self, uuid: str, mode: Mode, held: set[str], touched: set[str]) -> Iterator[str]:
        life = self._world.kubelet._life
        if life is None:
            return
        if mode is Mode.PGPU and uuid not in touched:
            yield from {uuid} - life.devices.tables.healthy.get(GPU, set())
        # Free cores of a GPU without free memory are of no use to anybody, and not offered; nor is the
        # rest of a GPU that has as many clients of MPS as it can have.
        elif mode is Mode.VGPU or (mode is Mode.MPS and uuid not in touched):
            yield from self._of_pair(VGPU if mode is Mode.VGPU else MPS, uuid, held)

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
