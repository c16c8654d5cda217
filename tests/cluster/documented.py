"""Commands of the documents, as they stand there, for tests that run them."""

import re
import shlex
from pathlib import Path

from tests.cluster.rig import REPOSITORY


def _below(document: Path, heading: str) -> str:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{document} has no heading {heading!r}")
    return found[2]


def commands(document: Path, heading: str) -> list[list[str]]:
    """The words of each command in the code blocks below a heading, in order. Comments are left out.

    A line that is further indented belongs to the one before.
    """
    below = _below(document, heading)
    block = "\n".join(line[4:] for line in below.splitlines() if line.startswith("    "))
    whole = re.sub(r"\\?\n\s+", " ", block)
    lines = [shlex.split(line, comments=True) for line in whole.splitlines()]
    return [words for words in lines if words]
