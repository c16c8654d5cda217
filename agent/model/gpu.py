"""A physical GPU and its links to others: plain frozen values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

# A physical GPU, as the rest of the agent sees it: plain frozen values, no library types.


@dataclass(frozen=True, slots=True)
class Driver:
    version: str  # "580.95.05"
    nvml_version: str  # "13.580.95.05"
    cuda_version: tuple[int, int]  # the newest CUDA that the driver serves, (13, 0)


@dataclass(frozen=True, slots=True)
class Instance:
    """A part of a GPU in MIG mode that containers can have."""

    uuid: str  # "MIG-5fd4f087-..."
    gpu_instance: int  # numbers of the driver, by which its events name the instance
    compute_instance: int
    profile: str  # as NVIDIA writes it: "1g.18gb", "1c.3g.71gb", "1g.18gb+me"
    memory_bytes: int
    multiprocessors: int = 0  # 0: not known
    slices: int = 0  # of its GPU instance and of itself
    compute_slices: int = 0
    engines: tuple[int, ...] = ()  # copy, decoder, encoder, JPEG, optical flow


@dataclass(frozen=True, slots=True)
class Gpu:
    """Identity and fixed traits of one GPU. The UUID is the key; index and minor number may change."""

    uuid: str  # "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
    index: int  # NVML's enumeration index
    minor: int  # N of /dev/nvidiaN
    pci_bus_id: str  # "0000:1b:00.0", lower case as in sysfs
    product: str  # "NVIDIA H200"
    memory_bytes: int
    compute_capability: tuple[int, int]  # (9, 0)
    mig_enabled: bool = False
    numa_node: int | None = None  # None: the machine names none
    instances: tuple[Instance, ...] = ()  # in MIG mode, in the driver's order
    # How the driver switches its MIG mode: "live", or by a "reset" of the GPU; empty: it has none.
    mig_switch: str = ""


def normalise_bus_id(text: str) -> str:
    """NVML's `00000000:1B:00.0` as sysfs writes it, `0000:1b:00.0` (the domain has at least four digits)."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


# How well the GPUs of a node are connected with each other: a score for every pair.
#
# Points of a pair: 10 for the system interconnect, 10 more for each step closer on PCIe, 100 for each NVLink.
# The scale is that of NVIDIA's go-gpuallocator; unlike there, links to NVSwitches count.

NVLINK_POINTS: Final = 100

# nvmlGpuTopologyLevel_t -> points: same board, PIX, PXB, PHB, NODE, SYS.
PCIE_POINTS: Final[Mapping[int, int]] = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}


@dataclass(frozen=True, slots=True)
class Wires:
    """The active NVLinks of one GPU, counted by what is at their far end (bus IDs as in sysfs).

    `unnamed` links end at a switch that the GPU's own machine cannot see, as in a virtual machine.
    """

    gpus: Mapping[str, int] = field(default_factory=dict)
    switches: Mapping[str, int] = field(default_factory=dict)
    unnamed: int = 0

    @property
    def to_switches(self) -> int:
        """Links into a switched fabric."""
        return sum(self.switches.values()) + self.unnamed


def nvlinks_between(one: Wires, one_bus_id: str, other: Wires, other_bus_id: str) -> int:
    """NVLinks over which two GPUs reach each other at once.

    GPUs with links to switches are fully connected: a node has one fabric, though its base boards may
    have switches of their own (HGX-2), and then `nvidia-smi topo -m` counts the links of either GPU.
    """
    direct = max(one.gpus.get(other_bus_id, 0), other.gpus.get(one_bus_id, 0))
    return direct + min(one.to_switches, other.to_switches)


def pair_score(pcie_level: int, nvlinks: int) -> int:
    """Points of a pair; an unknown PCIe level counts as none."""
    return PCIE_POINTS.get(pcie_level, 0) + NVLINK_POINTS * nvlinks


@dataclass(frozen=True, slots=True)
class Topology:
    """Pair scores of a set of GPUs, made when the inventory changes and only read afterwards."""

    gpus: tuple[str, ...] = ()
    scores: tuple[tuple[int, ...], ...] = ()  # symmetric, 0 on the diagonal
    position: Mapping[str, int] = field(default_factory=dict, repr=False)
    # GPUs of one class can be swapped for each other without changing any score.
    twins: tuple[int, ...] = ()

    @classmethod
    def of(cls, gpus: Sequence[str], pairs: Mapping[tuple[str, str], int]) -> Self:
        """From the scores of unordered pairs; a missing pair scores 0."""
        scores = tuple(
            tuple(0 if a == b else max(pairs.get((a, b), 0), pairs.get((b, a), 0)) for b in gpus)
            for a in gpus
        )
        position = {uuid: number for number, uuid in enumerate(gpus)}
        return cls(tuple(gpus), scores, position, _twin_classes(scores))

    def pair(self, one: str, other: str) -> int:
        """The score of two GPUs; 0 where one is not known."""
        a, b = self.position.get(one), self.position.get(other)
        return 0 if a is None or b is None else self.scores[a][b]

    def nvlink_groups(self) -> Mapping[str, int]:
        """A number for each set of GPUs that NVLinks connect, its first one's place; lone ones have none."""
        groups = list(range(len(self.gpus)))
        for one, row in enumerate(self.scores):
            for other, points in enumerate(row[:one]):
                if points >= NVLINK_POINTS:
                    low, high = sorted((groups[one], groups[other]))
                    groups = [low if group == high else group for group in groups]
        return {uuid: group for uuid, group in zip(self.gpus, groups, strict=True) if groups.count(group) > 1}

    def score(self, gpus: Iterable[str]) -> int:
        """The link score of a set: the sum over its pairs."""
        known = [self.position[uuid] for uuid in gpus if uuid in self.position]
        return sum(self.scores[a][b] for i, a in enumerate(known) for b in known[:i])


def _twin_classes(scores: Sequence[Sequence[int]]) -> tuple[int, ...]:
    classes: list[int] = []
    for one, row in enumerate(scores):
        for other in range(one):
            if classes[other] == other and _swappable(row, scores[other], one, other):
                classes.append(other)
                break
        else:
            classes.append(one)
    return tuple(classes)


def _swappable(row: Sequence[int], other_row: Sequence[int], one: int, other: int) -> bool:
    return all(row[k] == other_row[k] for k in range(len(row)) if k not in (one, other))


def count_wires(links: Iterable[tuple[str, str]]) -> Wires:
    """Wires from (kind, far end's bus ID) pairs; kinds are `gpu`, `switch` and `other`."""
    gpus: Counter[str] = Counter()
    switches: Counter[str] = Counter()
    unnamed = 0
    for kind, bus_id in links:
        if kind == "gpu" and bus_id:
            gpus[bus_id] += 1
        elif kind == "switch" and bus_id:
            switches[bus_id] += 1
        else:
            unnamed += 1
    return Wires(dict(gpus), dict(switches), unnamed)
