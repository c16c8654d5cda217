"""Documents hold their words: budgets by kind of page, as README's table of links names the kinds."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

# Lower them where you can. A page that needs more gives back as much elsewhere: what another page says is
# linked, not said again, and history is git's.
BUDGETS = {"README": 1010, "how to": 11_050, "reference": 9_400, "background": 8_780}
IN_ALL = 30_000
GENERAL = {"CHANGELOG.md"}  # history, which nobody reads from its beginning to its end
FIGURES = "*-on-hardware.md"  # written by `make test-gpu`: its words are a program's


def words(text: str) -> int:
    """Count what has a letter or a digit; rules of tables and signs between words do not count."""
    return sum(1 for each in text.split() if re.search(r"\w", each))


def kinds() -> dict[Path, str]:
    """Each page that README's last table links, with the kind of its row."""
    table = README.read_text(encoding="utf-8").partition("\n## Links\n")[2]
    found = {}
    for kind, pages in re.findall(r"^\| ([a-z -]+) \| (.+) \|$", table, re.MULTILINE):
        for target in re.findall(r"\]\(([^)#]+)\)", pages):
            assert ROOT / target not in found, f"{target} is of two kinds"
            found[ROOT / target] = kind
    return found


def test_documents_hold_their_words() -> None:
    figures = {*(ROOT / "docs").glob(FIGURES)}
    pages = {path: kind for path, kind in kinds().items() if path.name not in GENERAL and path not in figures}
    there = {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "tests").glob("*/README.md"),
        ROOT / "CONTRIBUTING.md",
    } - figures
    assert set(pages) == there, "each page has one kind, in README's table of links"
    used = Counter({"README": words(README.read_text(encoding="utf-8"))})
    for path, kind in pages.items():
        used[kind] += words(path.read_text(encoding="utf-8"))
    over = {kind: f"{used[kind]} of {most}" for kind, most in BUDGETS.items() if used[kind] > most}
    assert not over, "say it in fewer words, or once: " + str(over)
    assert set(used) == set(BUDGETS)
    assert used.total() <= IN_ALL, f"{used.total()} words in all"
