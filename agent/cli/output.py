"""Documents as text for people or programs: `-o json | yaml | wide`, `--watch`, the size of the terminal."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import yaml

COLUMNS, ROWS = 100, 24  # where there is no terminal
FEWEST_COLUMNS = 60
WATCH_SECONDS = 2.0

Document = Any  # a value of JSON
Render = Callable[[Document], str]


def add_output(parser: argparse.ArgumentParser, *, wide: bool = False) -> None:
    """Add -o; `wide` where the text has a wider form."""
    choices = ("json", "yaml", "wide") if wide else ("json", "yaml")
    parser.add_argument("-o", "--output", choices=choices, help="as a document, or with more columns")
    parser.add_argument(
        "--json", dest="output", action="store_const", const="json", help=argparse.SUPPRESS
    )  # as it was before -o


def add_watch(parser: argparse.ArgumentParser, until: str) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help=f"go on and show changes until {until}")


def formatted(document: Document, options: argparse.Namespace, render: Render) -> str:
    """The document as -o asks for, without a line feed at the end."""
    kind = getattr(options, "output", None)
    if kind == "json":
        # One line each where documents follow one another.
        return json.dumps(document, indent=None if getattr(options, "watch", False) else 2)
    if kind == "yaml":
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip("\n")
        return f"---\n{text}" if getattr(options, "watch", False) else text
    return render(document)


def show(
    options: argparse.Namespace,
    ask: Callable[[], Document],
    render: Render,
    done: Callable[[Document], bool] = lambda _: False,
) -> int:
    """Print what `ask` answers; with --watch each change of it, until `done`."""
    shown = ""
    for document in _answers(ask, watch=getattr(options, "watch", False), done=done):
        text = formatted(document, options, render)
        if text == shown:
            continue
        shown = text
        repainted = getattr(options, "watch", False) and options.output in (None, "wide")
        print(painted(fitting(text)) if repainted and sys.stdout.isatty() else text, flush=True)
    return 0


def _answers(
    ask: Callable[[], Document], *, watch: bool, done: Callable[[Document], bool]
) -> Iterator[Document]:
    while True:
        document = ask()
        yield document
        if not watch or done(document):
            return
        time.sleep(WATCH_SECONDS)


def fitting(text: str) -> str:
    """As many lines as the terminal has, less one for the cursor: more would scroll at each painting."""
    lines, room = text.split("\n"), size()[1] - 1
    if room < 1 or len(lines) <= room:
        return text
    kept = lines[: room - 1]
    return "\n".join([*kept, f"... {len(lines) - len(kept)} more lines: without --watch all are shown"])


def painted(text: str) -> str:
    """A screen in place of the one before: home, then each line erased to its end, then what is below.

    No flicker as with a cleared screen.
    """
    body = text.replace("\n", "\033[K\n")
    return f"\033[H{body}\033[K\033[J"


def size(fewest: int = FEWEST_COLUMNS) -> tuple[int, int]:
    """Columns, `fewest` or more, and rows to write for; rows 0: there is no terminal, and nothing is cut."""
    if not sys.stdout.isatty():
        return COLUMNS, 0
    found = shutil.get_terminal_size((COLUMNS, ROWS))
    return max(fewest, found.columns), max(1, found.lines)
