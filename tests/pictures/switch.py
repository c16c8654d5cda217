"""A label switch on a busy node: recorded from the real agent on the simulated machine, and drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from agent.web import control
from agent.web.control import NAME
from tests.component.embedded_rig import embedded_rig
from tests.pictures.svg import GREY, INK, LINE, MODES, PAPER, box, element, line, picture, text
from tests.scenarios.mode_node import GPUS, ModeNode, mode_node

STEP = 0.05
LEFT, TOP, ROW, WIDTH, BOTTOM = 70.0, 74.0, 34.0, 1000.0, 66.0


@dataclass(frozen=True)
class Look:
    """One GPU at one moment: `mode` is what it is offered as, `drains` with pods that end first."""

    mode: str
    drains: bool
    holders: tuple[str, ...]


@dataclass
class Record:
    """Looks at all GPUs by seconds since the beginning, and what was done when."""

    times: list[float]
    looks: list[Sequence[Look]]
    acts: list[tuple[float, str]]


async def recorded() -> Record:
    """Three pods on whole GPUs; the label says vgpu; the pods end one by one; shares come at once."""
    async with embedded_rig() as rig, mode_node(rig) as node, anyio.create_task_group() as group:
        await node.want("pgpu")
        await node.applied("pgpu")
        await node.offers("pgpu")
        pods = await node.run("pgpu", "train-a", "train-b", "train-c")
        record, began = Record([], [], []), anyio.current_time()
        group.start_soon(_follow, node, record, began)

        def act(words: str) -> None:
            record.acts.append((anyio.current_time() - began, words))

        await anyio.sleep(0.7)
        act("label: vgpu")
        await node.want("vgpu")
        await node.offers("vgpu", GPUS - len(pods))
        shares = await node.run("vgpu", "web-1", "web-2")
        act("2 shares come")
        for pod in pods:
            await anyio.sleep(0.9)
            act(f"{pod.name} ends")
            await node.end(pod)
        await node.applied("vgpu")
        shares += await node.run("vgpu", "web-3")
        await anyio.sleep(0.8)
        group.cancel_scope.cancel()
    return record


async def _follow(node: ModeNode, record: Record, began: float) -> None:
    while True:
        report = await anyio.to_thread.run_sync(partial(control.ask, node.folder / NAME, "status"))
        record.times.append(anyio.current_time() - began)
        record.looks.append([_look(gpu) for gpu in report["gpus"]])
        await anyio.sleep(STEP)


def _look(gpu: Mapping[str, Any]) -> Look:
    mode, holders = gpu["mode"], tuple(sorted({each["pod"].rpartition("/")[2] for each in gpu["holders"]}))
    return Look(str(mode["active"]), mode["wanted"] != mode["active"] and bool(holders), holders)


def stretches(times: Sequence[float], looks: Sequence[Look]) -> Iterator[tuple[float, float, Look]]:
    """Equal looks that follow each other: from, to."""
    start = 0
    for at in range(1, len(looks) + 1):
        if at == len(looks) or looks[at] != looks[start]:
            yield times[start], times[min(at, len(looks) - 1)], looks[start]
            start = at


def drawn(record: Record) -> str:
    """GPUs from top to bottom, time from left to right."""
    seconds = record.times[-1]
    scale = (WIDTH - LEFT - 20) / seconds
    gpus = len(record.looks[0])
    height = TOP + gpus * ROW + BOTTOM
    stripes = element(
        "pattern",
        box(0, 0, 8, 8, fill=MODES["pgpu"])
        + line([(0, 8), (8, 0)], stroke=PAPER, stroke_width=2, opacity=0.75),
        id="drains",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )
    parts = [box(0, 0, WIDTH, height, fill=PAPER), element("defs", stripes)]
    for gpu in range(gpus):
        y = TOP + gpu * ROW
        parts.append(text(14, y + 21, f"GPU {gpu}", size=12.5))
        for start, end, look in stretches(record.times, [each[gpu] for each in record.looks]):
            parts += _bar(LEFT + start * scale, y, (end - start) * scale, look)
    last, level = -1e9, 0
    for at, words in record.acts:
        x = LEFT + at * scale
        level = 1 - level if x - last < 110 else 0
        last = x
        parts.append(
            line([(x, TOP - 8 - 16 * level), (x, TOP + gpus * ROW)], stroke=INK, stroke_dasharray="3 3")
        )
        parts.append(text(x + 3, TOP - 12 - 16 * level, words, size=12, font_weight="bold"))
    parts += _legend(height - 40)
    ticks = (
        text(LEFT + n * scale, height - BOTTOM + 16, f"{n} s", size=11, fill=GREY)
        for n in range(int(seconds) + 1)
    )
    parts += ticks
    return picture(WIDTH, height, "A node is switched from whole GPUs to fractions while pods run", parts)


def _bar(x: float, y: float, width: float, look: Look) -> list[str]:
    held = bool(look.holders)
    colour = MODES.get(look.mode, GREY)
    fill = "url(#drains)" if look.drains else colour
    bar = box(x, y + 4, max(width, 0.5), ROW - 8, fill=fill, opacity=None if held else 0.28, stroke=LINE)
    words = ", ".join(look.holders)
    if not held or width < 8 * len(words):
        return [bar]
    paper = box(x + 4, y + 9, 7.4 * len(words) + 6, ROW - 18, rx=3, fill=PAPER, opacity=0.9)
    return [bar, paper, text(x + 7, y + 21, words, size=11.5)]


def _legend(y: float) -> list[str]:
    parts, x = [], LEFT
    for words, fill, faint in (
        ("whole GPU, held by a pod", MODES["pgpu"], False),
        ("held and draining: no new pods", "url(#drains)", False),
        ("whole GPU, free", MODES["pgpu"], True),
        ("fractions, held", MODES["vgpu"], False),
        ("fractions, free", MODES["vgpu"], True),
    ):
        parts += [
            box(x, y, 18, 14, fill=fill, opacity=0.28 if faint else None, stroke=LINE),
            text(x + 24, y + 12, words, size=12),
        ]
        x += 40 + 7.2 * len(words)
    return parts
