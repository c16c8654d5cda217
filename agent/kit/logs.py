"""Logging: one JSON object a line in a pod, readable lines on a terminal."""

import logging
import sys
from typing import Literal, TextIO

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


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
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty())]
        if console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Bridge()], level=max(_LEVELS[level], logging.WARNING), force=True)


class _Bridge(logging.Handler):
    """Hands records of the standard logging module to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger().bind(logger=record.name)
        event = {"exc_info": record.exc_info} if record.exc_info else {}
        log.log(record.levelno, "library_message", message=record.getMessage(), **event)
