"""The last wish that could be obeyed, remembered over restarts of the agent in a small file."""

from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.cell import Cell
from agent.kit.small_file import read_text
from agent.modes.desired import Desired

log = structlog.get_logger()

LONGEST_WORD = 63  # a label value


class ModeMemory:
    """One word in `file`. Only the agent writes it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def read(self) -> str | None:
        """The word; None: there is none."""
        try:
            word = (await anyio.to_thread.run_sync(read_text, self._file)).strip()[:LONGEST_WORD]
        except (OSError, UnicodeDecodeError):
            return None
        return word or None

    async def follow(self, accepted: Cell[Desired | None]) -> None:
        """Write down each wish that is obeyed, for ever."""
        written = await self.read()
        async for desired in accepted.values():
            if desired is None or desired.word == written:
                continue
            part = anyio.Path(self._file.with_suffix(".new"))
            try:
                await anyio.Path(self._file.parent).mkdir(parents=True, exist_ok=True)
                await part.write_text(desired.word, encoding="utf-8")
                await part.rename(self._file)
            except OSError as error:
                log.warning("mode_not_remembered", file=str(self._file), problem=str(error))
            else:
                written = desired.word
