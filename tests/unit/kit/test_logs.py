"""The log: one JSON object a line, or readable lines; libraries included."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from agent.kit import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave the process's logging as it was found."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def failing(secret: str) -> float:
    return len(secret) / 0


def test_json_lines_with_time_and_level() -> None:
    out = io.StringIO()
    logs.configure("info", "json", out)
    log = structlog.get_logger()
    log.debug("not_shown")
    log.info("gpu_found", gpu="GPU-1", index=0)
    (line,) = lines(out)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "gpu_found", "gpu": "GPU-1", "index": 0, "level": "info"}


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)],
)
def test_the_level_decides_what_is_written(level: str, shown: int) -> None:
    out = io.StringIO()
    logs.configure(level, "json", out)
    log = structlog.get_logger()
    for method in (log.debug, log.info, log.warning, log.error):
        method("event")
    assert len(lines(out)) == shown


def test_a_logger_made_before_the_configuration_follows_it() -> None:
    early = structlog.get_logger()
    out = io.StringIO()
    logs.configure("info", "json", out)
    early.info("event")
    assert [line["event"] for line in lines(out)] == ["event"]


def test_an_exception_is_one_line_and_tells_no_local_values() -> None:
    out = io.StringIO()
    logs.configure("info", "json", out)
    try:
        failing("2retnuh"[::-1])
    except ZeroDivisionError:
        structlog.get_logger().exception("it_failed")
    (line,) = lines(out)
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "hunter2" not in out.getvalue()


def test_readable_lines_on_a_terminal_and_json_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    logs.configure("info", "auto", terminal)
    structlog.get_logger().info("event", gpu="GPU-1")
    assert "event" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    logs.configure("info", "auto", pipe)
    structlog.get_logger().info("event")
    assert [line["event"] for line in lines(pipe)] == ["event"]


def test_a_traceback_on_the_console_tells_no_local_values() -> None:
    out = io.StringIO()
    logs.configure("info", "console", out)
    try:
        failing("2retnuh"[::-1])
    except ZeroDivisionError:
        structlog.get_logger().exception("it_failed")
    assert "ZeroDivisionError" in out.getvalue()
    assert "hunter2" not in out.getvalue()


def test_libraries_speak_through_the_same_lines_from_warning_on() -> None:
    out = io.StringIO()
    logs.configure("debug", "json", out)
    library = logging.getLogger("some.library")
    library.info("chatter")
    library.warning("careful: %s", "hot")
    library.log(35, "a level of its own")
    try:
        failing("x")
    except ZeroDivisionError:
        library.exception("oops")
    careful, own, oops = lines(out)
    assert (careful["event"], careful["logger"], careful["message"], careful["level"]) == (
        "library_message",
        "some.library",
        "careful: hot",
        "warning",
    )
    assert own["level"] == "warning"
    assert oops["exception"][0]["exc_type"] == "ZeroDivisionError"
