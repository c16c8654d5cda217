"""Panels of a dashboard as SVG, of what Prometheus answered: no figure is made here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.pictures.svg import COLOURS, GREY, INK, LINE, PALE, PAPER, box, line, text

LEGEND_ROW, LEGEND_ROWS = 16.0, 4  # pixels; lines of names below a chart
BAR = 22.0  # pixels, of one bar at least
TABLE_ROW = 18.0
LETTER = 0.62  # mean width of one, by the size of the letters
NO_DATA = "no data"
_SCALES = {"percent": ("%", 1.0), "percentunit": ("%", 100.0), "celsius": ("°C", 1.0), "watt": ("W", 1.0)}
_SIZES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_BINARY = (("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10))


@dataclass(frozen=True)
class Series:
    """One line of an answer: times and values; the last value is the newest."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Mapping[str, str] = field(default_factory=dict)
    column: str = "value"  # of its value in a table

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][1]


def figure(value: float, unit: str = "") -> str:
    """A number with its unit, short: 42 %, 1.2 GHz."""
    if unit in _SCALES:
        sign, scale = _SCALES[unit]
        return f"{_short(value * scale)} {sign}"
    if unit in ("hertz", "Bps", "bytes"):
        word = {"hertz": "Hz", "Bps": "B/s", "bytes": "B"}[unit]
        for letter, size in _BINARY if unit == "bytes" else _SIZES:
            if abs(value) >= size:
                return f"{_short(value / size)} {letter}{word}"
        return f"{_short(value)} {word}"
    word = unit.removeprefix("suffix:").strip()  # as in a dashboard's file
    return f"{_short(value)} {word}" if word not in ("", "none", "short") else _short(value)


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def timeseries(
    series: Sequence[Series], width: float, height: float, unit: str, empty: str = NO_DATA
) -> list[str]:
    """Lines over time with a scale from zero, and the names of the first few."""
    if not series:
        return _empty(width, height, empty)
    longest = max(len(each.name) for each in series)
    columns = max(2, min(4, int((width - 20) / (longest * 10 * LETTER + 24))))
    places = columns * LEGEND_ROWS
    if len(series) > places:  # lines at 0 may go without a name
        series = sorted(series, key=lambda each: not any(value for _, value in each.points))
    shown = series if len(series) <= places else series[: places - 1]
    names = [each.name for each in shown] + [f"and {len(series) - len(shown)} more"] * (
        len(shown) < len(series)
    )
    rows = math.ceil(len(names) / columns)
    left, bottom = 62.0, 24.0 + rows * LEGEND_ROW
    high = max(value for each in series for _, value in each.points)
    top = _top(high, unit)
    start = min(each.points[0][0] for each in series)
    end = max(start + 1, *(each.points[-1][0] for each in series))
    w, h = width - left - 12, height - bottom - 8
    parts = []
    for step in range(5):
        y = 8 + h * step / 4
        parts.append(line([(left, y), (left + w, y)], stroke=LINE, stroke_width=0.7))
        label = figure(top * (4 - step) / 4, unit)
        parts.append(text(left - 6, y + 4, label, size=10, fill=GREY, text_anchor="end"))
    for step in range(4):
        x, seconds = left + w * step / 3, (end - start) * step / 3
        label = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        anchor = ("start", "middle", "middle", "end")[step]
        parts.append(text(x, 8 + h + 14, label, size=10, fill=GREY, text_anchor=anchor))
    for number, each in enumerate(series):
        points = [
            (left + w * (at - start) / (end - start), 8 + h * (1 - value / top)) for at, value in each.points
        ]
        parts.append(line(points, stroke=COLOURS[number % len(COLOURS)], stroke_width=1.6))
    each_width = (width - 20) / columns
    for number, name in enumerate(names):
        x = 10 + (number % columns) * each_width
        y = height - rows * LEGEND_ROW + (number // columns) * LEGEND_ROW + 8
        colour = COLOURS[number % len(COLOURS)] if number < len(shown) else PAPER
        parts.append(box(x, y - 8, 10, 3, fill=colour))
        parts.append(text(x + 15, y, _cut(name, each_width - 20), size=10))
    return parts


def stat(series: Sequence[Series], width: float, height: float, unit: str, empty: str = NO_DATA) -> list[str]:
    """The newest values, large."""
    if not series:
        return _empty(width, height, empty)
    each, parts = width / len(series), []
    for number, one in enumerate(series):
        x = each * (number + 0.5)
        parts.append(text(x, height / 2 + 8, figure(one.last, unit), size=22, text_anchor="middle"))
        if len(series) > 1:
            name = _cut(one.name, each - 8)
            parts.append(text(x, height / 2 + 26, name, size=10, fill=GREY, text_anchor="middle"))
    return parts


def bars(series: Sequence[Series], width: float, height: float, unit: str, empty: str = NO_DATA) -> list[str]:
    """A bar for each newest value."""
    if not series:
        return _empty(width, height, empty)
    most = 100.0 if unit == "percent" else _round_up(max(each.last for each in series))
    shown = series[: max(1, int((height - 8) // BAR))]
    pitch = min(2 * BAR, (height - 8) / len(shown))
    longest = max(len(each.name) for each in shown) * 11 * LETTER + 8
    names = min(longest, width / 2)
    at, room = 16 + names, width - names - 100
    parts = []
    for number, each in enumerate(shown):
        y = 6.0 + number * pitch
        share = min(1.0, max(0.0, each.last / most))
        words, thick = y + pitch / 2 + 2, pitch - 8
        parts += [
            text(10, words, _cut(each.name, names, 11), size=11),
            box(at, y + 2, room, thick, fill=PALE),
            box(at, y + 2, max(1.0, room * share), thick, fill=COLOURS[0]),
            text(width - 10, words, figure(each.last, unit), size=11, text_anchor="end"),
        ]
    return parts


def table(
    series: Sequence[Series],
    columns: Sequence[str],
    width: float,
    height: float,
    unit: str,
    empty: str = NO_DATA,
) -> list[str]:
    """A row for each set of labels, with the newest values last; one of column "" has none."""
    if not series:
        return _empty(width, height, empty)
    values = [each for each in dict.fromkeys(one.column for one in series) if each]
    merged: dict[tuple[str, ...], dict[str, str]] = {}
    for one in series:
        row_of = merged.setdefault(tuple(one.labels.get(column, "") for column in columns), {})
        row_of[one.column] = figure(one.last, unit)
    rows = [[*key, *(found.get(value, "") for value in values)] for key, found in merged.items()]
    names = [*columns, *values]
    lengths = [max(len(name), *(min(40, len(row[at])) for row in rows)) + 1 for at, name in enumerate(names)]
    each = (width - 20) / sum(lengths)
    places = [10 + each * sum(lengths[:at]) for at in range(len(names))]
    parts = [text(x, 16, name, size=11, fill=GREY) for x, name in zip(places, names, strict=True)]
    for number, row in enumerate(rows[: int((height - 26) // TABLE_ROW)]):
        y = 34.0 + TABLE_ROW * number
        parts.append(line([(10, y - 13), (width - 10, y - 13)], stroke=LINE, stroke_width=0.7))
        cells = zip(places, row, lengths, strict=True)
        parts += [
            text(x, y, _cut(cell, length * each - 4, 11), size=11, fill=INK) for x, cell, length in cells
        ]
    return parts


def panel(shown: Mapping[str, Any], series: Sequence[Series], width: float, height: float) -> str:
    """The inside of a panel of a dashboard's file, by its type."""
    defaults = shown.get("fieldConfig", {}).get("defaults", {})
    unit, empty = str(defaults.get("unit", "")), str(defaults.get("noValue", NO_DATA))
    kind = shown["type"]
    if kind == "timeseries":
        parts = timeseries(series, width, height, unit, empty)
    elif kind == "stat":
        parts = stat(series, width, height, unit, empty)
    elif kind == "bargauge":
        parts = bars(series, width, height, unit, empty)
    else:
        labels = sorted({key for each in series for key in each.labels} - {"__name__", "job", "instance"})
        parts = table(series, labels[:8], width, height, unit, empty)
    return box(0, 0, width, height, fill=PAPER) + "".join(parts)


def _empty(width: float, height: float, words: str) -> list[str]:
    return [text(width / 2, height / 2, words, size=12, fill=GREY, text_anchor="middle")]


def _top(value: float, unit: str) -> float:
    """Of a scale: a round figure as it is written."""
    size = next((size for _, size in _BINARY if unit == "bytes" and value >= size), 1.0)
    return _round_up(value / size) * size


def _round_up(value: float) -> float:
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value))


def _cut(words: str, width: float, size: float = 10) -> str:
    most = max(4, int(width / (size * LETTER)))
    return words if len(words) <= most else f"{words[: most - 1]}…"
