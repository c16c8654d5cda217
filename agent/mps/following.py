"""Following a daemon's logs: the kernel reports each write, so what they say is known in milliseconds."""

from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.inotify import FolderGone, FolderWatch, watching
from agent.mps.serverlog import ServerLog, Tail, writer

log = structlog.get_logger()

GATHER_SECONDS = 0.02  # a fault is logged in several lines: those that name the culprit come last
FLOOD_SECONDS = 0.25  # between two looks while the logs grow without pause: anybody may write into them


class Logs:
    """server.log and control.log of one daemon; `said` is their content."""

    def __init__(self, folder: Path, poll_seconds: float) -> None:
        """`poll_seconds` between two looks where the kernel has no watch to give."""
        self.said = ServerLog()
        self._folder = folder
        self._poll_seconds = poll_seconds
        self._tails = (Tail(folder / "server.log"), Tail(folder / "control.log"))
        self._watch: FolderWatch | None = None
        self._unread = False  # the kernel reported a change; a look may be cancelled before it is made
        self._looked = -FLOOD_SECONDS

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Have the kernel tell of writes while the context is open."""
        try:
            async with watching(self._folder, growing=True) as self._watch:
                yield
        except OSError as error:
            if self._watch is not None:
                raise  # it is the caller's
            log.warning("mps_logs_not_watched", folder=str(self._folder), problem=str(error))
            yield
        finally:
            self._watch = None

    async def grown(self) -> None:
        """Return once the logs may hold something new, and read it."""
        if self._watch is None:
            await anyio.sleep(self._poll_seconds)
        else:
            try:
                if not self._unread:
                    async with aclosing(self._watch.changes()) as changes:
                        await anext(changes)
                    self._unread = True
                    since = anyio.current_time() - self._looked
                    await anyio.sleep(max(GATHER_SECONDS, FLOOD_SECONDS - since))
            except FolderGone:
                self._watch = None
        self._looked = anyio.current_time()
        await self.read()

    async def read(self) -> None:
        """Take in what was added since the last time."""
        # Fed in the thread: what is read is taken in, though the caller be cancelled meanwhile.
        await anyio.to_thread.run_sync(self._read)

    async def skip(self, but: Collection[int] = ()) -> None:
        """Pass over what stands there now, `but` for lines of these processes: a fault may not be over."""
        await anyio.to_thread.run_sync(self._skip, but)

    def _skip(self, but: Collection[int]) -> None:
        self.said.feed([line for line in self._lines() if writer(line) in but])

    def _read(self) -> None:
        self._unread = False
        self.said.feed(self._lines())

    def _lines(self) -> list[str]:
        return [line for tail in self._tails for line in tail.lines()]
