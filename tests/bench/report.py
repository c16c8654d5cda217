"""Runs measurements and reports the results: a table for people, JSON for machines.

The machine is calibrated before and after each measurement, and budgets of times count after it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import anyio.to_thread

from agent.kit.tasks import describe
from tests.bench.calibration import LARGEST_SLOWDOWN, QUIET, Calibration
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Measurement, Taken


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the report: a value, or why there is none."""

    figure: Figure
    taken: Taken | None
    error: str = ""
    machine: Calibration = QUIET

    @property
    def slowdown(self) -> float:
        """How many times longer this takes on the machine as it was than on a quiet one; 1: it is no time.

        Percentages of a core go by processor time.
        """
        if self.figure.budget is not None and self.figure.unit == "%":
            return self.machine.cpu_slowdown
        if self.figure.budget is None or self.figure.unit != "ms":
            return 1.0
        return self.machine.slowdown(self.figure.budget, tail=self.figure.tail)

    @property
    def holds(self) -> bool | None:
        """Whether the value keeps its budget on this machine; None: no budget, no value, or too busy."""
        if self.taken is None or self.figure.budget is None:
            return None
        if self.taken.value <= self.figure.budget * min(1.0, self.slowdown):
            return True
        if self.slowdown > LARGEST_SLOWDOWN:
            return None
        return self.taken.value <= self.figure.budget * self.slowdown


async def run(
    measurements: Sequence[Measurement],
    conditions: Conditions,
    calibrated: Callable[[], Calibration],
) -> list[Row]:
    """Take every measurement; one that fails gives rows with its error and stops no other."""
    rows: list[Row] = []
    begun = anyio.current_time()
    after = await anyio.to_thread.run_sync(calibrated)
    for one in measurements:
        before = after
        names = ", ".join(figure.name for figure in one.figures)
        print(f"... after {anyio.current_time() - begun:.0f} s: {names}", file=sys.stderr, flush=True)
        try:
            taken = await one.take(conditions)
            missing = {figure.name for figure in one.figures} ^ set(taken)
            if missing:
                raise RuntimeError(f"the measurement and its figures differ in {', '.join(sorted(missing))}")
        except Exception as error:  # noqa: BLE001  any failure stands in the report
            rows += [Row(figure, None, describe(error)) for figure in one.figures]
        else:
            after = await anyio.to_thread.run_sync(calibrated)
            machine = before.together(after)
            rows += [Row(figure, taken[figure.name], machine=machine) for figure in one.figures]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The report for people."""
    cells = [("figure", "value", "unit", "budget", "here", "", "n")]
    for row in rows:
        budget = "-" if row.figure.budget is None else f"{row.figure.budget:g}"
        here = f"x{row.slowdown:.1f}" if row.slowdown != 1 else ""
        if row.taken is None:
            cells.append((row.figure.name, "not taken", "", budget, "", "ERROR", ""))
        else:
            value = f"{row.taken.value:.4g}" if row.taken.value < 1000 else f"{row.taken.value:.0f}"
            unjudged = "" if row.figure.budget is None else "BUSY"
            verdict = {True: "holds", False: "OVER", None: unjudged}[row.holds]
            cells.append((row.figure.name, value, row.figure.unit, budget, here, verdict, str(row.taken.n)))
    widths = [max(len(line[column]) for line in cells) for column in range(7)]
    lines = [
        f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  {budget:>{widths[3]}} "
        f"{here:<{widths[4]}}  {verdict:<{widths[5]}}  {n:>{widths[6]}}".rstrip()
        for name, value, unit, budget, here, verdict, n in cells
    ]
    lines += [f"{row.figure.name} was not taken: {row.error}" for row in rows if row.taken is None]
    if any(row.taken and row.figure.budget is not None and row.holds is None for row in rows):
        lines.append(f"BUSY: the machine was over {LARGEST_SLOWDOWN:g} times slower than a quiet one")
    lines.append(f"calibration: {_machine(rows)}")
    return "\n".join(lines)


def _machine(rows: Sequence[Row]) -> Calibration:
    """The machine over the whole run."""
    return reduce(Calibration.together, (row.machine for row in rows), rows[0].machine) if rows else QUIET


def as_json(rows: Sequence[Row]) -> Mapping[str, Any]:
    """The report for machines. A figure that was not taken has an error in place of its value."""
    return {
        "calibration": {"measured_ms": asdict(_machine(rows)), "quiet_ms": asdict(QUIET)},
        "figures": [_entry(row) for row in rows],
    }


def _entry(row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.figure.name}
    if row.taken is None:
        entry |= {"error": row.error, "unit": row.figure.unit, "budget": row.figure.budget, "holds": False}
        return entry
    entry["value"] = round(row.taken.value, 4)
    entry |= {"unit": row.figure.unit, "budget": row.figure.budget, "holds": row.holds, "n": row.taken.n}
    if row.figure.budget is not None and row.figure.unit in ("ms", "%"):
        entry["slowdown"] = round(row.slowdown, 2)
    return entry


def write(rows: Sequence[Row], file: Path) -> None:
    """Write the JSON report. Figures of an earlier run that were not asked for this time are kept out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(as_json(rows), indent=2) + "\n")
