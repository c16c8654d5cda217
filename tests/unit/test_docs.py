"""The documents: links lead somewhere, and verbs and paths that they name exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_verb_of_the_readme_is_one_of_make() -> None:
    verbs = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "test-cluster", "bench"} <= verbs
    for verb in verbs - {"and"}:
        subprocess.run(["make", "--dry-run", verb], cwd=ROOT, check=True, capture_output=True, timeout=30)


def test_make_help_names_every_verb() -> None:
    text = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    for verb in (
        *("demo", "test", "test-cluster", "test-gpu", "bench", "lint", "format", "proto", "docs"),
        *("image", "chart", "lock", "clean"),
    ):
        assert re.search(rf"^{verb}\b|\b{verb} ", text, re.MULTILINE), verb


def test_the_folders_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    layout = text[text.index("    agent/") : text.index("Imports run one way")]
    for word in re.findall(r"\b([a-z_]+)/", layout):
        assert (ROOT / word).is_dir() or (ROOT / "agent" / word).is_dir(), word
