"""Make the pictures of the documents from real runs: `python -m tests.pictures [NAME ...]`, else all."""

import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import anyio

from tests.pictures import boards, captures, claims, kubectl, rooms, shares, switch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def _write(name: str, content: str) -> None:
    (FOLDER / name).write_text(content, encoding="utf-8")


def _recorded(name: str, made: Callable[[], Awaitable[str]]) -> None:
    _write(f"{name}.svg", anyio.run(made))


def _captures() -> None:
    for name, content in captures.all_of_them().items():
        _write(f"{name}.svg", content)


MAKERS: Mapping[str, Callable[[], None]] = {
    "rooms": lambda: _write("rooms.svg", rooms.drawn()),
    "switch": partial(_recorded, "switch", switch.made),
    "claims": partial(_recorded, "claims", claims.made),
    "shares": partial(_recorded, "shares", shares.made),
    "terminals": _captures,
    "kubectl": lambda: anyio.run(kubectl.made, FOLDER),
    "dashboards": partial(boards.make, FOLDER),
}


def main(names: list[str]) -> int:
    """0, or 2 for a name that there is not."""
    if unknown := set(names) - MAKERS.keys():
        print(
            f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}",
            file=sys.stderr,
        )
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Sockets of the runs below lie there: their paths must be short.
    tempfile.tempdir = tempfile.tempdir or "/tmp"
    for name in names or MAKERS:
        print(f"making {name} ...", flush=True)
        MAKERS[name]()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
