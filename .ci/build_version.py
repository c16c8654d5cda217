"""The version of what is built from this tree: that of agent/__init__.py, between releases with the commit.

There `0.3.0.dev0` stands until 0.3.0 is made. A build of commit 1a2b3c4d5e is then `0.3.0.devN+g1a2b3c4d5e`,
N commits after the line was written; changes since that commit, new files included, follow as a digest, and
`.shallow` where the clone ends before that line and N counts from its end. Without git (an unpacked archive)
it is the written one. Standard library only: hatchling runs this file, too.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(os.environ.get("RELEASE_ROOT") or Path(__file__).resolve().parents[1])
WRITTEN = Path("agent/__init__.py")
LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
# What images and charts are made of: a file that git does not know is in them, too.
BUILT_OF = ("agent", "charts", ".ci")
DEVELOPMENT = re.compile(r"(\d+\.\d+\.\d+)\.dev(\d+)(?:\+([0-9a-z.]+))?")


def written(root: Path = ROOT) -> str:
    """The version in the file. Raises ValueError."""
    found = LINE.search((root / WRITTEN).read_text())
    if not found:
        raise ValueError(f"{WRITTEN} has no line __version__")
    return found[1]


def package(root: Path = ROOT) -> str:
    """As Python's packages have it (PEP 440)."""
    said = written(root)
    # A .git above the tree would be another project's.
    if not said.endswith(".dev0") or not (root / ".git").exists():
        return said
    try:
        began = _git(root, "log", "-1", "--format=%H", "-G^__version__", "--", str(WRITTEN)).strip()
        commits = _git(root, "rev-list", "--count", f"{began}..HEAD").strip()
        commit = _git(root, "rev-parse", "--short=10", "HEAD").strip()
        changes = _git(root, "diff", "HEAD") + "".join(_new(root))
        shallow = began in _boundary(root)
    except (OSError, subprocess.SubprocessError):
        return said
    changed = f".d{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return f"{said.removesuffix('0')}{commits}+g{commit}{'.shallow' if shallow else ''}{changed}"


def _new(root: Path) -> Iterator[str]:
    """Files of the build that are in no commit: name and digest."""
    listed = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *BUILT_OF)
    for name in filter(None, listed.split("\0")):
        yield f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n"


def _boundary(root: Path) -> list[str]:
    """The commits where a shallow clone ends, whose parents it does not have."""
    file = root / _git(root, "rev-parse", "--git-path", "shallow").strip()
    return file.read_text().split() if file.exists() else []


def semantic(version: str) -> str:
    """The same for charts, image tags and labels, where no `+` may stand."""
    found = DEVELOPMENT.fullmatch(version)
    return ".".join([f"{found[1]}-dev", *filter(None, found.groups()[1:])]) if found else version


def stamped(text: str, version: str) -> str:
    """The text of agent/__init__.py with that version."""
    return LINE.sub(f'__version__ = "{version}"', text)


def _git(root: Path, *arguments: str) -> str:
    # In a container of a workflow the checkout is somebody else's: git needs leave to read it.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    return subprocess.run(
        command, capture_output=True, check=True, timeout=60, text=True, errors="replace"
    ).stdout
