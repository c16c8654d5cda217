"""Reading what the control daemon says: leniently, since the wording changes between drivers. Pure."""

import re
from dataclasses import dataclass
from enum import Enum

from agent.mps.errors import CommandRefused, NotSupported

_PID = re.compile(r"[0-9]{1,10}")
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])")
_PERCENTAGE = re.compile(r"\d{1,3}\.\d+")
_LIMIT = re.compile(r"(?i)(?<![\w.])([0-9]{1,15})\s*([GMK])i?B?\b")
_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_REFUSALS = ("not found", "invalid", "denied", "not permitted", "failed", "cannot", "error")


class ServerState(Enum):
    """What an MPS server says of itself (driver 550 and newer)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Client:
    """A row of `ps`: a process that is connected to a server."""

    pid: int  # in the daemon's PID namespace
    server: int | None = None
    device: str = ""  # part of the GPU's UUID
    command: str = ""


def check(command: str, answer: str) -> str:
    """The answer, if it is one. Raises NotSupported, CommandRefused with the daemon's words."""
    lowered = answer.lower()
    if "unknown command" in lowered:
        raise NotSupported(f"this MPS control daemon has no command {command.partition(' ')[0]!r}")
    if any(mark in lowered for mark in _REFUSALS):
        raise CommandRefused(f"MPS control daemon on {command!r}: {' '.join(answer.split())}")
    return answer


def parts(text: str) -> list[str]:
    """A session's answers, each of which ends in a percentage of its own line (`100.0`), without these."""
    found: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        if _PERCENTAGE.fullmatch(line.strip()):
            found.append("\n".join(lines))
            lines = []
        else:
            lines.append(line)
    return [] if lines else found


def pids(answer: str) -> tuple[int, ...]:
    """Process IDs, one a line; anything else on a line is passed over."""
    found = (line.split() for line in answer.splitlines())
    return tuple(int(words[0]) for words in found if words and _PID.fullmatch(words[0]))


def percentage(answer: str) -> float | None:
    """The last number of an answer, from 0 to 100."""
    found = [float(number) for number in _NUMBER.findall(answer)]
    return found[-1] if found and 0 <= found[-1] <= 100 else None


def memory_bytes(answer: str) -> int | None:
    """A memory limit; None: the daemon has none set."""
    found = _LIMIT.findall(answer)
    return int(found[-1][0]) * _BYTES[found[-1][1].upper()] if found else None


def server_state(answer: str) -> ServerState:
    """The state that an answer names."""
    for word in re.findall(r"[A-Za-z]+", answer.upper()):
        if word in ServerState.__members__:
            return ServerState[word]
    return ServerState.UNKNOWN


def clients(answer: str) -> tuple[Client, ...]:
    """Rows of `ps`: columns are found by their headings; rows that do not start with a PID are no clients."""
    rows = [line.split() for line in answer.splitlines() if line.strip()]
    heading = next((row for row in rows if row[0].upper() == "PID"), None)
    places = {name.upper(): place for place, name in enumerate(heading or ("PID",))}
    found = []
    for row in rows:
        if not _PID.fullmatch(row[0]):
            continue
        server = _cell(row, places.get("SERVER"))
        found.append(
            Client(
                int(row[0]),
                int(server) if _PID.fullmatch(server) else None,
                _cell(row, places.get("DEVICE")),
                " ".join(row[places["COMMAND"] :]) if "COMMAND" in places else "",
            )
        )
    return tuple(found)


def _cell(row: list[str], place: int | None) -> str:
    return row[place] if place is not None and place < len(row) else ""
