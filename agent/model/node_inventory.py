"""Layouts of a node's GPUs, and the GPUs as the agent publishes them for schedulers. Pure.

It holds what changes rarely (capacity, mode, health, links), never what is free: that follows from the bound
pods. A text of another version is refused rather than half understood.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.model.gpu import Gpu, Topology
from agent.model.modes import PAIRS, Mode, ModeName

# Layouts: which GPUs of a node are offered in which mode, as the configuration names them. Pure.

REST = "rest"
_RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Some GPUs and their mode.

    `gpus` holds index ranges (`0-3`, `5`), UUIDs, product patterns (`NVIDIA H200`, `*T4*`) or `rest`.
    """

    gpus: tuple[str, ...]
    mode: Mode
    replicas: int = 1  # pGPU only
    instances: tuple[str, ...] = ()  # profiles of each GPU in MIG mode; none: as they are


@dataclass(frozen=True, slots=True)
class Target:
    mode: Mode
    replicas: int = 1
    instances: tuple[str, ...] = ()


class LayoutError(Exception):
    """A layout does not fit; `faults` has one sentence for each fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


def everywhere(mode: Mode) -> tuple[Entry, ...]:
    """The layout of a plain mode: all GPUs alike."""
    return (Entry((REST,), mode),)


def faults_of(entries: Sequence[Entry]) -> list[tuple[int, str]]:
    """Faults of a layout on any node: (number of the entry, sentence)."""
    faults: list[tuple[int, str]] = []
    indices: dict[int, int] = {}
    texts: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if not entry.gpus:
            faults.append((number, "names no GPU; name indices, UUIDs, a product or rest"))
        if entry.replicas > 1 and not entry.mode.row.slices:
            faults.append((number, f"replicas are for mode pgpu, not {entry.mode.value}"))
        if entry.instances and not entry.mode.row.partitioned:
            faults.append((number, f"mig is for mode mig, not {entry.mode.value}"))
        for token in entry.gpus:
            span = _RANGE.fullmatch(token)
            if span is None:
                if re.fullmatch(r"[-\d ,]+", token):
                    faults.append((number, f"{token} is no GPU index; write 0, or a range such as 0-3"))
                if token in texts:
                    faults.append((number, f"{token} stands in entry {texts[token] + 1} already"))
                texts.setdefault(token, number)
                continue
            low, high = int(span[1]), int(span[2] or span[1])
            if low > high:
                faults.append((number, f"the range {token} runs backwards; write {high}-{low}"))
            for index in range(low, high + 1):
                if index in indices:
                    faults.append((number, f"GPU index {index} stands in entry {indices[index] + 1} already"))
                indices.setdefault(index, number)
    return faults


def resolve(entries: Sequence[Entry], gpus: Sequence[Gpu], *, lenient: bool = False) -> Mapping[str, Target]:
    """The target of each GPU of this node, by UUID; GPUs that no entry names are off.

    Raises LayoutError where an entry names a GPU that the node does not have, or a GPU is named twice.
    `lenient`: such a name is passed over, and of several entries the first counts.
    """
    faults: list[str] = []
    owner: dict[str, int] = {}
    for number, entry in enumerate(entries):
        for token in entry.gpus:
            if token == REST:
                continue
            named = [gpu for gpu in gpus if _names(token, gpu)]
            faults.extend(_missing(token, gpus, number))
            faults.extend(
                f"GPU {gpu.index} ({gpu.uuid}) is named by entries {owner[gpu.uuid] + 1} and {number + 1}"
                for gpu in named
                if owner.setdefault(gpu.uuid, number) != number
            )
    if faults and not lenient:
        raise LayoutError(faults)
    rest = next((number for number, entry in enumerate(entries) if REST in entry.gpus), None)
    targets: dict[str, Target] = {}
    for gpu in gpus:
        chosen = owner.get(gpu.uuid, rest)
        found = Entry((), Mode.OFF) if chosen is None else entries[chosen]
        targets[gpu.uuid] = Target(found.mode, found.replicas, found.instances)
    return targets


def _names(token: str, gpu: Gpu) -> bool:
    if span := _RANGE.fullmatch(token):
        return int(span[1]) <= gpu.index <= int(span[2] or span[1])
    if _UUID.fullmatch(token):
        return token == gpu.uuid
    return fnmatch.fnmatchcase(gpu.product.lower(), token.lower())


def _missing(token: str, gpus: Sequence[Gpu], number: int) -> list[str]:
    if span := _RANGE.fullmatch(token):
        present = {gpu.index for gpu in gpus}
        absent = [i for i in range(int(span[1]), int(span[2] or span[1]) + 1) if i not in present]
        if absent:
            there = ", ".join(map(str, sorted(present))) or "none"
            return [f"entry {number + 1} names GPU index {_list(absent)}; this node has {there}"]
    elif not any(_names(token, gpu) for gpu in gpus):
        return [f"entry {number + 1} names {token}, which no GPU of this node is"]
    return []


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# A node's GPUs as its agent publishes them for schedulers: compact, versioned JSON in a node annotation.

INVENTORY = "gpu-node-agent.io/inventory"
VERSION = 1
LONGEST_TROUBLE = 40  # characters: the text stays below 4 KiB for 16 GPUs that are all unhealthy
LONGEST = 64 << 10  # bytes of a text that is read at all
MOST_GPUS = 64
_MIB = 1 << 20


class BadInventory(Exception):
    """A text that is no inventory of this version; says why."""


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """One GPU of a node, as far as schedulers need it."""

    uuid: str
    index: int
    mode: Mode
    memory_mib: int
    offered: bool = True  # False: it drains
    trouble: str = ""  # why it is not handed out; empty: it is healthy
    replicas: int = 1  # time slices, in mode pgpu
    clients: int = 0  # how many containers may hold MPS shares of it; 0: no ceiling
    grown_cores: int = 0  # that containers have beyond what their pods asked for

    @property
    def usable(self) -> bool:
        """Whether something of it may be offered."""
        return self.offered and not self.trouble and self.mode is not Mode.OFF

    @property
    def blocks(self) -> int:
        """Units of memory that it has in its mode; 0 where memory is not offered apart."""
        pair = PAIRS.get(self.mode)
        return pair.blocks(self.memory_mib * _MIB) if pair else 0


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The GPUs of a node in order of index; `links` are pair scores, row by row above the diagonal."""

    gpus: tuple[GpuEntry, ...] = ()
    links: tuple[int, ...] = ()  # empty: not known, or all alike

    @property
    def by_claims(self) -> bool:
        """Whether all GPUs are devices of DRA, which kube-scheduler itself knows."""
        return bool(self.gpus) and all(gpu.mode.row.by_claims for gpu in self.gpus)

    @property
    def topology(self) -> Topology:
        """Pair scores by index as text; nodes of one build share the object."""
        return _topology(tuple(gpu.index for gpu in self.gpus), self.links)


