"""GPUs over time: looked at through `status` of the real agent on the simulated machine, and drawn."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent.model.modes import PAIRS
from agent.web import control
from agent.web.control import NAME
from tests.pictures.svg import GREY, INK, LINE, MODES, PAPER, box, element, line, picture, text

STEP = 0.05
LEFT, ROW, WIDTH, BOTTOM = 70.0, 44.0, 1000.0, 58.0
PAD = 3.0  # above and below a bar
LEVEL = 17.0  # between lines of words above the bars
ADVANCE = 7.4  # of a letter of these words
FREE = 0.28  # opacity of what nobody holds
CORES, MEMORY = ({getattr(pair, half) for pair in PAIRS.values()} for half in ("core", "memory"))
# Part of the legend: words, colour, whether it is free.
Legend = Sequence[tuple[str, str, bool]]


@dataclass(frozen=True)
class Look:
    """One GPU at one moment: `mode` is what it is offered as, `drains` with pods that end first."""

    mode: str
    drains: bool
    holders: tuple[tuple[str, float], ...]  # pods, each with its part of the GPU


@dataclass
class Record:
    """Looks at all GPUs by seconds since the beginning, and what was done when."""

    times: list[float] = field(default_factory=list)
    looks: list[Sequence[Look]] = field(default_factory=list)
    acts: list[tuple[float, str]] = field(default_factory=list)


@asynccontextmanager
async def recording(run: Path) -> AsyncIterator[tuple[Record, Callable[[str], None]]]:
    """Look at the agent of this run folder as long as it lasts; the function notes an act."""
    record, began = Record(), anyio.current_time()

    def act(words: str) -> None:
        record.acts.append((anyio.current_time() - began, words))

    async with anyio.create_task_group() as group:
        group.start_soon(_follow, run, record, began)
        yield record, act
        group.cancel_scope.cancel()


async def _follow(run: Path, record: Record, began: float) -> None:
    while True:
        report = await anyio.to_thread.run_sync(partial(control.ask, run / NAME, "status"))
        record.times.append(anyio.current_time() - began)
        record.looks.append([_look(gpu) for gpu in report["gpus"]])
        await anyio.sleep(STEP)


def _look(gpu: Mapping[str, Any]) -> Look:
    mode = gpu["mode"]
    holders = tuple(sorted((each["pod"].rpartition("/")[2], _part(each["units"])) for each in gpu["holders"]))
    leaves = mode["door"] != "dra" and mode["wanted"] != mode["active"]
    return Look(str(mode["active"]), leaves and bool(holders), holders)


def _part(units: Mapping[str, int]) -> float:
    """The kubelet records one half of a pair after the other: that of memory says nothing of compute."""
    whole = 0.0 if MEMORY & units.keys() else 1.0
    return next((count / 100 for name, count in units.items() if name in CORES), whole)


def stretches(times: Sequence[float], looks: Sequence[Look]) -> Iterator[tuple[float, float, Look]]:
    """Equal looks that follow each other: from, to."""
    start = 0
    for at in range(1, len(looks) + 1):
        if at == len(looks) or looks[at] != looks[start]:
            yield times[start], times[min(at, len(looks) - 1)], looks[start]
            start = at


def drawn(record: Record, title: str, legend: Legend) -> str:
    """GPUs from top to bottom, time from left to right, the parts of a GPU by height."""
    seconds = record.times[-1]
    scale = (WIDTH - LEFT - 20) / seconds
    gpus = len(record.looks[0])
    acts = [(LEFT + at * scale, words) for at, words in record.acts]
    levels = _levels(acts)
    top = 32 + LEVEL * max(levels, default=0)
    bottom = top + gpus * ROW
    stripes = element(
        "pattern",
        box(0, 0, 8, 8, fill=MODES["pgpu"])
        + line([(0, 8), (8, 0)], stroke=PAPER, stroke_width=2, opacity=0.75),
        id="drains",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )
    parts = [box(0, 0, WIDTH, bottom + BOTTOM, fill=PAPER), element("defs", stripes)]
    for gpu in range(gpus):
        y = top + gpu * ROW
        parts.append(text(14, y + ROW / 2 + 4, f"GPU {gpu}", size=12.5))
        for start, end, look in stretches(record.times, [each[gpu] for each in record.looks]):
            parts += _bar(LEFT + start * scale, y, (end - start) * scale, look)
    for (x, words), level in zip(acts, levels, strict=True):
        y = top - 8 - LEVEL * level
        parts.append(line([(x, y - 10), (x, bottom)], stroke=INK, stroke_dasharray="3 3"))
        parts.append(text(x + 4, y, words, size=12, font_weight="bold"))
    parts += (
        text(LEFT + n * scale, bottom + 16, f"{n} s", size=11, fill=GREY) for n in range(int(seconds) + 1)
    )
    parts += _legend(bottom + BOTTOM - 30, legend)
    return picture(WIDTH, bottom + BOTTOM, title, parts)


def _levels(acts: Sequence[tuple[float, str]]) -> Sequence[int]:
    """How high the words of each stand: above those that they would reach, so that no line crosses words."""
    levels: list[int] = []  # from the last act to the first
    for at in reversed(range(len(acts))):
        x, words = acts[at]
        reached = [
            level
            for (other, _), level in zip(reversed(acts), levels, strict=False)
            if other < x + ADVANCE * len(words) + 12
        ]
        levels.append(max(reached, default=-1) + 1)
    return levels[::-1]


def _bar(x: float, y: float, width: float, look: Look) -> list[str]:
    room = ROW - 2 * PAD
    width = max(width, 0.5)
    colour = MODES.get(look.mode, GREY)
    parts = [box(x, y + PAD, width, room, fill=colour, opacity=FREE, stroke=LINE)]
    top = y + PAD
    for pod, part in look.holders:
        high = room * part
        fill = "url(#drains)" if look.drains else colour
        parts.append(box(x, top, width, high, fill=fill, stroke=PAPER, stroke_width=0.6))
        words = pod if part == 1 else f"{pod} {part:.0%}".replace("%", " %")
        if width > ADVANCE * len(words) + 12 and high > 9:
            parts += _label(x + 4, top + high / 2, min(high - 1.5, 16.0), words)
        top += high
    return parts


def _label(x: float, middle: float, high: float, words: str) -> list[str]:
    size = min(11.5, high)
    return [
        box(x, middle - high / 2, 0.64 * size * len(words) + 8, high, rx=3, fill=PAPER),
        text(x + 4, middle + size * 0.36, words, size=size),
    ]


def _legend(y: float, legend: Legend) -> list[str]:
    parts, x = [], LEFT
    for words, fill, faint in legend:
        parts += [
            box(x, y, 18, 14, fill=fill, opacity=FREE if faint else None, stroke=LINE),
            text(x + 24, y + 12, words, size=12),
        ]
        x += 40 + 7.2 * len(words)
    return parts
