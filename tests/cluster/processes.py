"""Processes by identity: pid and start time, so that a reused pid is never taken for the old process."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for all time on this boot; `start` is in clock ticks since boot."""

    pid: int
    start: int


def _stat(pid: int) -> list[str] | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> Identity | None:
    """The identity of a live process; None for one that is gone or a zombie (only its parent is late)."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return Identity(pid, int(fields[19]))


def alive(identity: Identity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, number: signal.Signals) -> None:
    """Signal this very process; nothing happens when it is gone."""
    if alive(identity):
        with suppress(ProcessLookupError):
            os.kill(identity.pid, number)


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def wait_gone(identities: Iterable[Identity], timeout: float) -> bool:
    """Wait until none of the processes lives; False when `timeout` seconds did not suffice."""
    deadline = time.monotonic() + timeout
    waiting = list(identities)
    while waiting := [identity for identity in waiting if alive(identity)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 when it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0
