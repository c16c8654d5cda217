"""GPUs that a person has cordoned: they drain, and are offered in no mode until they are let back.

A node annotation names them, by hand or by `gpu-node-agent cordon`:
`gpu-node-agent.io/cordon: "3, GPU-1b2c...=fan is noisy"`, or JSON with a reason and a time for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.cluster.own_node import NodeNotWritten, OwnNode
from agent.inventory.snapshot import Snapshot
from agent.kit import files
from agent.kit.cell import Cell
from agent.kit.files import read_text
from agent.kit.timestamps import now
from agent.model.gpu import Gpu
from agent.model.modes import GpuMode
from agent.modes.withholding import closed

ANNOTATION: Final = "gpu-node-agent.io/cordon"
LONGEST_REASON: Final = 200
CORDONED: Final = "cordoned"
UUID_PREFIX: Final = "GPU-"


class CordonsUnreadable(Exception):
    """The annotation cannot be read; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """Why a GPU is not offered, and since when (RFC 3339; empty: not known)."""

    reason: str = ""
    since: str = ""

    @property
    def words(self) -> str:
        since = f" since {self.since}" if self.since else ""
        return f"{CORDONED}{since}" + (f": {self.reason}" if self.reason else "")


Cordons = Mapping[str, Cordon]  # by UUID
NO_CORDONS: Final[Cordons] = MappingProxyType({})


def cordoned(
    targets: Mapping[str, GpuMode], gpus: Mapping[str, Gpu], cordons: Cordons
) -> Mapping[str, GpuMode]:
    """The targets, with cordoned GPUs off."""
    return {
        uuid: closed(target, cordons[uuid].words) if uuid in cordons and uuid in gpus else target
        for uuid, target in targets.items()
    }


def decoded(text: str, gpus: Mapping[str, Gpu] | None) -> Cordons:
    """The cordons that an annotation asks for, of GPUs of this node. Raises CordonsUnreadable.

    `gpus` None: whatever it names, by UUID. As JSON, in which the agent writes, it may name GPUs by UUID that
    have left the node: their cordons hold up no other, and count again should they come back.
    """
    named: dict[str, Cordon] = {}
    gone: dict[str, Cordon] = {}
    if text.lstrip().startswith("{"):
        try:
            document = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise CordonsUnreadable(
                f"annotation {ANNOTATION} is no JSON object of objects: {error}"
            ) from error
        for gpu, entry in document.items():
            cordon = Cordon(_line(entry.get("reason")), _line(entry.get("since")))
            away = gpus is not None and gpu not in gpus and gpu.startswith(UUID_PREFIX)
            (gone if away else named)[gpu] = cordon
    else:
        for part in filter(None, (each.strip() for each in text.split(","))):
            gpu, _, reason = part.partition("=")
            named[gpu.strip()] = Cordon(_line(reason))
    if gpus is None:
        return named
    by_name = {str(gpu.index): uuid for uuid, gpu in gpus.items()} | {uuid: uuid for uuid in gpus}
    unknown = sorted(set(named) - set(by_name))
    if unknown:
        known = ", ".join(f"{gpu.index} = {uuid}" for uuid, gpu in gpus.items()) or "none"
        raise CordonsUnreadable(
            f"annotation {ANNOTATION} names {', '.join(unknown)[:LONGEST_REASON]}; this node's GPUs: {known}"
        )
    return {by_name[name]: cordon for name, cordon in named.items()} | gone


def dated(cordons: Cordons, known: Cordons, at: str) -> Cordons:
    """Each with a time: that of `known`, else `at`."""
    return {
        uuid: one if one.since else replace(one, since=known[uuid].since if uuid in known else at)
        for uuid, one in cordons.items()
    }


def encoded(cordons: Cordons) -> str:
    document = {uuid: {"reason": one.reason, "since": one.since} for uuid, one in sorted(cordons.items())}
    return msgspec.json.encode(document).decode()


def _line(text: object) -> str:
    """One line of text, whatever was written there."""
    return " ".join(text.split())[:LONGEST_REASON] if isinstance(text, str) else ""


# Which GPUs are cordoned: read from the node's annotation, kept in a file for when that is away.

log = structlog.get_logger()


class CordonBook:
    """Publishes the cordons in force. With a Node object its annotation has the say, else the file."""

    def __init__(self, file: Path, inventory: Cell[Snapshot], node: OwnNode | None) -> None:
        self._file = file
        self._inventory = inventory
        self._node = node
        self.cell: Cell[Cordons] = Cell(NO_CORDONS)
        self.problem: str | None = None  # why the annotation is not obeyed

    def remarks(self) -> list[str]:
        """Cordons that cannot be read."""
        return [f"{self.problem}; the GPUs cordoned before stay so"] if self.problem else []

    async def restore(self) -> None:
        """Take up what was in force before this process."""
        try:
            text = await anyio.to_thread.run_sync(read_text, self._file)
            # Each GPU by UUID: whether it is on this node shows later.
            self.cell.publish(decoded(text, None))
        except (OSError, UnicodeDecodeError):
            return
        except CordonsUnreadable as error:
            log.warning("cordons_unreadable", file=str(self._file), problem=str(error))

    async def run(self) -> None:
        """Follow annotation and GPUs, keep the file; for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep)
            if self._node:
                group.start_soon(self._on, self._node.changes, self._node)
                group.start_soon(self._on, self._inventory, self._node)

    async def add(self, uuid: str, reason: str) -> None:
        """Cordon a GPU. Raises NodeNotWritten."""
        known = self.cell.value
        await self._write({**known, uuid: Cordon(reason, known[uuid].since if uuid in known else now())})

    async def remove(self, uuid: str) -> None:
        """Let a GPU back. Raises NodeNotWritten."""
        await self._write({one: cordon for one, cordon in self.cell.value.items() if one != uuid})

    async def _write(self, cordons: Cordons) -> None:
        if self._node:
            if self.problem:
                raise NodeNotWritten(f"{self.problem}; mend or remove it first", refused=True)
            await self._node.write_metadata({}, {ANNOTATION: encoded(cordons) if cordons else None})
        self._put(cordons)

    async def _on(self, cell: Cell[Any], node: OwnNode) -> None:
        async for _ in cell.values():
            gpus = {state.uuid: state.gpu for state in self._inventory.value.gpus}
            if node.labels() is None or not gpus:
                continue  # neither is known yet: what was in force before stays
            self._read(node.annotations().get(ANNOTATION, ""), gpus)

    def _read(self, text: str, gpus: Mapping[str, Gpu]) -> None:
        try:
            found = dated(decoded(text, gpus), self.cell.value, now())
        except CordonsUnreadable as error:
            if self.problem != str(error):
                log.warning("cordons_unreadable", problem=str(error))
            self.problem = str(error)
            return
        self.problem = None
        self._put(found)

    def _put(self, cordons: Cordons) -> None:
        before = self.cell.value
        if cordons == before:
            return
        for uuid in cordons.keys() - before.keys():
            log.info("gpu_cordoned", gpu=uuid, reason=cordons[uuid].reason or None)
        for uuid in before.keys() - cordons.keys():
            log.info("gpu_uncordoned", gpu=uuid)
        self.cell.publish(MappingProxyType(dict(cordons)))

    async def _keep(self) -> None:
        written = self.cell.value
        async for cordons in self.cell.values():
            if cordons == written:
                continue
            content = encoded(cordons).encode()
            try:
                await anyio.to_thread.run_sync(files.write, self._file.parent, self._file.name, content)
            except OSError as error:
                log.warning("cordons_not_kept", file=str(self._file), problem=str(error))
            else:
                written = cordons
