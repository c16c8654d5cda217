"""docs/comparison.md: each cell has its source, each source is used."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
UNKNOWN = "not found out"


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its first two lines."""
    text = PAGE.read_text()
    section = text[text.index(f"## {heading}") :].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_cell_has_a_source_that_is_listed() -> None:
    listed = {key for key, _ in rows("Sources")}
    named: set[str] = {"O"}  # the operator has a sentence of its own
    for what, *cells in rows("What each does"):
        assert len(cells) == 7, what
        for cell in cells:
            keys = re.findall(r"\[(\w+)\]$", cell)
            assert keys or cell == UNKNOWN, f"{what}: {cell!r} has no source"
            named |= set(keys)
    assert named == listed


def test_what_we_lack_is_in_the_table() -> None:
    own = [cells[0] for _, *cells in rows("What each does")]
    assert sum(cell.startswith("**no") for cell in own) >= 4
