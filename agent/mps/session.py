"""One run of the control program, at the lowest cost.

Eight daemons are asked every few seconds for ever. asyncio's own subprocesses start a thread for each to wait
in, and cost this process three times as much.
"""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

KILLED_SECONDS = 2.0
_PIPE_BYTES = 1 << 16
# The control program passes on the words of the daemon, or of a process in its place.
MOST_BYTES = 1 << 20
# Python ignores both; programs expect otherwise.
_DEFAULT_AGAIN = (signal.SIGPIPE, signal.SIGXFSZ)


async def session(program: Path, text: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Hand `text` to the program; what it wrote to its output and to its error output.

    Bound it with a cancel scope: a program that is not over by then is killed. Both `text` and the error
    output must fit into a pipe, 64 KiB. Of the output the first MiB counts, the rest is read and dropped.
    Raises OSError where the program cannot be run.
    """
    opened: list[int] = []

    def pipe() -> tuple[int, int]:
        opened.extend(ends := os.pipe())
        return ends

    try:
        (stdin, text_end), (out, out_end), (errors, errors_end) = pipe(), pipe(), pipe()
        # The text is in the pipe before the program runs: nobody writes while it does.
        os.set_blocking(text_end, False)
        os.write(text_end, text.encode())
        async with _reaped(_spawned(program, environment, (stdin, out_end, errors_end))) as ended:
            for end in (stdin, text_end, out_end, errors_end):
                opened.remove(end)
                os.close(end)
            said = await _all(out), await _all(errors)
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


@asynccontextmanager
async def _reaped(pid: int) -> AsyncIterator[int]:
    """A descriptor that is readable once the child has ended; leaves neither process nor zombie."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # nothing to one that has ended
        with anyio.move_on_after(KILLED_SECONDS, shield=True):
            await anyio.wait_readable(descriptor)
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  it does not wait
        os.close(descriptor)


async def _all(descriptor: int) -> str:
    """All output until the end."""
    os.set_blocking(descriptor, False)
    found = b""
    while True:
        await anyio.wait_readable(descriptor)
        try:
            data = os.read(descriptor, _PIPE_BYTES)
        except BlockingIOError:
            continue
        if not data:
            return found.decode(errors="replace").strip()
        found += data[: MOST_BYTES - len(found)]
