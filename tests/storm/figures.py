"""The figures of storms and mutants, in one file that several processes add to: build/storm.json."""

import fcntl
import json
import os
from pathlib import Path

from agent.kit import files

REPORT = Path(__file__).parents[2] / "build" / "storm.json"
# In the order in which they stand; figures of other names follow.
NAMES = (
    "seeds",
    "steps",
    "virtual_hours",
    "faults",
    "invariants",
    "failures",
    "excused_percent",
    "excused_percent_of_offers",
    "excused_percent_of_admissions",
    "excused_percent_of_refusals",
    "unwell_percent_of_admissions",
    "mutants",
    "mutants_found",
)

Figure = int | float | dict[str, str]


def add(report: Path = REPORT, **figures: Figure) -> dict[str, Figure]:
    """Write figures beside those that others wrote, in place of former ones of the same name; all of them.

    Waits for others that write (milliseconds). One that cannot be read is replaced. Raises OSError.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(report.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        known = _read(report) | figures
        write(report, **known)
    finally:
        os.close(folder)
    return known


def write(report: Path, **figures: Figure) -> None:
    """Write these figures alone. Raises OSError."""
    names = [name for name in NAMES if name in figures] + sorted(figures.keys() - set(NAMES))
    text = json.dumps({name: figures[name] for name in names}, indent=2)
    files.write(report.parent, report.name, text.encode() + b"\n")


def _read(report: Path) -> dict[str, Figure]:
    try:
        known = json.loads(report.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
