"""The screen: short aligned lines, colour where a terminal takes it."""

import os
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

_STYLES: Final = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}
# Words that carry a meaning of their own in any table.
_MEANINGS: Final = {
    "Healthy": "green",
    "Running": "green",
    "Unhealthy": "red",
    "Failed": "red",
    "Pending": "yellow",
    "free": "dim",
}


class Screen:
    """Writes to `out`; colour only on a terminal, and not where NO_COLOR is set (no-color.org)."""

    def __init__(self, out: TextIO, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        self._out = out
        self._colour = out.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self._after_blank = False
        self._tick, self._cross, self._rule = _marks(out.encoding or "ascii")

    def title(self, text: str) -> None:
        """The first line."""
        self._write(self._styled(text, "bold"))

    def act(self, number: int, text: str) -> None:
        """The head of a part."""
        self.gap()
        head = f"{number}  {text} "
        self._write(self._styled(head, "bold", "cyan") + self._styled(self._rule * (78 - len(head)), "dim"))

    def say(self, text: str) -> None:
        """A line that announces the next step."""
        self._write(f"   {text}")

    def seen(self, text: str) -> None:
        """A line that was observed and checked."""
        self._write(f" {self._styled(self._tick, 'green')} {text}")

    def missed(self, text: str) -> None:
        """A line about what did not come true."""
        self._write(f" {self._styled(self._cross, 'red')} {text}")

    def gap(self) -> None:
        """One empty line, never two."""
        if not self._after_blank:
            self._write()

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as their widest cell; numbers to the right."""
        widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
        right = [all(row[column].isdigit() for row in rows) for column in range(len(heads))]

        def line(cells: Sequence[str], *styles: str) -> str:
            padded = [
                cell.rjust(width) if to_the_right else cell.ljust(width)
                for cell, width, to_the_right in zip(cells, widths, right, strict=True)
            ]
            shown = [self._styled(pad, *styles, *_meaning(pad)) for pad in padded]
            return "   " + "  ".join(shown).rstrip()

        self.gap()
        self._write(line(heads, "dim"))
        for row in rows:
            self._write(line(row))
        self.gap()

    def _styled(self, text: str, *styles: str) -> str:
        if not self._colour or not styles:
            return text
        return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"

    def _write(self, line: str = "") -> None:
        self._after_blank = not line
        self._out.write(line + "\n")
        self._out.flush()


def _meaning(cell: str) -> tuple[str, ...]:
    style = _MEANINGS.get(cell.strip())
    return (style,) if style else ()


def _marks(encoding: str) -> tuple[str, str, str]:
    try:
        "✓✗─".encode(encoding)
    except UnicodeEncodeError:
        return "*", "!", "-"
    return "✓", "✗", "─"
