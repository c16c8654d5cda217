"""`gpu-node-agent run`: serves until a signal, and leaves service for a clean-up that is asked for."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from agent.cli.running import exit_code
from agent.kit import logs
from agent.kit.tasks import Cell, FatalError
from agent.nvml.port import NvmlPort
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.app.reload import Reloader
    from agent.cleanup.request import CleanupRequest

# A stop that takes longer is ended the hard way, before the kubelet does so: the chart gives 10 s.
STOP_SECONDS = 9.5
# The same for its last part, when nothing is offered any more: a driver that hangs is not waited for.
TEARDOWN_SECONDS = 3.0
# After the start: a full collection holds the event loop up for 40 ms, and the sockets come first.
COLLECT_SECONDS = 2.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Start:
    """The command line: how to read the configuration, and where its file is."""

    load: Callable[[], Settings]
    nvml: Callable[[Settings], NvmlPort]
    file: Path | None


def run_command(start: Start) -> int:
    """Serve; the exit code. Raises ConfigurationError."""
    loaded = start.load()
    logs.configure(loaded.logging.level, loaded.logging.format)
    return exit_code("agent_failed", _serve, loaded, start)


async def _serve(loaded: Settings, start: Start) -> None:
    stop, hangups = anyio.Event(), Cell(0)
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with anyio.open_signal_receiver(*watched) as signals:
        async with anyio.create_task_group() as obeying:
            obeying.start_soon(_obey, signals, stop, hangups)
            while not stop.is_set():
                left = await _in_service(loaded, start, stop, hangups)
                if left and not stop.is_set():
                    from agent.cleanup.on_request import stand_by  # noqa: PLC0415  loads the API client

                    await stand_by(loaded, await anyio.to_thread.run_sync(start.nvml, loaded), *left, stop)
                    loaded = await anyio.to_thread.run_sync(start.load)
            obeying.cancel_scope.cancel()


async def _in_service(
    loaded: Settings, start: Start, stop: anyio.Event, hangups: Cell[int]
) -> "tuple[str, CleanupRequest] | None":
    """Serve until `stop` (None), or until a clean-up is asked for: the node's name, and the request."""
    # `check` and `version` answer without loading the agent. All that it is made of lives for ever: nobody
    # looks for garbage in it before the sockets are there.
    gc.disable()
    try:
        from agent.app import run as app  # noqa: PLC0415
        from agent.app.reload import Reloader  # noqa: PLC0415
    finally:
        gc.freeze()
        gc.enable()

    left: tuple[str, CleanupRequest] | None = None
    deadlines: list[threading.Timer] = []

    def end_within(seconds: float) -> None:
        deadlines.append(_end_the_hard_way_after(seconds))

    nvml = await anyio.to_thread.run_sync(start.nvml, loaded)
    with contextlib.suppress(app.StoppedEarly):
        async with (
            app.running(loaded, nvml, stop, partial(end_within, TEARDOWN_SECONDS)) as agent,
            anyio.create_task_group() as group,
        ):
            reloader = Reloader(agent, start.load, start.file)
            spawn = agent.core.supervisor.restarting
            group.start_soon(spawn, "configuration", reloader.run)
            group.start_soon(spawn, "reload on SIGHUP", _reload, reloader, hangups)
            if agent.cluster:
                from agent.cleanup.on_request import Requests  # noqa: PLC0415  loads the API client

                own, pods = agent.cluster.node, agent.cluster.pods

                async def leave() -> None:
                    nonlocal left
                    left = own.name, await Requests(loaded, own, pods).accepted()
                    group.cancel_scope.cancel()
                    await anyio.sleep_forever()

                group.start_soon(spawn, "clean-up requests", leave)
            try:
                with anyio.move_on_after(COLLECT_SECONDS):
                    await stop.wait()
                if not stop.is_set():
                    # Objects that live now live for ever: full collections need not look at them again.
                    gc.unfreeze()
                    gc.collect()
                    gc.freeze()
                    await stop.wait()
            finally:
                # A fatal task failed, or a clean-up is wanted: one that hangs must not keep others alive.
                if not stop.is_set():
                    end_within(STOP_SECONDS)
            group.cancel_scope.cancel()
    if left and not stop.is_set():
        for timer in deadlines:
            timer.cancel()
        gc.unfreeze()
    elif not stop.is_set():
        raise FatalError("the agent ended though nothing had asked it to")
    return left


async def _obey(signals: AsyncIterator[signal.Signals], stop: anyio.Event, hangups: Cell[int]) -> None:
    """Answer signals from the first moment on: a start may wait for a lock, a driver or an API server."""
    async for number in signals:
        log.info("signal_received", signal=signal.Signals(number).name)
        if number == signal.SIGHUP:
            hangups.publish(hangups.version + 1)
        elif stop.is_set():
            log.error("stopped_at_once", reason="a second signal came while the agent was stopping")
            os._exit(1)
        else:
            _end_the_hard_way_after(STOP_SECONDS)
            stop.set()


async def _reload(reloader: "Reloader", hangups: Cell[int]) -> None:
    seen = 0
    while True:
        seen = await hangups.wait_change(seen)
        await reloader.reload()


def _end_the_hard_way_after(seconds: float) -> threading.Timer:
    def end() -> None:
        log.error("stop_stalled", seconds=seconds, remedy="see what hangs in the lines before")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
