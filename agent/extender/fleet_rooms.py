"""What the GPUs of one node have left, after all that bound pods hold: pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.demand import CORES
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Held:
    """What a pod holds of one GPU by the kubelet's own records."""

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
    held: tuple[Held, ...] | None = None
    chosen: Chosen | None = None
    name: str = ""  # namespace/name, for people


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What one GPU has left."""

    index: int
    mode: Mode
    cores: int
    blocks: int
    all_blocks: int
    clients: int  # further containers that may hold a share
    untouched: bool

    @property
    def fits(self) -> int:
        """The largest share in hundredths, memory asked for alike, that fits."""
        return min(self.cores, self.blocks * CORES // self.all_blocks) if self.all_blocks else 0

    def takes(self, slot: Slot) -> bool:
        """Whether a share fits."""
        want = slot.demand
        return self.cores >= want.cores and self.blocks >= want.blocks and self.clients >= slot.containers

    def after(self, slot: Slot) -> "GpuRoom":
        """With a slot placed on it."""
        if slot.demand.whole:
            return replace(self, cores=0, blocks=0, clients=0, untouched=False)
        return GpuRoom(
            self.index,
            self.mode,
            self.cores - slot.demand.cores,
            self.blocks - slot.demand.blocks,
            self.all_blocks,
            self.clients - slot.containers,
            untouched=False,
        )


@dataclass(frozen=True, slots=True)
class Rooms:
    """What a node has left. `out`: what GPUs that are not sold now would have."""

    gpus: tuple[GpuRoom, ...] = ()
    out: tuple[tuple[GpuRoom, str], ...] = ()  # with why, in a word or a few
    units: int = 0  # free whole GPUs and time slices of the pgpu resource
    all_units: int = 0
    unknown: int = 0  # bound pods of which nobody said yet where their units are
    # Worked out once for the many questions after them. No mapping by mode: a mode's hash costs more than a
    # look at the one or two that a node has.
    modes: tuple["ModeRoom", ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found: list[ModeRoom] = []
        for mode in dict.fromkeys(room.mode for room in self.gpus):
            mine = [room for room in self.gpus if room.mode is mode]
            widest = max(mine, key=lambda room: (room.cores, room.blocks))
            found.append(ModeRoom(mode, widest, sum(room.untouched for room in mine)))
        object.__setattr__(self, "modes", tuple(found))


class ModeRoom(NamedTuple):
    """Of the GPUs of one mode: the one with the most cores left, and how many are untouched."""

    mode: Mode
    widest: GpuRoom
    untouched: int


def rooms_of(inventory: NodeInventory, claims: Iterable[PodClaim]) -> Rooms:
    """Free units of every GPU. A pod whose GPUs are not known is counted on each that it may be on."""
    tallies = {gpu.index: _Tally(gpu) for gpu in inventory.gpus if gpu.mode in (Mode.VGPU, Mode.MPS)}
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
    sold = sum(gpu.replicas for gpu in inventory.gpus if gpu.mode is Mode.PGPU and gpu.usable)
    return Rooms(
        tuple(tally.room() for tally in tallies.values() if tally.gpu.usable),
        tuple((tally.room(), _why(tally.gpu)) for tally in tallies.values() if not tally.gpu.usable),
        max(0, sold - units),
        sold,
        unknown,
    )


def _hold(tallies: Mapping[int, "_Tally"], slots: Sequence[Slot], chosen: Chosen) -> None:
    for slot, indices in zip(slots, chosen, strict=True):
        for index in indices:
            if index in tallies:
                tallies[index].hold(slot)


def _why(gpu: GpuEntry) -> str:
    return "unhealthy" if gpu.trouble else "draining"


class _Tally:
    """What is taken of one GPU."""

    __slots__ = ("blocks", "clients", "cores", "gpu", "shut", "touched")

    def __init__(self, gpu: GpuEntry) -> None:
        self.gpu = gpu
        self.cores = self.blocks = self.clients = 0
        self.touched = self.shut = False

    def take(self, cores: int, blocks: int, clients: int) -> None:
        self.touched = True
        # A container with all the cores has the GPU to itself, whatever memory it asked for.
        self.shut |= cores >= CORES and self.gpu.mode is Mode.VGPU
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

    def room(self) -> GpuRoom:
        gpu = self.gpu
        ceiling = gpu.clients - self.clients if gpu.clients else UNLIMITED
        if self.shut:
            return GpuRoom(gpu.index, gpu.mode, 0, 0, gpu.blocks, 0, untouched=False)
        return GpuRoom(
            gpu.index,
            gpu.mode,
            max(0, CORES - self.cores),
            max(0, gpu.blocks - self.blocks),
            gpu.blocks,
            max(0, ceiling),
            untouched=not self.touched,
        )
