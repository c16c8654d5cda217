"""From a process to its pod and container, by the cgroup that the kubelet put it into."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent.model.cgroup import ContainerRef, container_of

PROC = Path("/proc")


class ProcessUnreadable(Exception):
    """There is no such process here: it has ended, or the agent is not in the host's PID namespace."""


def container_of_process(pid: int, proc: Path = PROC) -> ContainerRef | None:
    """The container of a process; None: it is in no pod. Blocks. Raises ProcessUnreadable."""
    try:
        return container_of((proc / str(pid) / "cgroup").read_bytes().decode(errors="replace"))
    except OSError as error:
        raise ProcessUnreadable(
            f"process {pid} cannot be looked up below {proc}: {error.strerror}"
        ) from error


class Owners:
    """Looks each process up once, and remembers it while it is still asked about."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[int, ContainerRef | None] = {}

    def of(self, pids: Iterable[int]) -> Mapping[int, ContainerRef | None]:
        """The containers of these processes (None: in no pod); unreadable ones are left out. Blocks."""
        found: dict[int, ContainerRef | None] = {}
        for pid in pids:
            with suppress(ProcessUnreadable):
                known = pid in self._known
                found[pid] = self._known[pid] if known else container_of_process(pid, self._proc)
        # One that is not asked about has ended, and its number may be another's next time.
        self._known = found
        return found
