"""The control daemon's command protocol, over NVIDIA's own program as a client.

What it does not promise, and what is done about it: its exit code says nothing (answers are read and every
setting is read back), it serves one client at a time and drops others with an empty answer (one lock per
daemon, tries within a deadline, and every session ends in a question that always has an answer), and commands
differ between versions (they are tried).

Eight daemons are asked every few seconds, so the program is run at the lowest cost: asyncio's own
subprocesses start a thread for each to wait in, and cost this process three times as much.

In a driver root it runs inside, as the daemon does: since driver 580 it loads libcuda, too, which may be
known to that root's loader alone, with all that libcuda loads.
"""

import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agent.kit.tasks import Backoff
from agent.model.cuda import LOG_DIRECTORY, PIPE_DIRECTORY
from agent.mps import launcher
from agent.mps.binary import Program
from agent.mps.directories import Directories
from agent.mps.mps_errors import DaemonRefused, NotSupported, ProgramMissing, Unanswered

# Reading what the control daemon says: leniently, since the wording changes between drivers. Pure.

_PID = re.compile(r"[0-9]{1,10}")
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")
_PERCENTAGE = re.compile(r"\d{1,3}\.\d+")
_REFUSALS = ("not found", "invalid", "denied", "not permitted", "failed", "cannot", "error")


class ServerState(Enum):
    """The state of an MPS server by its own word (driver 550 and newer)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    UNKNOWN = "UNKNOWN"


def check(command: str, answer: str) -> str:
    """The answer, if it is one. Raises NotSupported, DaemonRefused with the daemon's words."""
    lowered = answer.lower()
    if "unknown command" in lowered:
        raise NotSupported(f"this MPS control daemon has no command {command.partition(' ')[0]!r}")
    if any(mark in lowered for mark in _REFUSALS):
        raise DaemonRefused(f"MPS control daemon on {command!r}: {' '.join(answer.split())}")
    return answer


def parts(text: str) -> tuple[list[str], float | None]:
    """A session's answers, each of which a percentage of its own line (`100.0`) ends; the last of these."""
    found: list[str] = []
    lines: list[str] = []
    last: float | None = None
    for line in text.splitlines():
        if _PERCENTAGE.fullmatch(line.strip()):
            last = float(line)
            found.append("\n".join(lines))
            lines = []
        else:
            lines.append(line)
    return ([] if lines else found), last


def pids(answer: str) -> tuple[int, ...]:
    """Process IDs, one a line; anything else on a line is passed over."""
    found = (line.split() for line in answer.splitlines())
    return tuple(int(words[0]) for words in found if words and _PID.fullmatch(words[0]))


def percentage(answer: str) -> float | None:
    """The last number of an answer, from 0 to 100."""
    found = [float(number) for number in _NUMBER.findall(answer)]
    return found[-1] if found and 0 <= found[-1] <= 100 else None


def server_state(answer: str) -> ServerState:
    for word in re.findall(r"[A-Za-z]+", answer.upper()):
        if word in ServerState.__members__:
            return ServerState[word]
    return ServerState.UNKNOWN


ANSWER_SECONDS = 2.0
LONGEST_SECONDS = 15.0  # where the daemon hears others meanwhile, one after the other
TERMINATE_SECONDS = 10.0  # destroying a client's contexts waits for its kernels
KILLED_SECONDS = 2.0
FEW_WORDS_SECONDS = 0.05  # for a session to end before its words are read
_PIPE_BYTES = 1 << 16
# The control program passes on the words of the daemon, or of a process in its place.
MOST_BYTES = 1 << 20
# Python ignores both; programs expect otherwise.
_DEFAULT_AGAIN = (signal.SIGPIPE, signal.SIGXFSZ)
SESSIONS: set[int] = set()  # PIDs of our own sessions that are under way
MOST_LEFT = 4  # sessions of one daemon that outlive their kill, as in a driver that hangs; then none is begun
_left: dict[int, str] = {}  # those of all daemons, by PID: the pipe folder of the daemon
QUESTION = "get_default_active_thread_percentage"


