"""The last request that could be obeyed, kept over restarts of the agent in a small file.

With the word stands what it meant: a layout that was renamed since, or taken out of the configuration, is
still what the node offers until something else can be obeyed. So do modes of instances that drain still: that
their holders are this agent's nothing else says.
"""

from collections.abc import Collection
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.kit import atomic_file
from agent.kit.cell import Cell
from agent.kit.follow import repeat
from agent.kit.small_file import read_text
from agent.model.modes import Assignment, Mode
from agent.model.node_layout import Entry
from agent.modes.desired import LONGEST_WORD, Desired

log = structlog.get_logger()


class LastRequest:
    """One request in `file`, as JSON; earlier agents wrote the word alone. Only the agent writes it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.draining: Collection[Mode] = ()  # as it was read

    async def read(self) -> Desired | None:
        """The request; without entries where only its word is known. None: there is none."""
        try:
            text = (await anyio.to_thread.run_sync(read_text, self._file)).strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not text.startswith("{"):
            return Desired(text[:LONGEST_WORD]) if text else None
        try:
            found = msgspec.json.decode(text, type=_Remembered)
        except msgspec.DecodeError as error:
            log.warning("mode_memory_unreadable", file=str(self._file), problem=str(error))
            return None
        self.draining = found.draining
        return Desired(found.word[:LONGEST_WORD], found.entries)

    async def follow(self, accepted: Cell[Desired | None], assignment: Cell[Assignment]) -> None:
        """Write down each request that is obeyed, for ever."""
        before = await self.read()
        written = _Remembered(before.name, before.entries, tuple(self.draining)) if before else None

        async def look() -> None:
            nonlocal written
            if (desired := accepted.value) is None or not assignment.value.gpus:
                return
            modes = {each.mode for each in assignment.value.gpus.values() if each.mode.row.partitioned}
            draining = tuple(modes - {entry.mode for entry in desired.entries})
            kept = _Remembered(desired.word, desired.entries, draining)
            if kept == written:
                return
            content = msgspec.json.encode(kept)
            try:
                await anyio.to_thread.run_sync(atomic_file.write, self._file.parent, self._file.name, content)
            except OSError as error:
                log.warning("mode_not_remembered", file=str(self._file), problem=str(error))
            else:
                written = kept

        await repeat(look, accepted, assignment)


class _Remembered(msgspec.Struct, omit_defaults=True):
    word: str
    entries: tuple[Entry, ...] = ()
    draining: tuple[Mode, ...] = ()
