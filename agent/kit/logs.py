"""Logging: one JSON object a line in a pod, readable lines on a terminal."""

import logging
import sys
from typing import Literal, TextIO

import structlog

from agent.kit.configuration import Section

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Logging(Section, frozen=True):
    """How the log is written."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


def configure(level: str, style: Literal["auto", "json", "console"], stream: TextIO | None = None) -> None:
    """Set the process's log up: `level` debug..error; `auto` is console on a terminal and JSON elsewhere.

    Libraries that use the standard logging module speak through the same lines from WARNING on.
    """
    out = stream or sys.stderr
    console = style == "console" or (style == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks come without the values of local variables: those may be secrets, and are long.
    last: list[structlog.typing.Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if console
        else [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            _ordered,
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Bridge()], level=max(_LEVELS[level], logging.WARNING), force=True)


def _ordered(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """When, how grave and what first: people read these lines, too."""
    return {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)


class _Bridge(logging.Handler):
    """Hands records of the standard logging module to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger().bind(logger=record.name)
        event = {"exc_info": record.exc_info} if record.exc_info else {}
        # structlog knows the standard levels only; a library may have levels of its own in between.
        level = max((known for known in _LEVELS.values() if known <= record.levelno), default=logging.DEBUG)
        log.log(level, "library_message", message=record.getMessage(), **event)
