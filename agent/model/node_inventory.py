"""A node's GPUs as its agent publishes them for schedulers: compact, versioned JSON in a node annotation.

It holds what changes rarely (capacity, mode, health, links), never what is free: that follows from the bound
pods. A text of another version is refused rather than half understood.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.model.modes import PAIRS, Mode, ModeName
from agent.model.topology import Topology

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
