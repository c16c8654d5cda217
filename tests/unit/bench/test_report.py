"""The bench's own honesty: names, budgets, errors in place of values."""

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import registry, report
from tests.bench.__main__ import main
from tests.bench.calibration import LARGEST_SLOWDOWN, QUIET, Calibration, calibrator
from tests.bench.client import SWITCH_SECONDS, undisturbed
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Measurement, Taken, percentile

SKELETON = {
    "start_to_sockets_ready_ms": 600,
    "start_to_registered_real_kubelet_ms": None,
    "resident_memory_mib": 55,
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
    rows = await report.run([GOOD], NOWHERE, lambda: QUIET)
    assert report.as_json(rows)["figures"] == [
        {
            "name": "kept_ms",
            "value": 1.2346,
            "unit": "ms",
            "budget": 2,
            "holds": True,
            "n": 10,
            "slowdown": 1,
        },
        {"name": "broken_ms", "value": 9, "unit": "ms", "budget": 2, "holds": False, "n": 10, "slowdown": 1},
        {"name": "told_b", "value": 464, "unit": "B", "budget": None, "holds": None, "n": 1},
    ]
    kept, broken, told, _ = report.table(rows).splitlines()[1:]
    assert "holds" in kept
    assert "OVER" in broken
    assert "holds" not in told


SLOW = Calibration(
    QUIET.python * 2, QUIET.python_tail * 5, QUIET.call * 3, QUIET.call_tail * 4, QUIET.python_cpu * 1.5
)


@pytest.mark.parametrize(
    ("figure", "value", "slowdown", "holds"),
    [
        (Figure("work_p99_ms", "ms", 20, ""), 99, 5, True),
        (Figure("work_p99_ms", "ms", 20, ""), 101, 5, False),
        (Figure("work_p50_ms", "ms", 20, ""), 41, 2, False),
        (Figure("call_p99_ms", "ms", 1, ""), 3.9, 4, True),
        (Figure("call_p50_ms", "ms", 1, ""), 3.1, 3, False),
        (Figure("resident_memory_mib", "MiB", 50, ""), 51, 1, False),  # memory does not grow with the load
        (Figure("streams", "streams", 0, ""), 0, 1, True),
        (Figure("idle_cpu_percent", "%", 0.5, ""), 0.74, 1.5, True),  # by processor time
        (Figure("idle_cpu_percent", "%", 0.5, ""), 0.76, 1.5, False),
    ],
)
def test_a_budget_counts_after_the_machine(
    figure: Figure, value: float, slowdown: float, holds: bool
) -> None:
    row = report.Row(figure, Taken(value, 1), machine=SLOW)
    assert row.slowdown == pytest.approx(slowdown)
    assert row.holds is holds


def test_a_faster_machine_hides_no_regression() -> None:
    halves = {name: value / 2 for name, value in asdict(QUIET).items()}
    fast = Calibration(**halves)
    figure = Figure("work_p99_ms", "ms", 20, "")
    assert report.Row(figure, Taken(11, 1), machine=fast).holds is False
    assert report.Row(figure, Taken(9, 1), machine=fast).holds is True


def test_a_machine_that_is_too_busy_judges_nothing_but_what_holds_anyway() -> None:
    factor = LARGEST_SLOWDOWN * 2
    busy = replace(QUIET, python_tail=QUIET.python_tail * factor)
    figure = Figure("work_p99_ms", "ms", 20, "")
    late, in_time = (report.Row(figure, Taken(value, 1), machine=busy) for value in (21, 19))
    assert (late.holds, in_time.holds) == (None, True)
    assert "BUSY: the machine was over 8 times slower" in report.table([late])
    assert "BUSY" not in report.table([in_time])


async def test_the_calibration_is_of_the_same_run_and_stands_in_the_report() -> None:
    times = iter([QUIET, SLOW, QUIET])
    rows = await report.run([GOOD, GOOD], NOWHERE, lambda: next(times))
    assert {row.machine for row in rows} == {QUIET.together(SLOW)}
    found = report.as_json(rows)["calibration"]
    assert found["measured_ms"]["python_tail"] == pytest.approx(QUIET.python_tail * 3)
    assert found["quiet_ms"]["call"] == QUIET.call
    assert "calibration: pure Python 3.90 ms" in report.table(rows)


def test_a_calibration_takes_both_pieces_of_work() -> None:
    with calibrator() as calibrated:
        taken = calibrated()
    # A processor ten times as fast as the one of the budgets is not there yet.
    assert QUIET.python / 10 < taken.python <= taken.python_tail
    assert QUIET.call / 10 < taken.call <= taken.call_tail


async def test_what_cannot_be_taken_is_an_error_and_never_a_value() -> None:
    rows = await report.run([BAD, FORGETFUL, GOOD], NOWHERE, lambda: QUIET)
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
    report.write(await report.run([GOOD], NOWHERE, lambda: QUIET), file)
    assert json.loads(file.read_text())["figures"][0]["name"] == "kept_ms"


def test_the_list_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "allocate_p50_ms: " in capsys.readouterr().out


def test_figures_on_the_cluster_are_a_group_of_their_own() -> None:
    in_group = {figure.name for one in registry.discover() if one.cluster for figure in one.figures}
    assert in_group == {
        *("label_to_pod_running_p50_ms", "start_to_registered_real_kubelet_ms"),
        *("dra_pod_start_over_plain_ms", "dra_pod_start_over_no_gpu_ms", "dra_pod_bound_over_plain_ms"),
        *("dra_prepare_p99_ms", "dra_prepare_cold_ms", "dra_switch_ms", "dra_switch_scheduler_ms"),
    }


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


def test_the_bench_looks_for_no_garbage_between_the_calls_that_it_times() -> None:
    before = sys.getswitchinterval()
    with undisturbed():
        assert not gc.isenabled()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert (gc.isenabled(), sys.getswitchinterval()) == (True, before)
