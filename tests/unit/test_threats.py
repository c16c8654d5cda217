"""The tables of threats and of escapes in docs/security.md name tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = "| who | tries | what stops it | test |"


ESCAPES = "| # | attempt | outcome | test |"


def _rows(header: str = HEADER) -> list[list[str]]:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table]


def _defined() -> set[str]:
    return {
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }


def test_every_escape_from_limits_names_tests_that_exist() -> None:
    rows, defined = _rows(ESCAPES), _defined()
    numbers = {int(number) for row in rows for number in row[0].split(", ")}
    assert numbers == set(range(1, 23))
    for number, attempt, outcome, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert attempt, number
        assert outcome, number
        assert named, f"no test shows the outcome of {number}"
        assert set(named) <= defined, set(named) - defined


def test_every_threat_names_tests_that_exist() -> None:
    rows, defined = _rows(), _defined()
    assert rows
    for row in rows:
        assert len(row) == 4, row
        assert all(row), row
        named = re.findall(r"`(test_\w+)`", row[3])
        assert named, f"no test stands against: {row[0]}, {row[1]}"
        assert set(named) <= defined, set(named) - defined


def test_every_test_that_the_page_names_exists() -> None:
    """Outside of these two tables, too: of the image, of stolen tokens."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    assert named <= _defined(), named - _defined()