def environment(program: Program, folders: Directories) -> dict[str, str]:
    """The environment in which the program finds its daemon and its server program; nothing else gets in."""
    inner = str(Path(program.inner).parent)
    inherited = os.environ.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    found = {
        "PATH": f"{inner}:{inherited}",
        PIPE_DIRECTORY: str(folders.pipe),
        LOG_DIRECTORY: str(folders.log),
    }
    if program.libraries:
        found["LD_LIBRARY_PATH"] = program.libraries
    return found


@dataclass(frozen=True, slots=True)
class Survey:
    """A daemon at one moment. `state` None: no server, or a driver before 550; `clients` None: not known."""

    servers: tuple[int, ...]
    state: ServerState | None = None
    clients: tuple[int, ...] | None = None
    percentage: float | None = None  # what clients of the next server may use at most; None: not known


class Control:
    """Talks to one daemon. Every method raises Unanswered, and DaemonRefused where the daemon says no."""

    def __init__(self, program: Program, folders: Directories, deadline: float = ANSWER_SECONDS) -> None:
        self._program = program
        # Never through the folder that pods mount: what stands there under the socket's name may be theirs.
        self._environment = environment(program, folders) | {PIPE_DIRECTORY: str(folders.own)}
        self._pipe = folders.own
        self._inside = None if program.root == Path("/") else Inside(program.root, folders.root)
        self._deadline = deadline
        self._turn = anyio.Lock()
        self._lacking: set[str] = set()  # commands that this version does not know
        self._waiting: dict[anyio.CancelScope, float] = {}  # for an answer; the latest deadline of each

    def prolong(self) -> None:
        """The daemon hears others, one after the other: a question under way keeps its place among them."""
        until = anyio.current_time() + self._deadline
        for scope, latest in self._waiting.items():
            scope.deadline = min(max(scope.deadline, until), latest)

    @contextmanager
    def _prolonged(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Have `prolong` give a scope more time while the context is open."""
        self._waiting[scope] = max(scope.deadline, anyio.current_time() + LONGEST_SECONDS)
        try:
            yield
        finally:
            del self._waiting[scope]

    @property
    def gives_state(self) -> bool:
        """Whether this version says how its server is, as far as is known."""
        return "get_server_status" not in self._lacking

    async def alive(self) -> float:
        """Ask for the daemon's default percentage, the cheapest question that always has an answer."""
        return self._percentage(await self._ask())

    async def servers(self) -> tuple[int, ...]:
        """PIDs of the servers, none or one."""
        return pids(await self._ask("get_server_list"))

    async def survey(self, server: int | None = None, clients: bool = False) -> Survey:
        """Servers, and state and clients of `server`, in one session: one program to run, not three.

        A server that is still initialising answers nobody who asks for its clients.
        """
        commands = ["get_server_list"]
        percentage: float | None = None
        if server is not None and self.gives_state:
            commands.append(f"get_server_status {server:d}")
        if server is not None and clients:
            commands.append(f"get_client_list {server:d}")

        def read(out: str) -> list[str] | None:
            nonlocal percentage
            found, percentage = parts(out)
            return found if len(found) == len(commands) else None

        # The question after each command marks where its answer ends.
        text = "".join(f"{command}\n{QUESTION}\n" for command in commands)
        said = dict(zip(commands, await self._until_answered(text, read, self._deadline), strict=True))
        servers = pids(said["get_server_list"])
        if server is None or server not in servers:
            return Survey(servers, percentage=percentage)
        state = None
        if (status := said.get(f"get_server_status {server:d}")) is not None:
            try:
                state = server_state(check("get_server_status", status))
            except NotSupported:
                self._lacking.add("get_server_status")
        listed = said.get(f"get_client_list {server:d}")
        return Survey(servers, state, None if listed is None else pids(listed), percentage)

    async def client_pids(self, server: int) -> tuple[int, ...]:
        return pids(await self._ask(f"get_client_list {server:d}"))

    async def set_default_percentage(self, percent: int) -> None:
        """Set what clients of the next server may use at most, 1..100."""
        if not 1 <= percent <= 100:
            raise ValueError(f"{percent} is not a percentage from 1 to 100")
        now = self._percentage(await self._ask(f"set_default_active_thread_percentage {percent:d}"))
        self._read_back("active thread percentage", percent, now)

    async def start_server(self) -> None:
        """Ask for a server before the first client does; whether it lives is seen in `servers`."""
        await self._ask("start_server -uid 0")

    async def terminate_client(self, server: int, client: int) -> None:
        """Destroy a client's contexts, so that its process may be killed without harm to its neighbours."""
        command = f"terminate_client {server:d} {client:d}"
        answer = await self._ask(command, deadline=TERMINATE_SECONDS)
        words = answer.split()
        if words and words[-1] not in ("0", str(client)):
            raise DaemonRefused(f"MPS control daemon on {command!r}: {' '.join(words)}")

    async def quit(self, timeout_seconds: int | None = None) -> None:
        """End the daemon; `timeout_seconds` for its clients to leave. Its PID shows whether it went."""
        text = "quit\n" if timeout_seconds is None else f"quit -t {timeout_seconds:d}\n"
        async with self._turn:
            await self._session(text, self._deadline + (timeout_seconds or 0))

    async def _ask(self, *commands: str, deadline: float | None = None) -> str:
        """Send commands in one session; their answers together. Without a command: the question's answer."""
        for command in commands:
            if command.split()[0] in self._lacking:
                raise NotSupported(f"this MPS control daemon has no command {command.split()[0]!r}")

        def read(out: str) -> list[str] | None:
            lines = out.splitlines()
            return lines if lines and percentage(lines[-1]) is not None else None

        text = "".join(f"{command}\n" for command in (*commands, QUESTION))
        lines = await self._until_answered(text, read, self._deadline if deadline is None else deadline)
        if not commands:
            return lines[-1]
        answer = "\n".join(lines[:-1])
        try:
            return check(commands[0], answer)
        except NotSupported:
            self._lacking.add(commands[0].split()[0])
            raise

    async def _until_answered(
        self, text: str, read: Callable[[str], list[str] | None], seconds: float
    ) -> list[str]:
        """Hold the session `text` until `read` finds it answered to the end. Raises Unanswered."""
        backoff = Backoff(first=0.02, longest=0.3)
        said = "no answer"
        # One client at a time: a second is turned away, often with an empty answer. Waiting for one's turn
        # says nothing against the daemon, and all who are before have a bound.
        async with self._turn:
            with anyio.move_on_after(seconds) as scope, self._prolonged(scope):
                while True:
                    out, complaint = await self._session(text, seconds)
                    found = read(out)
                    if found is not None:
                        return found
                    said = complaint or out or "an empty answer"
                    await anyio.sleep(backoff.next())
        raise Unanswered(
            f"the MPS control daemon on {self._pipe} did not answer within {seconds:g} s: {said}"
        )

    async def _session(self, text: str, seconds: float) -> tuple[str, str]:
        """One run of the program: what it wrote to its output and to its error output."""
        # A hanging session would block every other one: it is killed at the deadline.
        with anyio.move_on_after(seconds) as scope, self._prolonged(scope):
            try:
                return await session(Path(self._program.inner), text, self._environment, self._inside)
            except OSError as error:
                # Taken away with a driver that is being replaced: that says nothing against the daemon.
                raise ProgramMissing(f"{self._program.path} cannot be run: {error.strerror}") from error
        return "", f"the session hung for {seconds:g} s"

    @staticmethod
    def _percentage(answer: str) -> float:
        found = percentage(answer)
        if found is None:
            raise DaemonRefused(f"MPS control daemon: {answer[:80]!r} holds no percentage")
        return found

    @staticmethod
    def _read_back(what: str, wanted: float, found: float | None) -> None:
        if found != wanted:
            raise DaemonRefused(f"MPS control daemon: the {what} was set to {wanted}, it reads back {found}")


@dataclass(frozen=True, slots=True)
class Inside:
    """A root to run a program in, and the folder of ours that is seen there, under its own path."""

    root: Path
    folder: Path


async def session(
    program: Path, text: str, environment: Mapping[str, str], inside: Inside | None = None
) -> tuple[str, str]:
    """Hand `text` to the program; what it wrote to its output and to its error output.

    Bound it with a cancel scope: a program that is not over by then is killed. Both `text` and the error
    output must fit into a pipe, 64 KiB. Of the output the first MiB counts, the rest is read and dropped.
    Raises OSError where the program cannot be run, Unanswered where too many do not end.
    """
    pipe_folder = environment.get(PIPE_DIRECTORY, "")
    if (left := _not_ended(pipe_folder)) >= MOST_LEFT:
        raise Unanswered(
            f"{left} sessions with the MPS control daemon on {pipe_folder} do not end when killed"
        )
    opened: list[int] = []

    def pipe() -> tuple[int, int]:
        opened.extend(ends := os.pipe())
        return ends

    try:
        (stdin, text_end), (out, out_end), (errors, errors_end) = pipe(), pipe(), pipe()
        # The text is in the pipe before the program runs: nobody writes while it does.
        os.set_blocking(text_end, False)
        os.write(text_end, text.encode())
        call = partial(_spawned, program, environment, (stdin, out_end, errors_end))
        pid = await anyio.to_thread.run_sync(_from, inside, call) if inside else call()
        async with _reaped(pid, pipe_folder) as ended:
            for end in (stdin, text_end, out_end, errors_end):
                opened.remove(end)
                os.close(end)
            # Mostly it says little and is over in milliseconds: one wait in place of five.
            with anyio.move_on_after(FEW_WORDS_SECONDS) as brief:
                await anyio.wait_readable(ended)
            said = await _all(out), await _all(errors)
            if brief.cancelled_caught:
                await anyio.wait_readable(ended)
        return said
    finally:
        for end in opened:
            os.close(end)


def _spawned(program: Path, environment: Mapping[str, str], streams: tuple[int, int, int]) -> int:
    """The PID. Takes as long as the kernel needs to load a program: half a millisecond."""
    return os.posix_spawn(
        program,
        [str(program)],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, stream, number) for number, stream in enumerate(streams)],
        setsigdef=_DEFAULT_AGAIN,
    )


