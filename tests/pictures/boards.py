"""The dashboards: their own queries, answered by a real Prometheus beside simulated nodes, drawn by us.

Grafana is not used, and pictures do not claim it.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import anyio
import anyio.to_thread

from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import Prometheus
from tests.pictures import charts, chromium, fleet
from tests.pictures.charts import Series
from tests.pictures.svg import SANS

COLUMN, ROW, GAP = 50, 30, 8  # pixels of the dashboards' grid of 24 columns
HEAD = 60
# Of a dashboard's variables; all others stand at `All`.
CHOSEN: Mapping[str, Mapping[str, str]] = {
    "gpu-node-monitoring": {"node": "gpu-1"},
    "gpu-pod-monitoring": {"namespace": "search"},
}


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
    async with fleet.recorded() as server:
        return {path.stem: await _page(server, path) for path in queries.DASHBOARDS}


async def _page(server: Prometheus, path: Path) -> tuple[str, int]:
    board = json.loads(await anyio.to_thread.run_sync(path.read_text))
    chosen = CHOSEN.get(path.stem, {})
    names = {each["name"]: chosen.get(each["name"], ".*") for each in board["templating"]["list"]}
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
        f"The queries of {path.name}, answered by Prometheus over {fleet.SECONDS} s beside four simulated "
        f"nodes{_shown_for(chosen)}; drawn by a renderer of this project."
    )
    page = (
        f'<!doctype html><meta charset="utf-8"><style>{style}</style><h1>{escape(board["title"])}</h1>'
        f"<p>{escape(note)}</p>{''.join(cells)}"
    )
    return page, HEAD + bottom * ROW + GAP


def _shown_for(chosen: Mapping[str, str]) -> str:
    return "".join(f", {name} {value}" for name, value in chosen.items())


def _columns(panel: Mapping[str, Any]) -> Mapping[str, str]:
    """Headings of a table, by the values of its queries; empty for values that it does not show."""
    named: dict[str, str] = {}
    for each in panel.get("transformations", ()):
        named |= each["options"].get("renameByName", {})
        named |= {name: "" for name, out in each["options"].get("excludeByName", {}).items() if out}
    return named


async def _answer(
    server: Prometheus, target: Mapping[str, Any], names: Mapping[str, str], column: str
) -> Sequence[Series]:
    """A target's query over the time of the run."""
    expression = target["expr"].replace("$__rate_interval", "1m")
    for name, value in names.items():
        expression = expression.replace(f"${name}", value)
    if target.get("instant"):
        vector = await server.query(expression)
        found: Sequence[Mapping[str, Any]] = [
            {"metric": each["metric"], "values": [each["value"]]} for each in vector
        ]
    else:
        found = await server.range(expression, fleet.SECONDS, 2)
    legend = target.get("legendFormat", "")
    lines = [
        Series(
            _named(legend, each["metric"]),
            # 0 / 0 is a gap in a line.
            [(at, float(value)) for at, value in each["values"] if value != "NaN"],
            each["metric"],
            column,
        )
        for each in found
    ]
    return [each for each in lines if each.points]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    if not legend or legend == "__auto":
        return ", ".join(value for key, value in sorted(labels.items()) if key not in ("job", "instance"))
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
