"""Each test gets a campaign of its name; its count is printed at the end, and is in the report."""

import logging
from typing import Any

import pytest
import structlog

from tests.fuzz.campaign import COUNT, Campaign

PROPERTY = "fuzz"


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Campaign:
    """The campaign of this test."""
    name = request.node.name.removeprefix("test_")

    def told(line: str) -> None:
        print(line)
        request.node.user_properties.append((PROPERTY, line))

    return Campaign(name, told)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Thousands of inputs are refused with a line of the log each."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's own time is that of all its inputs; each of them has a deadline."""
    for item in items:
        if item.path.parent.name == "fuzz":
            item.add_marker(pytest.mark.timeout(300 + COUNT // 20))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many inputs ran, in workers of xdist, too, whose output nobody sees."""
    lines = [
        value
        for report in terminalreporter.stats.get("passed", ())
        for key, value in getattr(report, "user_properties", ())
        if key == PROPERTY and report.when == "call"
    ]
    if lines:
        terminalreporter.section("fuzz")
        for line in lines:
            terminalreporter.write_line(line)
