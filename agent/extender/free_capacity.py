"""Free capacity of one node's GPUs, after all that bound pods hold: pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.modes import PAIRS, Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import UNLIMITED, FreeGpu
from agent.model.pod import CORES


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
    tallies, offered = _tallies(inventory)
    by_uuid: dict[str, _Tally] | None = None
    units = 0
    suspects: list[Slot] = []
    unknown = 0
    for claim in claims:
        units += claim.demand.gpus
        if claim.held is not None:
            by_uuid = by_uuid or {tally.gpu.uuid: tally for tally in tallies.values()}
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
    usable, out = _by_mode(tallies.values())
    return FreeCapacity(
        tuple(_capacity(mode, tuple(gpus)) for mode, gpus in usable),
        tuple(out),
        max(0, offered - units),
        offered,
        unknown,
    )


def _by_mode(
    tallies: Iterable["_Tally"],
) -> tuple[list[tuple[Mode, list[FreeGpu]]], list[tuple[Mode, FreeGpu, str]]]:
    """Usable GPUs by mode, of which a node has one or two, and those that are not offered, with why."""
    usable: list[tuple[Mode, list[FreeGpu]]] = []
    out: list[tuple[Mode, FreeGpu, str]] = []
    for tally in tallies:
        mode = tally.gpu.mode
        if not tally.gpu.usable:
            out.append((mode, tally.free(), "unhealthy" if tally.gpu.trouble else "draining"))
            continue
        gpus = next((found for known, found in usable if known is mode), None)
        if gpus is None:
            usable.append((mode, gpus := []))
        gpus.append(tally.free())
    return usable, out


def _tallies(inventory: NodeInventory) -> tuple[dict[int, "_Tally"], int]:
    """GPUs that are offered by parts, by index; and whole ones and time slices, as many as are offered.

    Neighbours are mostly alike, and a mode's hash and a GPU's blocks cost more than a look at the last one.
    """
    found: dict[int, _Tally] = {}
    offered = 0
    mode, pair, memory, blocks = None, None, -1, 0
    for gpu in inventory.gpus:
        if gpu.mode is not mode:
            mode, pair, memory = gpu.mode, PAIRS.get(gpu.mode), -1
        if pair:
            if gpu.memory_mib != memory:
                memory, blocks = gpu.memory_mib, gpu.blocks
            found[gpu.index] = _Tally(gpu, blocks, pair.whole_gpus)
        elif mode is Mode.PGPU and gpu.usable:
            offered += gpu.replicas
    return found, offered


def _hold(tallies: Mapping[int, "_Tally"], slots: Sequence[Slot], chosen: Chosen) -> None:
    for slot, indices in zip(slots, chosen, strict=True):
        for index in indices:
            if index in tallies:
                tallies[index].hold(slot)


class _Tally:
    __slots__ = ("all_blocks", "blocks", "clients", "cores", "gpu", "shut", "touched", "whole_gpus")

    def __init__(self, gpu: GpuEntry, all_blocks: int, whole_gpus: bool) -> None:
        self.gpu = gpu
        self.all_blocks, self.whole_gpus = all_blocks, whole_gpus
        self.cores, self.blocks, self.clients = gpu.grown_cores, 0, 0
        self.touched, self.shut = gpu.grown_cores > 0, False

    def take(self, cores: int, blocks: int, clients: int) -> None:
        self.touched = True
        # A container with all the cores has the GPU to itself, whatever memory it asked for.
        self.shut |= cores >= CORES and self.whole_gpus
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
            return FreeGpu(gpu.uuid, gpu.index, 0, 0, self.all_blocks, untouched=False, clients=0)
        clients = max(0, gpu.clients - self.clients) if gpu.clients else UNLIMITED
        if not self.touched:
            return FreeGpu(gpu.uuid, gpu.index, CORES, self.all_blocks, self.all_blocks, True, clients)
        cores, blocks = max(0, CORES - self.cores), max(0, self.all_blocks - self.blocks)
        return FreeGpu(gpu.uuid, gpu.index, cores, blocks, self.all_blocks, untouched=False, clients=clients)
