"""The threat table of docs/security.md names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = "| who | tries | what stops it | test |"


def _rows() -> list[list[str]]:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index(HEADER) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table]


def test_every_threat_names_tests_that_exist() -> None:
    defined = {
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    rows = _rows()
    assert rows
    for row in rows:
        assert len(row) == 4, row
        assert all(row), row
        named = re.findall(r"`(test_\w+)`", row[3])
        assert named, f"no test stands against: {row[0]}, {row[1]}"
        assert set(named) <= defined, set(named) - defined
