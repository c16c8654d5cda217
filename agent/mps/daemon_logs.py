"""Following control.log and server.log, for faults that the daemon reports nowhere else.

The kernel reports each write, so that a fault is known in milliseconds.

A fatal error of one client is reported to all clients of the server; the server takes no new ones until they
have left, then makes its contexts again. Drivers before 550 say so in the log only.

Every client may write into the log, through the fifo of the pipe folder, in any process's name: a line is a
reason to ask the daemon, and a verdict only where there is nothing to ask.
"""

import os
import re
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.files import FolderGone, FolderWatch, watching

log = structlog.get_logger()

MOST_BYTES = 128 << 10  # of one look, a thousand lines; a log that grew by more is read from there on
LONGEST_LINE_BYTES = 16 << 10  # what is beyond it of a line that has no end yet is not kept
# The daemon writes down each question, 7 MB a day at a probe every 5 s, and the run folder is memory.
LARGE_BYTES = 4 << 20
KEPT_BYTES = 1 << 20  # of a log that is begun again, its end
# Anybody may write lines: each part is bounded, so that none takes long to read or is no number.
_PREFIX = re.compile(r"^\[[^\]]{0,100}?\s([0-9]{1,10})\]\s*")
_CLIENT = re.compile(r"\{\s{0,8}([0-9]{1,10})\s{0,8},\s{0,8}([0-9]{1,10})\s{0,8}\}")
_EXITED = re.compile(r"(?i)server ([0-9]{1,10}) exited with status (-?[0-9]{1,10})")
_FAULTS = ("fatal gpu error", "fatal exception", "sticky error")
GATHER_SECONDS = 0.02  # a fault is logged in several lines: those that name the culprit come last
FLOOD_SECONDS = 0.25  # between two looks while the logs grow without pause: anybody may write into them
MOST_CULPRITS = 60  # the most clients that a server has


@dataclass
class Tail:
    """New lines of a growing file. Survives truncation, replacement and a file that is not there yet."""

    path: Path
    _offset: int = 0
    _inode: int = 0
    _rest: bytes = b""

    def lines(self) -> list[str]:
        """Whole lines that were added since the last call. Blocks."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._rest = status.st_ino, 0, b""
                if status.st_size - self._offset > MOST_BYTES:
                    self._offset, self._rest = status.st_size - MOST_BYTES, b""
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except OSError:
            # The next file of that name may get the same inode.
            self._inode, self._offset, self._rest = 0, 0, b""
            return []
        self._offset += len(data)
        if status.st_size > LARGE_BYTES:
            self._shorten()
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:LONGEST_LINE_BYTES]
        return [line.decode(errors="replace") for line in whole]

    def _shorten(self) -> None:
        """Empty the file, which its writer bears: it writes at the end, wherever that is.

        First of all: there may be no room for anything else before.
        """
        try:
            with self.path.open("r+b") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_BYTES))
                end = file.read(KEPT_BYTES)
                file.truncate(0)
        except OSError:
            return  # tried again at the next look
        self._offset = 0
        with suppress(OSError):
            self.path.with_name(f"{self.path.name}.1").write_bytes(end)


def writer(line: str) -> int | None:
    """The process that wrote a line; None: it does not say."""
    found = _PREFIX.match(line.strip())
    return int(found[1]) if found else None


@dataclass
class ServerLog:
    """Faults and servers by the log's lines; fed line by line."""

    # The fault that the newest line reports as not over, in words of ours.
    fault: str | None = None
    culprits: set[int] = field(default_factory=set)  # PIDs that the log names with the fault
    failed_servers: int = 0  # servers that ended with another status than 0
    turns: int = 0  # how often a fault began or ended by these lines

    def feed(self, lines: list[str]) -> None:
        """Take in new lines of either log."""
        for line in lines:
            text = _PREFIX.sub("", line.strip())
            lowered = text.lower()
            if fault := next((words for words in _FAULTS if words in lowered), None):
                self.turns += self.fault is None
                self.fault = f"its log reports a {fault.replace('gpu', 'GPU')}"
            elif self.fault and "creating server context" in lowered:
                self._over()
            elif found := _EXITED.search(text):
                self._over()
                self.failed_servers += found[2] != "0"
            if self.fault and len(self.culprits) < MOST_CULPRITS:
                self.culprits |= {int(pid) for pid, _ in _CLIENT.findall(text) if int(pid)}

    def _over(self) -> None:
        self.turns += self.fault is not None
        self.clear()

    def clear(self) -> None:
        """The fault is over: the server said so, or it is gone."""
        self.fault = None
        self.culprits = set()


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
        """Have the kernel report writes while the context is open."""
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
