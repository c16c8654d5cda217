"""Commands in the documents."""

import re
import shlex
from pathlib import Path


def commands(document: Path) -> list[list[str]]:
    """Every `helm install` and `helm upgrade`, its continued lines joined; lines that begin with `--set`."""
    text = re.sub(r"\\\n\s*", "", document.read_text(encoding="utf-8"))
    lines = [line.strip().strip("`") for line in text.splitlines() if line.startswith("    ")]
    return [
        shlex.split(line, comments=True) for line in lines if re.match(r"helm (install|upgrade)|--set ", line)
    ]
