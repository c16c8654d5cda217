"""Free capacity of one node's GPUs, after all that bound pods hold: pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.demand import CORES
from agent.model.free_gpu import UNLIMITED, FreeGpu
from agent.model.modes import PAIRS, Mode
from agent.model.node_inventory import GpuEntry, NodeInventory


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """Units of one GPU that a pod holds by the kubelet's own records."""

    uuid: str
    mode: Mode
    cores: int
    blocks: int
    clients: int = 1


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A bound pod and, as far as it is known, where its units are; the first that is known counts.

    `held`: by the kubelet's records. `chosen`: GPUs by index for each slot. Neither: they may be anywhere.
    """

    demand: PodDemand
    held: tuple[HeldUnits, ...] | None = None
    chosen: Chosen | None = None
    name: str = ""  # namespace/name, for people
    owner: str = ""  # whose replicas spread, as `objects.owner_of` says


# Mode; cores, memory and clients that the widest GPU has left; untouched GPUs.
Summary = tuple[str, int, int, int, int]


class ModeCapacity(NamedTuple):
    """Free capacity of the usable GPUs of one mode, with frequent questions worked out once."""

    mode: Mode
    gpus: tuple[FreeGpu, ...]  # in order of index
    widest: FreeGpu  # the one with the most cores left
    untouched: int
    summary: Summary


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Free capacity of a node. `out`: of GPUs that are not offered now."""

    # No mapping by mode: a mode's hash costs more than a look at the one or two that a node has.
    modes: tuple[ModeCapacity, ...] = ()
    out: tuple[tuple[Mode, FreeGpu, str], ...] = ()  # with why, in a word or a few
    units: int = 0  # free whole GPUs and time slices of the pgpu resource
    all_units: int = 0
    unknown: int = 0  # bound pods of which nobody said yet where their units are

    @property
    def summary(self) -> Summary | None:
        """Figures that one share or one set of whole GPUs is judged by; None: by more than these."""
        plain = len(self.modes) == 1 and not self.out and not self.unknown
        return self.modes[0].summary if plain else None

    @property
    def gpus(self) -> Sequence[FreeGpu]:
        """GPUs of all modes, in order of index."""
        if len(self.modes) == 1:
            return self.modes[0].gpus
        return sorted((gpu for mode in self.modes for gpu in mode.gpus), key=lambda gpu: gpu.index)

    def of(self, mode: Mode) -> ModeCapacity | None:
        """The usable GPUs of a mode; None: there are none."""
        return next((each for each in self.modes if each.mode is mode), None)


def _capacity(mode: Mode, gpus: tuple[FreeGpu, ...]) -> ModeCapacity:
    widest = max(gpus, key=lambda gpu: (gpu.cores, gpu.blocks))
    untouched = sum(gpu.untouched for gpu in gpus)
    summary = (mode.value, widest.cores, widest.blocks, widest.clients, untouched)
    return ModeCapacity(mode, gpus, widest, untouched, summary)


def free_capacity(inventory: NodeInventory, claims: Iterable[PodClaim]) -> FreeCapacity:
    """Free units of every GPU. A pod whose GPUs are not known is counted on each that it may be on."""
    tallies = {gpu.index: _Tally(gpu) for gpu in inventory.gpus if gpu.mode in PAIRS}
    by_uuid = {tally.gpu.uuid: tally for tally in tallies.values()}
    units = 0
    suspects: list[Slot] = []
    unknown = 0
    for claim in claims:
        units += claim.demand.gpus
        if claim.held is not None:
            for held in claim.held:
                if tally := by_uuid.get(held.uuid):
                    tally.take(held.cores, held.blocks, held.clients)
        elif claim.chosen is not None and len(claim.chosen) == len(claim.demand.slots):
            _hold(tallies, claim.demand.slots, claim.chosen)
        elif claim.demand.slots:
            unknown += 1
            suspects += claim.demand.slots
    # Whole GPUs first: they are where nothing is that is known, whatever else may be there.
    for slot in sorted(suspects, key=lambda each: not each.demand.whole):
        for tally in tallies.values():
            if tally.gpu.mode is slot.mode:
                tally.suspect(slot)
    offered = sum(gpu.replicas for gpu in inventory.gpus if gpu.mode is Mode.PGPU and gpu.usable)
    usable = [tally for tally in tallies.values() if tally.gpu.usable]
    modes = dict.fromkeys(tally.gpu.mode for tally in usable)
    return FreeCapacity(
        tuple(
            _capacity(mode, tuple(each.free() for each in usable if each.gpu.mode is mode)) for mode in modes
        ),
        tuple(
            (tally.gpu.mode, tally.free(), "unhealthy" if tally.gpu.trouble else "draining")
            for tally in tallies.values()
            if not tally.gpu.usable
        ),
        max(0, offered - units),
        offered,
        unknown,
    )


def _hold(tallies: Mapping[int, "_Tally"], slots: Sequence[Slot], chosen: Chosen) -> None:
    for slot, indices in zip(slots, chosen, strict=True):
        for index in indices:
            if index in tallies:
                tallies[index].hold(slot)


class _Tally:
    __slots__ = ("blocks", "clients", "cores", "gpu", "shut", "touched")

    def __init__(self, gpu: GpuEntry) -> None:
        self.gpu = gpu
        self.cores, self.blocks, self.clients = gpu.grown_cores, 0, 0
        self.touched, self.shut = gpu.grown_cores > 0, False

    def take(self, cores: int, blocks: int, clients: int) -> None:
        self.touched = True
        # A container with all the cores has the GPU to itself, whatever memory it asked for.
        self.shut |= cores >= CORES and PAIRS[self.gpu.mode].whole_gpus
        self.cores += cores
        self.blocks += blocks
        self.clients += clients

    def hold(self, slot: Slot) -> None:
        if slot.demand.whole:
            self.touched = self.shut = True
        else:
            self.take(slot.demand.cores, slot.demand.blocks, slot.containers)

    def suspect(self, slot: Slot) -> None:
        """Perhaps the slot is here; whole GPUs are not where something else is."""
        if slot.demand.whole:
            self.shut |= not self.touched
        else:
            self.take(slot.demand.cores, slot.demand.blocks, slot.containers)

    def free(self) -> FreeGpu:
        gpu = self.gpu
        if self.shut:
            return FreeGpu(gpu.uuid, gpu.index, 0, 0, gpu.blocks, untouched=False, clients=0)
        return FreeGpu(
            gpu.uuid,
            gpu.index,
            max(0, CORES - self.cores),
            max(0, gpu.blocks - self.blocks),
            gpu.blocks,
            untouched=not self.touched,
            clients=max(0, gpu.clients - self.clients) if gpu.clients else UNLIMITED,
        )
