"""The protocol between the uninstall hook and the agents: two annotations of each node, as JSON.

The hook writes REQUEST, the node's agent answers in REPORT. A request carries the time at which it ends, so
that agents go back into service by themselves when the caller was killed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from agent.model.pod import pods_counted

REQUEST = "gpu-node-agent.io/cleanup"
REPORT = "gpu-node-agent.io/cleanup-report"
# No request keeps an agent from its work for longer: one that names a later end is none, or it would be in
# force again as soon as the agent is back.
LONGEST_SECONDS = 2 * 3600.0
# Of the text in an annotation.
LONGEST_MESSAGE = 2000

EPOCH = datetime.fromtimestamp(0, UTC)

T = TypeVar("T")


class CleanupState(StrEnum):
    """The outcome of a request on one node."""

    CLEAN = "clean"
    REFUSED = "refused"  # pods stand in the way, and nothing was changed
    FAILED = "failed"  # it is tried again


class CleanupFailed(Exception):
    """A clean-up failed and may be tried again; the text names cause and remedy."""

    state = CleanupState.FAILED


class CleanupRefused(CleanupFailed):
    """Pods prevent the clean-up: it cannot succeed before they have ended."""

    state = CleanupState.REFUSED


class CleanupRequest(msgspec.Struct, frozen=True):
    """`until`: when it ends; a time in the past takes the request back."""

    id: str
    until: Annotated[datetime, msgspec.Meta(tz=True)]

    def seconds_left(self, now: datetime) -> float:
        """Seconds until the request ends; 0 or less: it has ended."""
        left = (self.until - now).total_seconds()
        return left if left <= LONGEST_SECONDS else 0.0


class CleanupReport(msgspec.Struct, frozen=True):
    """The answer to the request of the same ID."""

    id: str
    state: CleanupState
    message: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Both annotations of a node; one that cannot be read counts as none."""

    request: CleanupRequest | None = None
    report: CleanupReport | None = None
    present: bool = False  # at least one of them is there, readable or not

    @classmethod
    def of(cls, annotations: Mapping[str, str]) -> "Exchange":
        return cls(
            _read(annotations.get(REQUEST), CleanupRequest),
            _read(annotations.get(REPORT), CleanupReport),
            REQUEST in annotations or REPORT in annotations,
        )


def asking(request_id: str, now: datetime, seconds: float) -> dict[str, str | None]:
    """Annotations of a request that ends in `seconds`; an earlier one's report goes."""
    return _request(CleanupRequest(request_id, now + timedelta(seconds=seconds)))


def taking_back(request_id: str) -> dict[str, str | None]:
    """Annotations that end a request at once, whatever the clocks say."""
    return _request(CleanupRequest(request_id, EPOCH))


def answering(report: CleanupReport) -> dict[str, str]:
    """The annotation of an answer."""
    # Everybody who may get nodes reads it: it counts pods and names none.
    short = msgspec.structs.replace(report, message=pods_counted(report.message)[:LONGEST_MESSAGE])
    return {REPORT: msgspec.json.encode(short).decode()}


NOTHING: Mapping[str, str | None] = {REQUEST: None, REPORT: None}
"""Removes both annotations."""


def _request(request: CleanupRequest) -> dict[str, str | None]:
    return {REQUEST: msgspec.json.encode(request).decode(), REPORT: None}


def _read(text: str | None, kind: type[T]) -> T | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:  # of the wrong type or shape, too
        return None
