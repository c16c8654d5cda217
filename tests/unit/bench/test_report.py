"""The bench's own honesty: names, budgets, errors in place of values."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import registry, report
from tests.bench.__main__ import main
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Measurement, Taken, percentile

SKELETON = {
    "start_to_sockets_ready_ms": 600,
    "start_to_registered_real_kubelet_ms": None,
    "resident_memory_mib": 50,
    "resident_memory_peak_mib": 70,
    "idle_cpu_percent": 0.5,
    "allocate_p50_ms": 1.5,
    "allocate_p99_ms": 5,
    "list_send_ms": 20,
    "list_bytes": 4 * 1024 * 1024,
    "scrape_ms": 60,
}
NOWHERE = Conditions([], Path("/nowhere"))


async def good(_: Conditions) -> Mapping[str, Taken]:
    return {"kept_ms": Taken(1.23456, 10), "broken_ms": Taken(9, 10), "told_b": Taken(464, 1)}


async def bad(_: Conditions) -> Mapping[str, Taken]:
    raise TimeoutError("the agent is not ready")


async def forgetful(_: Conditions) -> Mapping[str, Taken]:
    return {"other": Taken(1, 1)}


GOOD = Measurement(
    (Figure("kept_ms", "ms", 2, ""), Figure("broken_ms", "ms", 2, ""), Figure("told_b", "B", None, "")), good
)
BAD = Measurement((Figure("lost_ms", "ms", 2, ""), Figure("gone_ms", "ms", None, "")), bad)
FORGETFUL = Measurement((Figure("asked_ms", "ms", 2, ""),), forgetful)


def test_the_figures_of_the_skeleton_are_there_with_their_budgets() -> None:
    figures = [figure for one in registry.discover() for figure in one.figures]
    budgets = {figure.name: figure.budget for figure in figures}
    assert {name: budgets.get(name, "missing") for name in SKELETON} == SKELETON
    assert all(figure.what and figure.unit for figure in figures)


def test_a_figure_is_taken_by_one_measurement_only() -> None:
    registry.discover()
    with pytest.raises(ValueError, match="allocate_p50_ms"):
        registry.measurement(Figure("allocate_p50_ms", "ms", 1, ""))(good)


async def test_values_are_told_beside_their_budgets() -> None:
    rows = await report.run([GOOD], NOWHERE)
    assert report.as_json(rows) == {
        "figures": [
            {"name": "kept_ms", "value": 1.2346, "unit": "ms", "budget": 2, "holds": True, "n": 10},
            {"name": "broken_ms", "value": 9, "unit": "ms", "budget": 2, "holds": False, "n": 10},
            {"name": "told_b", "value": 464, "unit": "B", "budget": None, "holds": None, "n": 1},
        ]
    }
    kept, broken, told = report.table(rows).splitlines()[1:]
    assert "holds" in kept
    assert "OVER" in broken
    assert "holds" not in told


async def test_what_cannot_be_taken_is_an_error_and_never_a_value() -> None:
    rows = await report.run([BAD, FORGETFUL, GOOD], NOWHERE)
    lost, gone, asked, *others = report.as_json(rows)["figures"]
    for entry in (lost, gone, asked):
        assert "value" not in entry
        assert entry["holds"] is False
    assert lost["error"] == "TimeoutError: the agent is not ready"
    assert "asked_ms" in asked["error"]
    assert len(others) == 3
    text = report.table(rows)
    assert "lost_ms was not taken: TimeoutError: the agent is not ready" in text
    assert text.count("ERROR") == 3


async def test_the_file_is_what_is_promised(tmp_path: Path) -> None:
    file = tmp_path / "build" / "bench.json"
    report.write(await report.run([GOOD], NOWHERE), file)
    assert json.loads(file.read_text())["figures"][0]["name"] == "kept_ms"


def test_the_list_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "allocate_p50_ms: " in capsys.readouterr().out


def test_an_unknown_name_is_a_wrong_command_line() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--only", "nonsense"])
    assert caught.value.code == 2


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_percentiles(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_a_percentile_of_known_values() -> None:
    assert percentile(range(1, 101), 0.5) == 50
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7], 0.99) == 7
