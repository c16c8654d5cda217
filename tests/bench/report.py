"""Runs measurements and tells what came out: a table for people, JSON for machines."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.kit.supervise import describe
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Measurement, Taken


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the report: a value, or why there is none."""

    figure: Figure
    taken: Taken | None
    error: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value keeps its budget; None: there is no budget, or no value."""
        if self.taken is None or self.figure.budget is None:
            return None
        return self.taken.value <= self.figure.budget


async def run(measurements: Sequence[Measurement], conditions: Conditions) -> list[Row]:
    """Take every measurement; one that fails gives rows with its error and stops no other."""
    rows: list[Row] = []
    for one in measurements:
        names = ", ".join(figure.name for figure in one.figures)
        print(f"... {names}", file=sys.stderr, flush=True)
        try:
            taken = await one.take(conditions)
            missing = {figure.name for figure in one.figures} ^ set(taken)
            if missing:
                raise RuntimeError(f"the measurement and its figures differ in {', '.join(sorted(missing))}")
        except Exception as error:  # noqa: BLE001  whatever went wrong is told in the report
            rows += [Row(figure, None, describe(error)) for figure in one.figures]
        else:
            rows += [Row(figure, taken[figure.name]) for figure in one.figures]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The report for people."""
    cells = [("figure", "value", "unit", "budget", "", "n")]
    for row in rows:
        budget = "-" if row.figure.budget is None else f"{row.figure.budget:g}"
        verdict = {True: "holds", False: "OVER", None: ""}[row.holds]
        if row.taken is None:
            cells.append((row.figure.name, "not taken", "", budget, "ERROR", ""))
        else:
            value = f"{row.taken.value:.4g}" if row.taken.value < 1000 else f"{row.taken.value:.0f}"
            cells.append((row.figure.name, value, row.figure.unit, budget, verdict, str(row.taken.n)))
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    lines = [
        f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  {budget:>{widths[3]}}  "
        f"{verdict:<{widths[4]}}  {n:>{widths[5]}}".rstrip()
        for name, value, unit, budget, verdict, n in cells
    ]
    lines += [f"{row.figure.name} was not taken: {row.error}" for row in rows if row.taken is None]
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> Mapping[str, Any]:
    """The report for machines. A figure that was not taken has an error in place of its value."""
    return {"figures": [_entry(row) for row in rows]}


def _entry(row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.figure.name}
    if row.taken is None:
        entry |= {"error": row.error, "unit": row.figure.unit, "budget": row.figure.budget, "holds": False}
        return entry
    entry["value"] = round(row.taken.value, 4)
    entry |= {"unit": row.figure.unit, "budget": row.figure.budget, "holds": row.holds, "n": row.taken.n}
    return entry


def write(rows: Sequence[Row], file: Path) -> None:
    """Write the JSON report. Figures of an earlier run that were not asked for this time are kept out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(as_json(rows), indent=2) + "\n")
