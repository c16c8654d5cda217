"""Several processes write figures into one file, and none loses another's."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.storm import figures


def test_figures_stand_beside_those_of_others(tmp_path: Path) -> None:
    report = tmp_path / "build" / "storm.json"
    figures.add(report, mutants=6, mutants_found=5)
    figures.add(report, steps=100, seeds=2)
    assert figures.add(report, mutants_found=6)["mutants_found"] == 6
    written = json.loads(report.read_text(encoding="utf-8"))
    assert list(written.items()) == [("seeds", 2), ("steps", 100), ("mutants", 6), ("mutants_found", 6)]
    assert [each.name for each in report.parent.iterdir()] == ["storm.json"]


def test_nobody_loses_what_another_writes_at_the_same_time(tmp_path: Path) -> None:
    report = tmp_path / "storm.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: figures.add(report, **{f"figure_{number}": number}), range(64)))
    assert json.loads(report.read_bytes()) == {f"figure_{number}": number for number in range(64)}


def test_a_report_that_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    report = tmp_path / "storm.json"
    for torn in (b"", b'{"steps": 1', b"[]", b"\xff\xfe"):
        report.write_bytes(torn)
        assert figures.add(report, steps=3) == {"steps": 3}
