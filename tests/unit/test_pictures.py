"""The pictures of the documents: there, small, well-formed, shown with a caption, and what draws them."""

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from agent.cli import main as cli
from tests.pictures import captures, charts, png, rooms, shares, terminal, timeline
from tests.pictures.charts import Series
from tests.pictures.timeline import Look, Record
from tests.unit.test_style import BANNED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
BOARDS = ROOT / "charts/gpu-node-agent/files/dashboards"
NAMES = {
    *(f"{name}.svg" for name in ("demo", "status", "top", "explain", "kubectl-gpu")),
    *(f"{name}.svg" for name in ("rooms", "switch", "claims", "shares")),
    "page.png",
    *(f"{path.stem}.png" for path in BOARDS.glob("*.json")),
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
        "demo": ("pods share GPUs", "HELD BY", "it joins model-", "One label switches the node", "drains"),
    }
    for name, found in heads.items():
        text = words((FOLDER / f"{name}.svg").read_text())
        assert all(each in text for each in found), name


def test_pictures_and_boards_have_no_banned_word() -> None:
    texts = {path.name: words(path.read_text()) for path in FOLDER.glob("*.svg")}
    for path in BOARDS.glob("*.json"):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            shown = (
                panel["title"],
                panel.get("description", ""),
                panel["fieldConfig"]["defaults"].get("noValue", ""),
                *(each.get("legendFormat", "") for each in panel["targets"]),
            )
            texts[f"{path.name}: {panel['title']}"] = " ".join(shown)
    assert len(texts) > 50
    assert not {name: found[0] for name, text in texts.items() if (found := BANNED.search(text))}


def test_acts_of_the_demo_are_found_by_number() -> None:
    first, last = captures.ACTS
    demo = f"head\n\n\x1b[1m1  One \x1b[0m--\n   x\n\n{first}  Shares --\n   y\n\n{last}  Switch --\n   z\n"
    shown = captures.acts_of(demo)
    assert [word in shown for word in ("head", "One", "Shares", "Switch")] == [True, False, True, True]
    with pytest.raises(ValueError, match=f"no act.*{last}"):
        captures.acts_of(demo.replace(f"{last}  Switch", "Switch"))


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
        Look("pgpu", False, (("a", 1.0),)),
        Look("pgpu", True, (("a", 1.0),)),
        Look("vgpu", False, ()),
    )
    looks = [held, held, drains, free]
    assert list(timeline.stretches([0.0, 1.0, 2.0, 3.0], looks)) == [
        (0.0, 2.0, held),
        (2.0, 3.0, drains),
        (3.0, 3.0, free),
    ]
    record = Record([0.0, 1.0, 2.0, 3.0], [[look] for look in looks], [(1.5, "label: vgpu")])
    svg = timeline.drawn(record, "x", [("draining", "url(#drains)", False)])
    assert svg.count("url(#drains)") == 2  # its bar, and the legend's
    assert "label: vgpu" in words(svg)


def test_words_about_one_moment_stand_above_each_other() -> None:
    acts = [(1.0, "label: vgpu"), (1.1, "two pods come"), (9.0, "one ends")]
    svg = timeline.drawn(Record([0.0, 10.0], [[], []], acts), "x", [])
    places = [re.search(rf'y="([\d.]+)"[^>]*>{words}', svg) for _, words in acts]
    first, second, third = (float(found[1]) for found in places if found)
    assert second == third
    assert first < second - 12, "its line would cross the words of the second"


def test_parts_of_a_gpu_have_their_height() -> None:
    look = Look("mps", False, (("chat", 0.5), ("embed", 0.3)))
    svg = timeline.drawn(Record([0.0, 5.0], [[look], [look]], []), "x", [])
    assert {"chat 50 %", "embed 30 %"} <= set(ET.fromstring(svg).itertext())
    heights = [float(each) for each in re.findall(r'height="([\d.]+)" fill="#d55e00"', svg)]
    whole = timeline.ROW - 2 * timeline.PAD
    assert heights == [whole, whole * 0.5, pytest.approx(whole * 0.3, abs=0.05)]


