"""`gpu-node-agent simulate`: the real agent on a simulated node, shown to a person."""

import io
import signal
import sys
from collections import deque
from typing import TextIO

import anyio

from agent.kit import logs
from agent.kit.tasks import describe
from agent.simulator.demo.page import show_page
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import NotAsTold, stage
from agent.simulator.demo.story import Story
from agent.simulator.profiles import profile_named

PATIENCE_SECONDS = 60.0  # all comes within one or two; a laptop may be busy
STATUS_TICK_SECONDS = 0.1
LOG_LINES = 15


class _Tail(io.TextIOBase):
    """The last lines of the agent's log, for the case that something goes wrong."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LOG_LINES)

    def write(self, text: str) -> int:
        self.lines.extend(line for line in text.splitlines() if line)
        return len(text)


def main(profile: str, page: bool = False) -> int:
    """Show the demo on standard output. Exit code 0: all happened as announced, 1: not, 2: wrong profile.

    `page`: then serve the page of the node until interrupted.
    """
    try:
        profile_named(profile)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    tail = _Tail()
    logs.configure("info", "json", tail)  # type: ignore[arg-type]
    code = show(profile, sys.stdout, page=page)
    if code:
        print("The agent's last log lines:", *tail.lines, sep="\n  ", file=sys.stderr)
    return code


def show(
    profile: str,
    out: TextIO,
    patience: float = PATIENCE_SECONDS,
    status_tick: float = STATUS_TICK_SECONDS,
    page: bool = False,
) -> int:
    """The demo on `out`; 0 or 1, 128 + N after signal N. Runs an event loop of its own."""
    screen = Screen(out)

    async def perform() -> int:
        interruption = 0
        seen_all = False
        async with anyio.create_task_group() as group:

            async def heed_signals() -> None:
                nonlocal interruption
                with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async for number in signals:
                        interruption = number
                        group.cancel_scope.cancel()

            group.start_soon(heed_signals)
            async with stage(profile, patience, status_tick) as set_up:
                await Story(set_up, screen).tell()
                seen_all = True
                if page:
                    await show_page(set_up, screen)
            if await anyio.Path(set_up.folder).exists():
                raise NotAsTold(f"{set_up.folder} is still there")
            screen.gap()
            screen.title(
                f"All of this was seen and checked ({set_up.checked} checks). Nothing is left behind."
            )
            group.cancel_scope.cancel()
        return 128 + interruption if interruption and not (page and seen_all) else 0

    try:
        return anyio.run(perform)
    except Exception as error:  # noqa: BLE001  a sentence for the reader instead of a traceback
        screen.missed(f"This did not happen as announced: {_reason(error)}.")
        return 1


def _reason(error: BaseException) -> str:
    """The step that the story missed, or the fault elsewhere."""
    if isinstance(error, BaseExceptionGroup):
        announced, _ = error.split(NotAsTold)
        return describe(error) if announced is None else "; ".join(map(str, _leaves(announced)))
    return str(error) if isinstance(error, NotAsTold) else describe(error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf
        for each in group.exceptions
        for leaf in (_leaves(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]
