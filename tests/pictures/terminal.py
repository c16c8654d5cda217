"""The output of a program on a terminal, as SVG."""

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.pictures.svg import MONO, box, element, picture, text

ROOT = Path(__file__).resolve().parents[2]
SIZE, ADVANCE, LEADING, MARGIN, TITLE = 13, 7.83, 18, 16, 34  # pixels; of DejaVu Sans Mono
COLUMNS = 100  # at least
BACK, FRONT = "#16191d", "#e6e9ed"
_CODES = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])")
_COLOURS = {"30": "#4a525c", "31": "#ff7b72", "32": "#7ee787", "33": "#f0c674", "34": "#79b8ff"} | {
    "35": "#d2a8ff",
    "36": "#76e3ea",
    "2": "#9aa4af",
}


class DidNotEnd(Exception):
    """A program that was to be shown failed or took too long; the text has its last lines."""


def shown(arguments: Sequence[str], seconds: float, more: Mapping[str, str] | None = None) -> str:
    """Run `python -m agent` with these arguments on a terminal; what it wrote. Raises DidNotEnd."""
    leader, follower = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = kept | {"TERM": "xterm-256color", "COLUMNS": "200"} | dict(more or {})
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    deadline = time.monotonic() + seconds
    data = b""
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # EIO: nobody writes any more
                break
            if not part:
                break
            data += part
        code = process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    found = data.decode(errors="replace").replace("\r\n", "\n")
    if code != 0:
        raise DidNotEnd(f"{' '.join(arguments)} ended with {code}:\n{found[-2000:]}")
    return found


def drawn(command: str, output: str) -> str:
    """A window with the command as its title and the output below."""
    lines = output.strip("\n").split("\n")
    columns = max(COLUMNS, *(len(_CODES.sub("", each)) for each in lines))
    width, height = 2 * MARGIN + columns * ADVANCE, TITLE + 2 * MARGIN + len(lines) * LEADING
    parts = [
        box(0, 0, width, height, rx=8, fill=BACK),
        box(0, TITLE - 1, width, 1, fill="#2c323a"),
        text(MARGIN, 22, f"$ {command}", size=SIZE, fill="#9aa4af"),
    ]
    for number, each in enumerate(lines):
        y = TITLE + MARGIN + (number + 0.75) * LEADING
        spans = "".join(
            element("tspan", escape(words), fill=colour, font_weight=weight)
            for words, colour, weight in _runs(each)
            if words
        )
        if spans:
            parts.append(element("text", spans, x=MARGIN, y=float(y), font_size=SIZE, xml__space="preserve"))
    return picture(width, height, command, parts, MONO).replace("xml--space", "xml:space")


def _runs(words: str) -> Iterator[tuple[str, str, str | None]]:
    """Pieces of a line with colour and weight, by the codes of ECMA-48."""
    colour, weight, at = FRONT, None, 0
    for code in _CODES.finditer(words):
        yield words[at : code.start()], colour, weight
        at = code.end()
        if code[2] != "m":
            continue
        for each in code[1].split(";"):
            if each in ("", "0"):
                colour, weight = FRONT, None
            elif each == "1":
                weight = "bold"
            else:
                colour = _COLOURS.get(each, colour)
    yield words[at:], colour, weight
