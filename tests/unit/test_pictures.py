"""The pictures of the documents: there, small, well-formed, shown with a caption, and what draws them."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from agent.cli import main as cli
from tests.pictures import charts, rooms, switch, terminal
from tests.pictures.charts import Series
from tests.pictures.switch import Look, Record

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
NAMES = {
    *(
        f"{name}.svg"
        for name in ("demo", "status", "top", "explain", "rooms", "switch", "kubectl-gpu", "claims")
    ),
    "page.png",
    *(f"{path.stem}.png" for path in (ROOT / "charts/gpu-node-agent/files/dashboards").glob("*.json")),
}
ICON = "icon.svg"  # of the chart
MOST_BYTES = 256 << 10
XML = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> str:
    return "".join(ET.fromstring(svg).itertext())


def test_each_picture_is_there_and_shown_with_a_caption() -> None:
    assert {path.name for path in FOLDER.iterdir()} == NAMES | {ICON}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        Path(target).name: caption
        for page in pages
        for caption, target in re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", page.read_text())
    }
    assert set(shown) == NAMES
    assert all(len(caption) > 20 for caption in shown.values())
    assert not any("grafana" in caption.lower() for caption in shown.values()), "they are not Grafana's"
    for path in FOLDER.iterdir():
        assert path.stat().st_size < MOST_BYTES, path.name


@pytest.mark.parametrize("name", sorted(name for name in NAMES if name.endswith(".svg")))
def test_vector_pictures_load_nothing_and_have_a_title(name: str) -> None:
    text = (FOLDER / name).read_text()
    root = ET.fromstring(text)
    assert root.find(f"{XML}title") is not None
    assert re.findall(r"(?:https?:)?//[^\"' )]+", text) == ["http://www.w3.org/2000/svg"]
    assert "/work" not in text
    assert "/root" not in text


def test_terminals_show_commands_that_there_are_and_headings_that_they_print() -> None:
    for name in ("status", "top", "explain"):
        text = words((FOLDER / f"{name}.svg").read_text())
        command = text.partition("$ ")[2].split()[1]
        parsed = cli._parser().parse_args([command, *(["x"] if command == "explain" else [])])
        assert callable(parsed.command)
    heads = {
        "status": ("GPU", "UUID", "MODEL", "MEMORY", "NUMA", "MODE", "HEALTH", "HELD BY"),
        "top": ("NAMESPACE/POD", "CONTAINER", "PEAK", "MEMORY GiB"),
        "explain": ("it fits on none of", "it would fit if these ended"),
        "kubectl-gpu": ("FREE", "LARGEST", "WAITING POD", "it fits on none of", "beside it", "drains until"),
        "demo": ("The agent starts", "Pods ask for GPUs", "HELD BY"),
    }
    for name, found in heads.items():
        text = words((FOLDER / f"{name}.svg").read_text())
        assert all(each in text for each in found), name


def test_the_diagram_is_the_one_that_is_drawn_and_names_packages() -> None:
    assert (FOLDER / "rooms.svg").read_text() == rooms.drawn()
    for name, *_ in rooms.ROOMS:
        assert (ROOT / "agent" / name / "__init__.py").is_file(), name


def test_a_terminal_keeps_colours_and_escapes_what_is_markup() -> None:
    svg = terminal.drawn("x & y", "\x1b[1;31mred\x1b[0m <plain>\n\x1b[2Kdone")
    assert words(svg) == "x & y\n\n\n$ x & y\nred <plain>\ndone"
    assert 'fill="#ff7b72" font-weight="bold">red<' in svg


def test_a_program_that_fails_is_no_picture() -> None:
    with pytest.raises(terminal.DidNotEnd, match="ended with 2"):
        terminal.shown(["no-such-command"], 20)


def test_equal_looks_are_one_stretch_and_draining_is_hatched() -> None:
    held, drains, free = (
        Look("pgpu", False, ("a",)),
        Look("pgpu", True, ("a",)),
        Look("vgpu", False, ()),
    )
    looks = [held, held, drains, free]
    assert list(switch.stretches([0.0, 1.0, 2.0, 3.0], looks)) == [
        (0.0, 2.0, held),
        (2.0, 3.0, drains),
        (3.0, 3.0, free),
    ]
    svg = switch.drawn(Record([0.0, 1.0, 2.0, 3.0], [[look] for look in looks], [(1.5, "label: vgpu")]))
    assert svg.count("url(#drains)") == 2  # its bar, and the legend's
    assert "label: vgpu" in words(svg)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50 %"),
        (42.0, "percent", "42 %"),
        (1.98e9, "hertz", "1.98 GHz"),
        (12.0, "Bps", "12 B/s"),
        (4.29e9, "bytes", "4.29 GB"),
        (16.0, "suffix: GiB", "16 GiB"),
        (16.0, "short", "16"),
        (1244.4, "watt", "1,244 W"),
        (3.0, "", "3"),
    ],
)
def test_figures_have_their_units(value: float, unit: str, text: str) -> None:
    assert charts.figure(value, unit) == text


@pytest.mark.parametrize("kind", ["timeseries", "stat", "bargauge", "table"])
def test_panels_draw_what_was_answered_and_say_where_nothing_was(kind: str) -> None:
    panel = {"type": kind, "fieldConfig": {"defaults": {"unit": "percent"}}}
    series = [Series(f"line {n}", [(0.0, n), (10.0, 10.0 * n)], {"node": f"n{n}"}) for n in range(3)]
    drawn = words(f'<svg xmlns="http://www.w3.org/2000/svg">{charts.panel(panel, series, 500, 200)}</svg>')
    assert "20 %" in drawn
    assert ("n2" if kind == "table" else "line 2") in drawn
    assert "no data" in charts.panel(panel, [], 500, 200)
