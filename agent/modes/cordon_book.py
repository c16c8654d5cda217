"""Which GPUs are cordoned: read from the node's annotation, kept in a file for when that is away."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.cluster.own_node import NodeNotWritten, OwnNode
from agent.inventory.snapshot import Snapshot
from agent.kit import atomic_file
from agent.kit.cell import Cell
from agent.kit.small_file import read_text
from agent.kit.timestamps import now
from agent.model.gpu import Gpu
from agent.modes.cordons import (
    ANNOTATION,
    NO_CORDONS,
    Cordon,
    Cordons,
    CordonsUnreadable,
    dated,
    decoded,
    encoded,
)

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
                await anyio.to_thread.run_sync(atomic_file.write, self._file.parent, self._file.name, content)
            except OSError as error:
                log.warning("cordons_not_kept", file=str(self._file), problem=str(error))
            else:
                written = cordons