def test_two_pods_on_one_gpu_have_their_parts_of_it() -> None:
    units = {"nvidia.com/mps-core": 50, "nvidia.com/mps-memory": 80}
    smaller = {"nvidia.com/mps-core": 30, "nvidia.com/mps-memory": 24}
    holders = [{"pod": "default/chat", "units": units}, {"pod": "default/embed", "units": smaller}]
    gpu = {"index": 6, "model": "NVIDIA H200", "memoryBytes": 160 << 30, "holders": holders}
    shown = list(ET.fromstring(shares.drawn([gpu | {"mode": {"active": "mps"}}])).itertext())
    assert {"pod chat asks for", "chat 50 %", "chat 80 GiB", "embed 30 %", "embed 24 GiB"} <= set(shown)
    assert "nvidia.com/mps-memory: 24" in shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50 %"),
        (42.0, "percent", "42 %"),
        (1.98e9, "hertz", "1.98 GHz"),
        (12.0, "Bps", "12 B/s"),
        (4 << 30, "bytes", "4 GiB"),
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
    panel: dict[str, Any] = {"type": kind, "fieldConfig": {"defaults": {"unit": "percent"}}}
    series = [Series(f"line {n}", [(0.0, n), (10.0, 10.0 * n)], {"node": f"n{n}"}) for n in range(3)]
    drawn = words(f'<svg xmlns="http://www.w3.org/2000/svg">{charts.panel(panel, series, 500, 200)}</svg>')
    assert "20 %" in drawn
    assert ("n2" if kind == "table" else "line 2") in drawn
    assert "no data" in charts.panel(panel, [], 500, 200)
    panel["fieldConfig"]["defaults"]["noValue"] = "no GPU here is in mode mig"
    assert "no GPU here is in mode mig" in charts.panel(panel, [], 500, 200)


def test_of_many_lines_those_above_zero_have_names() -> None:
    panel = {"type": "timeseries", "fieldConfig": {"defaults": {}}}
    series = [Series(f"a line with a long name {n:02}", [(0.0, n // 36), (9.0, 0.0)]) for n in range(40)]
    drawn = words(f'<svg xmlns="http://www.w3.org/2000/svg">{charts.panel(panel, series, 500, 200)}</svg>')
    assert all(f"name {n:02}" in drawn for n in (36, 39, 0, 2))
    assert "name 03" not in drawn
    assert "and 33 more" in drawn


def screenshot(filtered: bytes) -> bytes:
    """A picture of 2 x 5 pixels, as its rows are filtered."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 2, 5, 8, 2, 0, 0, 0)
    return (
        png.SIGNATURE + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(filtered)) + chunk(b"IEND", b"")
    )


def test_a_picture_with_a_palette_has_the_same_pixels() -> None:
    plain = bytes([0, 9, 8, 7, 1, 2, 3])
    rows = bytes(
        [*plain, 1, 9, 8, 7, 1, 1, 1, 2, 1, 1, 1, 0, 0, 0, 3, 1, 1, 1, 2, 2, 2, 4, 1, 1, 1, 250, 0, 0]
    )
    _, _, before = png._decoded(screenshot(rows))
    assert [bytes(b"".join(row)) for row in before[:3]] == [
        bytes([9, 8, 7, 1, 2, 3]),
        bytes([9, 8, 7, 10, 9, 8]),
        bytes([10, 9, 8, 10, 9, 8]),
    ]
    assert list(before[3][0]) == [6, 5, 5]  # half of what is above
    assert list(before[4][0]) == [7, 6, 6]
    after = png.smaller(screenshot(rows))
    head, palette, data = (dict(png._chunks(after))[kind] for kind in (b"IHDR", b"PLTE", b"IDAT"))
    assert head[8:10] == bytes([8, 3])
    lines = zlib.decompress(data)
    shown = [[palette[3 * at : 3 * at + 3] for at in lines[n * 3 + 1 : n * 3 + 3]] for n in range(5)]
    assert shown == [list(row) for row in before]
