"""Deadlines of tests fit the machine, those of the agent stay as they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import anyio
import pytest

from tests import pace


@pytest.fixture
def forty_times_slower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(pace.VARIABLE, "40")
    pace.pace.cache_clear()
    yield
    pace.pace.cache_clear()


def delay_in(module: str) -> float:
    """Seconds that `anyio.fail_after(10)` gives code of a module."""
    namespace = vars(ModuleType(module)) | {"anyio": anyio}
    exec("def scope():\n    return anyio.fail_after(10)", namespace)
    with namespace["scope"]() as scope:
        seconds: float = scope.deadline - anyio.current_time()
    return seconds


async def test_deadlines_of_tests_are_scaled_and_those_of_the_agent_are_not(forty_times_slower: None) -> None:
    assert delay_in("tests.component.anything") == pytest.approx(400, abs=50)
    assert delay_in("agent.kubelet.anything") == pytest.approx(10, abs=5)
    assert pace.scaled(3) == 120


def test_what_tests_wait_for_may_take_longer(forty_times_slower: None) -> None:
    """Of the deadlines that are too short for the program without that."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(0.6)"]
    assert subprocess.run(sleeps, timeout=0.5, check=False).returncode == 0
    with subprocess.Popen(sleeps) as process:
        assert process.wait(timeout=0.5) == 0
    with subprocess.Popen(sleeps, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=0.5)[0] == b""


@pytest.mark.timeout(100, func_only=True)
def test_a_test_s_own_time_is_scaled(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert (marker.args, marker.kwargs) == ((pace.scaled(100),), {"func_only": True})


def test_the_usual_time_is_scaled(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args == (pace.scaled(60),)


def test_a_slow_machine_is_slow_and_none_is_quicker_than_a_quiet_one() -> None:
    times = iter([0.0, pace.QUIET_SECONDS * pace.PIECES * 3])
    assert pace.slowdown(lambda: next(times)) == pytest.approx(3)
    assert pace.slowdown(lambda: 0.0) == 1


def test_the_figure_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "slowdown", lambda: 2.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv(pace.VARIABLE, raising=False)
    pace.measure(workers=6)
    assert os.environ[pace.VARIABLE] == "6.00"
    pace.measure(workers=2)
    assert os.environ[pace.VARIABLE] == "6.00"
    monkeypatch.setenv(pace.VARIABLE, "")
    monkeypatch.delenv(pace.VARIABLE)
    pace.measure(workers=1000)
    assert float(os.environ[pace.VARIABLE]) == pace.LARGEST
