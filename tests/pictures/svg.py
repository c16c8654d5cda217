"""A few SVG elements as text: enough for terminals, diagrams and charts, without a library."""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

SANS = "'DejaVu Sans', Verdana, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, GREY, PALE, LINE, PAPER = "#1f2933", "#5f6b7a", "#f3f5f7", "#c3cad3", "#ffffff"
# Colours that stay apart for people who see few of them (Okabe and Ito, 2008), without yellow on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f6b7a", "#7b4fa3")
MODES = {
    "pgpu": COLOURS[0],
    "vgpu": COLOURS[2],
    "mps": COLOURS[1],
    "dra": COLOURS[7],
    "off": GREY,
}


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """`stroke_width` stands for stroke-width. `content` is markup."""
    words = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_number(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, *, size: float = 13, fill: str = INK, **more: object) -> str:
    """One line; `y` is its base line."""
    return element("text", escape(words), x=float(x), y=float(y), font_size=size, fill=fill, **more)


def box(x: float, y: float, w: float, h: float, **more: object) -> str:
    """A rectangle."""
    return element("rect", x=float(x), y=float(y), width=float(w), height=float(h), **more)


def line(points: Sequence[tuple[float, float]], **more: object) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=places, fill="none", **more)


def picture(width: float, height: float, title: str, parts: Iterable[str], font: str = SANS) -> str:
    """The file. `title` is read to those who do not see it."""
    return (
        element(
            "svg",
            element("title", escape(title)) + "\n" + "\n".join(parts),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            width=f"{width:.0f}",
            height=f"{height:.0f}",
            font_family=font,
            role="img",
        )
        + "\n"
    )
