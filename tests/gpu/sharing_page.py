"""The page of `tests.gpu.sharing`, and its figures as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ALONE, MPS = "alone", "MPS"
CALLS = "calls"
SIMULATION = "simulation-"  # what file names of figures of a simulated GPU begin with
_LOADS = {
    "decode": "steps of a decode loop, each one CUDA graph of 64 kernels and one token fetched",
    "serve": "requests of two kernels of 5 ms, one every 50 ms; time from when it was due",
    "busy": "training: kernels of 2 ms, four of them always queued; time from one's end to the next one's",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one tenant; seconds."""

    mode: str
    load: str
    share: int | None  # percent that it was held to; 100: to nothing, None: it has no library
    per_second: float
    p50: float
    p99: float
    factor: float | None  # at the end: how much of its share a second of learned time was worth

    @classmethod
    def of(
        cls, mode: str, load: str, share: int | None, result: Mapping[str, Any], factor: float | None
    ) -> "Row":
        """From what its program printed. Raises ValueError where it did nothing."""
        if not result.get("runs"):
            raise ValueError(f"{load}, {mode}: nothing ran within the time: {dict(result)}")
        per_second = result["runs"] / result["seconds"]
        return cls(mode, load, share, per_second, result["p50"], result["p99"], factor)


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `cases` are rows of tenants that ran at once."""

    machine: str
    simulated: bool
    seconds: float
    kernels: Mapping[str, float]  # microseconds
    cases: tuple[tuple[Row, ...], ...]
    missing: tuple[str, ...] = ()  # cases that could not be measured, and why


def write(report: Report, file: Path) -> Path:
    """Write the page and the JSON beside it; where. Blocks.

    Figures of a simulated GPU are never written under the name that was asked for.
    """
    target = file.with_name(SIMULATION + file.name) if report.simulated else file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(report), encoding="utf-8")
    target.with_suffix(".json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return target


def render(report: Report) -> str:
    """The page."""
    title = "Simulation: vGPU on a simulated GPU" if report.simulated else "vGPU on hardware"
    parts = [
        f"# {title}\n",
        f"For administrators; three minutes. Written by `make test-gpu` on {report.machine}.\n",
    ]
    if report.simulated:
        parts += ["**None of these figures is a claim about hardware**: kernels are timers here.\n"]
    parts += [
        f"Each measurement lasts {report.seconds:g} s, after prices were learned. *Of alone* compares with",
        "the same load that has the GPU to itself. *Share* is what the enforcement library holds a container",
        "to, *factor* what the observer made of it (1: nothing to correct, or no figures of the driver).\n",
    ]
    parts += [f"- **{load}**: {what}" for load, what in _LOADS.items()]
    parts += _table("Two decode loops", report, "decode")
    parts += _table("Inference beside a busy neighbour", report, "serve", "busy")
    parts += ["\n## Cost of a launch\n", "| container | ns a launch, its caller's time |", "| --- | --- |"]
    parts += [
        f"| {row.mode} | {1e9 * row.p50:.0f} |" for rows in report.cases for row in rows if row.load == CALLS
    ]
    if report.missing:
        parts += ["", *(f"- Not measured: {each}" for each in report.missing)]
    lengths = ", ".join(f"{name} {value:.0f}" for name, value in report.kernels.items())
    return "\n".join([*parts, f"\nKernels as calibrated, in microseconds: {lengths}."]) + "\n"


def _table(title: str, report: Report, *loads: str) -> Iterable[str]:
    alone = {row.load: row.per_second for rows in report.cases for row in rows if row.mode == ALONE}
    yield f"\n## {title}\n"
    yield "| mode | load | share | per second | of alone | p50 ms | p99 ms | factor |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for rows in report.cases:
        for row in (each for each in rows if each.load in loads):
            cells = (
                row.mode,
                row.load,
                "" if row.share is None else f"{row.share} %",
                f"{row.per_second:.1f}",
                f"{100 * row.per_second / alone[row.load]:.1f} %" if row.load in alone else "",
                f"{1000 * row.p50:.2f}",
                f"{1000 * row.p99:.2f}",
                "" if row.factor is None else f"{row.factor:.2f}",
            )
            yield f"| {' | '.join(cells)} |"
