"""One run of somebody else's program: bounded in time and in output, in a process group of its own."""

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import ByteReceiveStream, Process

KILLED_SECONDS = 5.0  # a busy machine takes a while to close the pipes of what was killed
LONGEST_ERRORS = 64 << 10  # the rest is read and dropped
MOST_LEFT = 16  # processes that do not end when killed, as in a driver that hangs; then none is started
_left: dict[tuple[str, ...], Process] = {}  # by command


class OutputTooLong(Exception):
    """The program wrote more than it may."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended and what it wrote."""

    code: int
    output: bytes
    errors: str


async def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    seconds: float,
    most_bytes: int,
    stdin: bytes = b"",
) -> Finished:
    """Run `command` to its end; `most_bytes` bounds its output, 64 KiB are kept of its error output.

    Whatever is left of its process group is killed when this call is cancelled or fails. Raises OSError
    where it cannot be started, also while an earlier one that was killed has not ended; TimeoutError after
    `seconds`, OutputTooLong.
    """
    for ended in [key for key, earlier in _left.items() if earlier.returncode is not None]:
        del _left[ended]
    if (key := tuple(command)) in _left or len(_left) >= MOST_LEFT:
        raise OSError(errno.EBUSY, "what was started before does not end when killed")
    process = await _start(command, environment, stdin=bool(stdin))
    finished = False
    try:
        with anyio.fail_after(seconds):
            result = await _talk(process, stdin, most_bytes)
        finished = True
        return result
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILLED_SECONDS):
            if not finished:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await _read_on(process)
            await process.wait()
            await process.aclose()
        if process.returncode is None:
            _left[key] = process


async def _read_on(process: Process) -> None:
    """Read what is left to its end: asyncio closes a pipe that nobody reads any more only then."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for _ in stream:
                    pass


async def _start(command: Sequence[str], environment: Mapping[str, str], *, stdin: bool) -> Process:
    """Start a program, whole or not at all. Raises OSError.

    A start that is cancelled leaves the pipes open: asyncio connects them in a task of its own.
    """
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            command,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    return process  # noqa: RET504  mypy takes the scope for one that may end the function


async def _talk(process: Process, stdin: bytes, most_bytes: int) -> Finished:
    """Write and read until the program has ended, as `run` says. Raises OutputTooLong."""
    output, errors = process.stdout, process.stderr
    assert output is not None
    assert errors is not None
    texts: dict[str, bytes] = {}
    excess = False

    async def read(name: str, stream: ByteReceiveStream, most: int, *, strict: bool) -> None:
        nonlocal excess
        found = bytearray()
        async for data in stream:
            if strict and len(found) + len(data) > most:
                excess = True
                group.cancel_scope.cancel()
                return
            found += data[: most - len(found)]
        texts[name] = bytes(found)

    async def write() -> None:
        if process.stdin is not None:
            # A program that ends without reading says why in its error output.
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await process.stdin.send(stdin)
            await process.stdin.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        group.start_soon(partial(read, "errors", errors, LONGEST_ERRORS, strict=False))
        await read("output", output, most_bytes, strict=True)
    if excess:
        raise OutputTooLong(f"{process.pid} wrote more than {most_bytes} bytes")
    code = await process.wait()
    return Finished(code, texts["output"], texts["errors"].decode(errors="replace").strip())