@lru_cache(maxsize=256)
def _topology(indices: tuple[int, ...], links: tuple[int, ...]) -> Topology:
    names = [str(index) for index in indices]
    pairs = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :]]
    return Topology.of(names, dict(zip(pairs, links, strict=False)))


class _Gpu(msgspec.Struct, omit_defaults=True):
    u: Annotated[str, Meta(max_length=63)]
    i: Annotated[int, Meta(ge=0, le=1023)]
    m: ModeName
    mem: Annotated[int, Meta(ge=0, le=1 << 31)]
    drain: bool = False
    bad: str = ""
    n: Annotated[int, Meta(ge=1, le=100)] = 1
    c: Annotated[int, Meta(ge=0, le=1000)] = 0
    g: Annotated[int, Meta(ge=0, le=100)] = 0


class _Document(msgspec.Struct, omit_defaults=True):
    v: int
    gpus: Annotated[list[_Gpu], Meta(max_length=MOST_GPUS)]
    links: int | list[int] = 0  # one number: all pairs alike


_decoder = msgspec.json.Decoder(_Document)


def encode(inventory: NodeInventory) -> str:
    """The annotation: the same text for the same inventory."""
    alike = len(set(inventory.links)) <= 1
    links = (inventory.links[0] if inventory.links else 0) if alike else list(inventory.links)
    gpus = [
        _Gpu(
            gpu.uuid,
            gpu.index,
            gpu.mode.value,
            gpu.memory_mib,
            not gpu.offered,
            gpu.trouble.encode("ascii", "replace").decode().replace('"', "'")[:LONGEST_TROUBLE],
            gpu.replicas,
            gpu.clients,
            gpu.grown_cores,
        )
        for gpu in inventory.gpus
    ]
    return msgspec.json.encode(_Document(VERSION, gpus, links)).decode()


def decode(text: str) -> NodeInventory:
    """Raises BadInventory."""
    if len(text) > LONGEST:
        raise BadInventory(f"the inventory has {len(text)} characters, more than {LONGEST}")
    try:
        found = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInventory(f"the inventory cannot be understood: {error}") from error
    if found.v != VERSION:
        raise BadInventory(f"the inventory has version {found.v}, this extender reads version {VERSION}")
    count = len(found.gpus)
    if len({gpu.i for gpu in found.gpus}) < count or len({gpu.u for gpu in found.gpus}) < count:
        raise BadInventory("the inventory names a GPU twice")
    pairs = count * (count - 1) // 2
    links = [found.links] * pairs if isinstance(found.links, int) else found.links
    if len(links) != pairs:
        raise BadInventory(f"the inventory has {len(links)} link scores for {pairs} pairs of GPUs")
    entries = [
        GpuEntry(gpu.u, gpu.i, Mode(gpu.m), gpu.mem, not gpu.drain, gpu.bad[:200], gpu.n, gpu.c, gpu.g)
        for gpu in found.gpus
    ]
    # Thousands of nodes of one build: one object for their links.
    shared = _shared_links(tuple(links)) if any(links) else ()
    return NodeInventory(tuple(sorted(entries, key=lambda entry: entry.index)), shared)


@lru_cache(maxsize=1024)
def _shared_links(links: tuple[int, ...]) -> tuple[int, ...]:
    return links
