"""Layouts: which GPUs of a node are offered in which mode, as the configuration names them. Pure."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.model.gpu import Gpu
from agent.model.modes import Mode

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
