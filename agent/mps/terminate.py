"""Ending processes of MPS, by their PID and start time."""

import signal

import anyio
import anyio.to_thread

from agent.mps.processes import Process

GONE_SECONDS = 3.0
POLL_SECONDS = 0.05


async def end(doomed: tuple[Process, ...]) -> None:
    """Return once they have ended: by themselves, by request, or by force. Bounded."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        doomed = tuple([each for each in doomed if await anyio.to_thread.run_sync(each.alive)])
        for process in doomed:
            await anyio.to_thread.run_sync(process.send, number)
        await gone(doomed)


async def gone(doomed: tuple[Process, ...], patience: float = 0.0) -> None:
    """Return once they have ended, at the latest `patience` seconds later than they should have."""
    with anyio.move_on_after(GONE_SECONDS + patience):
        while any([await anyio.to_thread.run_sync(each.alive) for each in doomed]):
            await anyio.sleep(POLL_SECONDS)
