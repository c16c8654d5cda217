"""For every test: blocking calls of agent code on the event loop raise; logs can be asserted on."""

import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from tests import pace

# On CI the same examples in every run: what fails there can be run again. Elsewhere new ones each time.
settings.register_profile(
    "house",
    deadline=None,  # the machine is shared: time says nothing here
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("house")


# Scenarios are imported, not collected, so pytest would not explain their assertions.
pytest.register_assert_rewrite("tests.scenarios")


def pytest_configure(config: pytest.Config) -> None:
    """Before there are workers of xdist, which are other processes and inherit the figure."""
    pace.measure(config.getoption("numprocesses", default=None) or 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test's own time, too, is as much longer as the machine is slower."""
    usual = float(config.getini("timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds, options = (marker.args[0], marker.kwargs) if marker else (usual, {})
        item.add_marker(pytest.mark.timeout(pace.scaled(seconds), **options), append=False)


@pytest.fixture(autouse=True, scope="session")
def _deadlines_for_this_machine() -> Iterator[None]:
    with pace.longer_deadlines():
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_blocking_calls() -> Iterator[None]:
    """Raises `blockbuster.BlockingError` where code under `agent/` sleeps, or reads a file, on the loop."""
    with blockbuster_ctx(scanned_modules=["agent"]):
        yield


@pytest.fixture
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Every event logged while the test runs, as dictionaries with `event` and `log_level`."""
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Tests of the command line set the log up for a stream that is closed when they end."""
    yield
    structlog.reset_defaults()
