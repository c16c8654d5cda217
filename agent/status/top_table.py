"""The document of `gpu-node-agent top` as text for a terminal."""

from collections.abc import Iterator
from typing import Any

from agent.status.table import table

GIB = 1 << 30
BAR = 10
# None of these is trouble: an idle GPU, and clocks as configured.
QUIET_REASONS = ("idle", "applications_clocks", "display_clocks", "sync_boost")
_GRADE_MARK = {"measured": " ", "estimated": "~", "allocated": "?"}

Document = dict[str, Any]


def render(shown: Document, columns: int = 0, rows: int = 0) -> str:
    """The document as two tables, without a line feed at the end; 0: nothing is cut.

    On a terminal's `rows`, less one for the cursor, the GPUs come first, then as many containers as fit.
    """
    lines = list(_lines(shown))
    room = rows - 1
    if rows and len(lines) > room:
        kept = max(1, room - 1)
        more = len(lines) - kept
        lines = [*lines[:kept], f"... {more} more lines: a higher terminal, --once or -o json shows them"]
    return "\n".join(line[:columns] if columns else line for line in lines)


def _lines(shown: Document) -> Iterator[str]:
    head = (
        "GPU",
        "MODEL",
        "MODE",
        "HEALTH",
        "USE",
        "",
        "PEAK",
        "MEMORY GiB",
        "POWER W",
        "TEMP",
        "SM MHz",
        "PROC",
    )
    yield from table([head, *(_gpu_row(gpu) for gpu in shown["gpus"])])
    for gpu in shown["gpus"]:
        reasons = [each for each in gpu.get("throttledBy", ()) if each not in QUIET_REASONS]
        if reasons:
            yield f"GPU {gpu['index']}: clocks are held down by {', '.join(reasons)}"
    yield ""
    if not shown["containers"]:
        yield "no container holds a GPU"
        return
    title = ("NAMESPACE/POD", "CONTAINER", "GPU", "MODE", "USE", "OF", "PEAK", "MEMORY GiB", "OF", "PROC")
    rows = sorted(shown["containers"], key=_busiest_first)
    cells = [title, *(_container_row(each) for each in rows)]
    if any(each.get("coreAllottedRatio") is not None for each in rows):
        # Beside the request of the pod: the share in force now.
        got = ("GOT", *(_percent(each.get("coreAllottedRatio")) for each in rows))
        cells = [(*row[:6], more, *row[6:]) for row, more in zip(cells, got, strict=True)]
    yield from table(cells)
    grades = {each["utilizationAttribution"] for each in rows} | {each["memoryAttribution"] for each in rows}
    if "estimated" in grades:
        yield "~ estimated: the driver has no figures by container; shared out by limits"
    if "allocated" in grades:
        yield "? the driver reports nothing of this GPU; only what was allocated is known"


def _gpu_row(gpu: Document) -> tuple[str, ...]:
    name = (str(gpu["index"]), gpu["model"], gpu["mode"], gpu["health"])
    total = gpu["memoryTotalBytes"] / GIB
    if not gpu["sampled"]:
        return (*name, "-", "", "-", f"- / {total:.0f}", "-", "-", "-", "-")
    peak = gpu["window"].get("utilization", {}).get("max")
    limit = gpu["powerLimitWatts"]
    power = _number(gpu["powerWatts"]) + (f" / {limit:.0f}" if limit else "")
    heat = "-" if gpu["temperatureCelsius"] is None else f"{gpu['temperatureCelsius']:.0f} C"
    return (
        *name,
        _percent(gpu["utilizationRatio"]),
        _bar(gpu["utilizationRatio"]),
        _percent(peak),
        f"{gpu['memoryUsedBytes'] / GIB:.1f} / {total:.0f}",
        power,
        heat,
        _number(gpu["smClockMhz"]),
        _number(gpu["processes"]),
    )


def _busiest_first(each: Document) -> tuple[float, float]:
    return (-(each["utilizationRatio"] or 0), -(each["memoryUsedBytes"] or 0))


def _container_row(each: Document) -> tuple[str, ...]:
    return (
        f"{each['namespace']}/{each['pod']}",
        each["container"],
        str(each["gpu"]),
        each["mode"],
        _GRADE_MARK[each["utilizationAttribution"]] + _percent(each["utilizationRatio"]),
        _percent(each["coreLimitRatio"]),
        _percent(each["utilizationMaxRatio"]),
        _GRADE_MARK[each["memoryAttribution"]] + _gib(each["memoryUsedBytes"]),
        f"{each['memoryLimitBytes'] / GIB:.1f}",
        _number(each["processes"]),
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.0f} %"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bar(ratio: float | None) -> str:
    filled = round((ratio or 0.0) * BAR)
    return "[" + "|" * filled + " " * (BAR - filled) + "]"
