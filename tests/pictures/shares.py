"""Pods of different size on one GPU: what they asked for, and their parts of it by the agent's status."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from agent.model.modes import PAIRS, Mode, ResourcePair
from agent.model.pod import MPS, VGPU
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from agent.web import control
from agent.web.control import NAME
from tests.component.embedded_rig import embedded_rig
from tests.pictures.svg import COLOURS, GREY, LINE, MONO, PALE, PAPER, box, picture, text
from tests.scenarios.mode_node import mode_node
from tests.scenarios.modes import LAYOUTS

GIB = 1 << 30
TITLE = "Pods of different size on one GPU: as MPS shares, and as fractions"
WORDS = {"mps": "offered as MPS shares", "vgpu": "offered as fractions"}
PODS = (
    ("chat", MPS, 50, 80),
    ("embed", MPS, 30, 36),
    ("notebook", VGPU, 60, 44),
    ("classifier", VGPU, 25, 64),
)  # with cores and GiB
WIDTH, BLOCK, LEFT, GPU_AT, BAR_AT = 1000.0, 166.0, 20.0, 372.0, 456.0
PODS_COLOURS = (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[3])


async def made() -> str:
    """Two pods on a GPU in mode mps, two on one in mode vgpu."""
    async with embedded_rig() as rig, mode_node(rig, layouts=LAYOUTS, vgpu__enforcement="off") as node:
        await node.want("mixed")
        await node.applied("mixed")
        await node.offers("vgpu", 3)
        await node.offers("mps", 2)
        pods = [_pod(*each) for each in PODS]
        for pod in pods:
            await node.create(pod)
        for pod in pods:
            await rig.wait_phase(pod, Phase.RUNNING)
        gpus: list[Mapping[str, Any]] = []
        with anyio.fail_after(20):
            while sum(len(gpu["holders"]) for gpu in gpus) < len(pods):
                await anyio.sleep(0.1)
                report = await anyio.to_thread.run_sync(partial(control.ask, node.folder / NAME, "status"))
                gpus = [gpu for gpu in reversed(report["gpus"]) if gpu["holders"]]
    return drawn(gpus)


def _pod(name: str, pair: ResourcePair, cores: int, gib: int) -> PodSpec:
    limits = {pair.core: cores, pair.memory: gib * GIB // pair.block_bytes}
    return PodSpec(name, (ContainerSpec("main", limits),))


def drawn(gpus: Sequence[Mapping[str, Any]]) -> str:
    """A block for each GPU of the status: pods on the left, the GPU's compute and memory on the right."""
    height = 14 + BLOCK * len(gpus)
    parts = [box(0, 0, WIDTH, height, fill=PAPER)]
    colours = iter(PODS_COLOURS)
    for number, gpu in enumerate(gpus):
        parts += _block(gpu, 14 + number * BLOCK, [next(colours) for _ in gpu["holders"]])
    return picture(WIDTH, height, TITLE, parts)


def _block(gpu: Mapping[str, Any], y: float, colours: Sequence[str]) -> list[str]:
    mode = gpu["mode"]["active"]
    pair = PAIRS[Mode(mode)]
    holders = [(each["pod"].rpartition("/")[2], each["units"]) for each in gpu["holders"]]
    parts = []
    for number, ((pod, units), colour) in enumerate(zip(holders, colours, strict=True)):
        top = y + 76 * number
        parts += [
            box(LEFT, top, 320, 66, rx=6, fill=PALE, stroke=colour, stroke_width=2.5),
            text(LEFT + 14, top + 21, f"pod {pod} asks for", size=13, font_weight="bold"),
            *(
                text(LEFT + 14, top + 40 + 17 * at, f"{name}: {units[name]}", size=11.5, font_family=MONO)
                for at, name in enumerate((pair.core, pair.memory))
            ),
        ]
    parts += [
        box(GPU_AT, y, WIDTH - GPU_AT - 20, 142, rx=6, fill=PAPER, stroke=LINE, stroke_width=1.5),
        text(GPU_AT + 14, y + 23, f"GPU {gpu['index']}, {WORDS[mode]}", size=13, font_weight="bold"),
        text(
            WIDTH - 34,
            y + 23,
            f"{gpu['model']}, {gpu['memoryBytes'] / GIB:.0f} GiB",
            size=12,
            fill=GREY,
            text_anchor="end",
        ),
    ]
    cores = [(units[pair.core] / 100, f"{pod} {units[pair.core]} %") for pod, units in holders]
    memory = [
        (units[pair.memory] * pair.block_bytes / gpu["memoryBytes"], f"{pod} {_gib(units, pair)} GiB")
        for pod, units in holders
    ]
    for at, (words, segments) in enumerate((("compute", cores), ("memory", memory))):
        parts += _bar(words, y + 40 + 48 * at, list(zip(segments, colours, strict=True)))
    return parts


def _gib(units: Mapping[str, int], pair: ResourcePair) -> int:
    return units[pair.memory] * pair.block_bytes // GIB


def _bar(words: str, y: float, segments: Sequence[tuple[tuple[float, str], str]]) -> list[str]:
    width = WIDTH - BAR_AT - 40
    parts = [
        text(GPU_AT + 14, y + 24, words, size=12, fill=GREY),
        box(BAR_AT, y, width, 38, fill=PALE, stroke=LINE),
    ]
    x = BAR_AT
    for (part, label), colour in segments:
        parts.append(box(x, y, width * part, 38, fill=colour, opacity=0.3, stroke=colour))
        parts.append(text(x + 8, y + 24, label, size=12))
        x += width * part
    parts.append(text(x + 8, y + 24, "free", size=12, fill=GREY))
    return parts