def _from(inside: Inside, call: Callable[[], int]) -> int:
    """The result of a call whose children have that root. Blocks."""
    made: list[int | OSError] = []

    def enter() -> None:
        try:
            launcher.private_mounts(str(inside.root), str(inside.folder), {})
            os.chroot(inside.root)
            os.chdir("/")
            made.append(call())
        except OSError as error:
            made.append(error)

    # Root and mounts become those of this thread alone, and it ends with them.
    thread = threading.Thread(target=enter, name="mps-session")
    thread.start()
    thread.join()
    (found,) = made
    if isinstance(found, OSError):
        raise found
    return found


@asynccontextmanager
async def _reaped(pid: int, pipe_folder: str) -> AsyncIterator[int]:
    """A descriptor that is readable once the child has ended; what does not end when killed is in `_left`."""
    descriptor = os.pidfd_open(pid)
    SESSIONS.add(pid)
    try:
        yield descriptor
    finally:
        SESSIONS.discard(pid)
        if os.waitpid(pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC222  it does not wait
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            with anyio.move_on_after(KILLED_SECONDS, shield=True):
                await anyio.wait_readable(descriptor)
            _left[pid] = pipe_folder
            _not_ended(pipe_folder)
        os.close(descriptor)


def _not_ended(pipe_folder: str) -> int:
    """Reap what has ended of `_left`; how many of a daemon's have not."""
    for pid in tuple(_left):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del _left[pid]
    return sum(each == pipe_folder for each in _left.values())


async def _all(descriptor: int) -> str:
    os.set_blocking(descriptor, False)
    found = b""
    while True:
        try:
            data = os.read(descriptor, _PIPE_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)
            continue
        if not data:
            return found.decode(errors="replace").strip()
        found += data[: MOST_BYTES - len(found)]
