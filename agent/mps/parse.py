"""Reading what the control daemon says: leniently, since the wording changes between drivers. Pure."""

import re
from enum import Enum

from agent.mps.mps_errors import DaemonRefused, NotSupported

_PID = re.compile(r"[0-9]{1,10}")
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")
_PERCENTAGE = re.compile(r"\d{1,3}\.\d+")
_REFUSALS = ("not found", "invalid", "denied", "not permitted", "failed", "cannot", "error")


class ServerState(Enum):
    """The state of an MPS server by its own word (driver 550 and newer)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    UNKNOWN = "UNKNOWN"


def check(command: str, answer: str) -> str:
    """The answer, if it is one. Raises NotSupported, DaemonRefused with the daemon's words."""
    lowered = answer.lower()
    if "unknown command" in lowered:
        raise NotSupported(f"this MPS control daemon has no command {command.partition(' ')[0]!r}")
    if any(mark in lowered for mark in _REFUSALS):
        raise DaemonRefused(f"MPS control daemon on {command!r}: {' '.join(answer.split())}")
    return answer


def parts(text: str) -> tuple[list[str], float | None]:
    """A session's answers, each of which a percentage of its own line (`100.0`) ends; the last of these."""
    found: list[str] = []
    lines: list[str] = []
    last: float | None = None
    for line in text.splitlines():
        if _PERCENTAGE.fullmatch(line.strip()):
            last = float(line)
            found.append("\n".join(lines))
            lines = []
        else:
            lines.append(line)
    return ([] if lines else found), last


def pids(answer: str) -> tuple[int, ...]:
    """Process IDs, one a line; anything else on a line is passed over."""
    found = (line.split() for line in answer.splitlines())
    return tuple(int(words[0]) for words in found if words and _PID.fullmatch(words[0]))


def percentage(answer: str) -> float | None:
    """The last number of an answer, from 0 to 100."""
    found = [float(number) for number in _NUMBER.findall(answer)]
    return found[-1] if found and 0 <= found[-1] <= 100 else None


def server_state(answer: str) -> ServerState:
    for word in re.findall(r"[A-Za-z]+", answer.upper()):
        if word in ServerState.__members__:
            return ServerState[word]
    return ServerState.UNKNOWN
