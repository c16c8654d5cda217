"""The tests that `make check` runs: unit tests of the rooms that a change reaches, style and documents.

A room is reached if a file of it changed since the branch left main, or if a module of it imports one that
changed. What lies further is left to `make test`.
"""

import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/unit"
ROOMS = frozenset(
    path.name for path in (ROOT / UNIT).iterdir() if path.is_dir() and path.name != "__pycache__"
)
# A change of these can turn any test.
FOR_ALL = ("pyproject.toml", "requirements-dev.lock", "requirements.lock", "tests/conftest.py")
# Folders without Python whose tests are elsewhere.
CHART = ("charts/", "tests/chart/")
MAINS = ("origin/main", "main")  # the first that there is

Importers = Callable[[str], Iterable[str]]  # of a module


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def changed_files() -> frozenset[str] | None:
    """Files that differ from where this branch left main, uncommitted ones included; None without a main."""
    for main in MAINS:
        try:
            base = _git("merge-base", "HEAD", main)[0]
        except subprocess.CalledProcessError:
            continue
        # Renamed files count under both names.
        return frozenset(_git("diff", "--name-only", "--no-renames", base)) | frozenset(
            _git("ls-files", "--others", "--exclude-standard")
        )
    return None


def importers() -> Importers:
    """Modules of agent, tests and clib that import a module directly."""
    graph = grimp.build_graph("agent", "clib", "tests", cache_dir=None)
    known = graph.modules

    def of(module: str) -> Iterable[str]:
        return graph.find_modules_that_directly_import(module) if module in known else ()

    return of


def _module(file: str) -> str:
    return file.removeprefix(".ci/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _room(module: str) -> str | None:
    match module.split("."):
        case ["agent", room, *_] | ["tests", "unit", room, *_] if room in ROOMS:
            return room
    return None


def selected(files: Iterable[str] | None, importers_of: Importers) -> list[str]:
    """Arguments for pytest. None: nobody knows what changed."""
    always = [str(path.relative_to(ROOT)) for path in sorted((ROOT / UNIT).glob("test_*.py"))]
    if files is None or any(file in FOR_ALL for file in files):
        return [UNIT, CHART[1].rstrip("/")]
    modules = {_module(file) for file in files}
    reached = modules | {each for module in modules for each in importers_of(module)}
    rooms = {room for module in reached if (room := _room(module))}
    chart = [CHART[1].rstrip("/")] if any(file.startswith(CHART) for file in files) else []
    return [*always, *(f"{UNIT}/{room}" for room in sorted(rooms)), *chart]


def main() -> None:
    """ALL=1 in the environment: all unit tests."""
    everything = os.environ.get("ALL", "") not in ("", "0")
    print(*selected(None if everything else changed_files(), importers()))


if __name__ == "__main__":
    main()
