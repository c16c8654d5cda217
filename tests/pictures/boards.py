"""The dashboards: their own queries, answered by a real Prometheus beside a simulated node, drawn by us.

Grafana is not used, and pictures do not claim it. The recording rules run with their own windows.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import anyio
import anyio.to_thread
import yaml

from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import Prometheus, prometheus
from tests.component.monitoring.test_prometheus import KUBE_STATE_METRICS, page_of, port_of
from tests.pictures import charts, chromium
from tests.pictures.charts import Series
from tests.pictures.svg import SANS
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.modes import LAYOUTS
from tests.scenarios.monitoring import MODES, Work

SECONDS = 150  # that are recorded, and shown
COLUMN, ROW, GAP = 50, 30, 8  # pixels of the dashboards' grid of 24 columns
HEAD = 60


def make(folder: Path) -> None:
    """A PNG for each dashboard."""
    chromium.ready()
    pages = anyio.run(_pages)
    for name, (page, height) in pages.items():
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "page.html"
            file.write_text(page, encoding="utf-8")
            chromium.screenshot(file, 24 * COLUMN + 2 * GAP, height, folder / f"{name}.png")


async def _pages() -> Mapping[str, tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="gna-") as folder:
        async with (
            embedded_rig() as rig,
            mode_node(rig, layouts=LAYOUTS, mps__probeSeconds=0.5, sampling__activity=True) as node,
            anyio.create_task_group() as group,
        ):
            port = await port_of(node)
            async with (
                page_of(KUBE_STATE_METRICS.read_text() + "".join(_owners())) as others,
                prometheus(Path(folder), port, _rules(), {"kube-state-metrics": others}) as server,
            ):
                await node.want("mixed")
                await node.applied("mixed")
                work = await _at_work(node)
                group.start_soon(work.run)
                await _day(rig, node, work)
                found = {path.stem: await _page(server, path) for path in queries.DASHBOARDS}
            group.cancel_scope.cancel()
    return found


OWNERS = {
    "train": ("Job", "train-17"),
    "notebook": ("StatefulSet", "notebook"),
    "classifier": ("ReplicaSet", "classifier-6c8d9f7b5d"),
    "late-model": ("ReplicaSet", "late-model-7b9c4d5f6"),
    "chat": ("ReplicaSet", "chat-5d4f8b9c7"),
    "embed": ("<none>", "<none>"),
}


def _owners() -> Iterator[str]:
    """The controllers of the pods below, as kube-state-metrics has them."""
    for pod, (kind, name) in OWNERS.items():
        labels = f'namespace="default",pod="{pod}",owner_kind="{kind}",owner_name="{name}"'
        yield f'kube_pod_owner{{{labels},owner_is_controller="true"}} 1\n'


def _rules() -> dict[str, str]:
    """The rule files with their own windows, evaluated at the pace of the scrapes."""
    found = {}
    for path in queries.RULES:
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            group.pop("interval", None)
        found[path.name] = yaml.safe_dump(document)
    return found


async def _at_work(node: ModeNode) -> Work:
    work = Work(node)
    for mode, names in zip(MODES, (("train",), ("notebook", "classifier"), ("chat", "embed")), strict=True):
        for pod in await node.run(mode, *names):
            await work.start(pod, mode, 3000 + 60000 * (mode == "pgpu"), 10)
    return work


async def _day(rig: EmbeddedRig, node: ModeNode, work: Work) -> None:
    """Load that goes up and down, for `SECONDS`."""
    began = anyio.current_time()
    busy = {0: 1.0, 3: 0.35, 6: 0.3}  # the GPUs that pods are on
    while (now := anyio.current_time() - began) < SECONDS:
        for slot in range(8):
            share = busy.get(slot, 0.0) * (0.72 + 0.22 * math.sin(now / 11 + slot))
            percent = int(100 * share)
            rig.machine.load(
                slot, utilization=percent, power_w=74 + 5.6 * percent, temperature_c=31 + percent // 3
            )
            parts = (percent, percent * 4 // 5, percent // 3, percent // 2)
            rig.machine.gpu(slot).activity[:] = list(parts)
        for number, pid in enumerate(work.shares):
            most = (92, 18, 14, 16, 12, 13)[number % 6]
            work.shares[pid] = max(1, int(most * (0.75 + 0.25 * math.sin(now / 9 + number))))
        if now > SECONDS / 2 and len(node.pods) == 5:
            (late,) = await node.run("vgpu", "late-model")
            await work.start(late, "vgpu", 5000, 15)
        await anyio.sleep(0.5)


async def _page(server: Prometheus, path: Path) -> tuple[str, int]:
    board = json.loads(await anyio.to_thread.run_sync(path.read_text))
    names = {each["name"] for each in board["templating"]["list"]}
    cells, bottom = [], 0
    for panel in board["panels"]:
        at = panel["gridPos"]
        series = []
        columns = _columns(panel)
        for target in panel["targets"]:
            column = columns.get(f"Value #{target['refId']}", columns.get("Value", "value"))
            found = await _answer(server, target, names, column)
            series += sorted(found, key=lambda each: each.name)
        width, height = at["w"] * COLUMN - GAP, at["h"] * ROW - GAP
        inner = charts.panel(panel, series, width - 2, height - 30)
        cells.append(
            f'<div style="left:{at["x"] * COLUMN + GAP}px;top:{HEAD + at["y"] * ROW}px;'
            f'width:{width}px;height:{height}px"><b>{escape(panel["title"])}</b>'
            f'<svg width="{width - 2}" height="{height - 30}">{inner}</svg></div>'
        )
        bottom = max(bottom, at["y"] + at["h"])
    style = (
        f"body{{margin:0;background:#e9edf1;font:13px {SANS}}}h1{{font-size:20px;margin:10px 12px 2px}}"
        "p{margin:0 12px;color:#5f6b7a}div{position:absolute;background:#fff;border:1px solid #c3cad3;"
        "border-radius:4px;overflow:hidden}b{display:block;padding:6px 10px 4px;font-weight:600}"
    )
    note = (
        f"The queries of {path.name}, answered by Prometheus over {SECONDS} s beside a simulated node; "
        "drawn by a renderer of this project."
    )
    page = (
        f'<!doctype html><meta charset="utf-8"><style>{style}</style><h1>{escape(board["title"])}</h1>'
        f"<p>{escape(note)}</p>{''.join(cells)}"
    )
    return page, HEAD + bottom * ROW + GAP


def _columns(panel: Mapping[str, Any]) -> Mapping[str, str]:
    """Headings of a table, by the values of its queries."""
    named: dict[str, str] = {}
    for each in panel.get("transformations", ()):
        named |= each["options"].get("renameByName", {})
    return named


async def _answer(
    server: Prometheus, target: Mapping[str, Any], names: set[str], column: str
) -> Sequence[Series]:
    """A target's query with all variables at `All`, over the time of the run."""
    expression = target["expr"].replace("$__rate_interval", "1m")
    for name in names:
        expression = expression.replace(f"${name}", ".*")
    if target.get("instant"):
        vector = await server.query(expression)
        found: Sequence[Mapping[str, Any]] = [
            {"metric": each["metric"], "values": [each["value"]]} for each in vector
        ]
    else:
        found = await server.range(expression, SECONDS, 2)
    legend = target.get("legendFormat", "")
    return [
        Series(
            _named(legend, each["metric"]),
            [(at, float(value)) for at, value in each["values"]],
            each["metric"],
            column,
        )
        for each in found
    ]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    if not legend or legend == "__auto":
        return ", ".join(value for key, value in sorted(labels.items()) if key not in ("job", "instance"))
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
