"""From a process to its pod and container, by the cgroup that the kubelet put it into."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent.model.cgroup import ContainerRef, container_of, kubelet_of, started_by_agent

PROC = Path("/proc")
MPS_NAME = b"nvidia-cuda-mps"  # begins the names of MPS daemons and servers
KTHREADD = 2  # of the host alone: in no other PID namespace is that a thread of the kernel


class ProcessUnreadable(Exception):
    """There is no such process here: it has ended, or the agent is not in the host's PID namespace."""


def container_of_process(pid: int, proc: Path = PROC) -> ContainerRef | None:
    """The container of a process; None: it is in no pod. Blocks. Raises ProcessUnreadable."""
    try:
        return container_of(_cgroups(proc, str(pid)))
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


def pods_of_processes(pids: Iterable[int], proc: Path = PROC) -> Mapping[int, str] | None:
    """The UIDs of these processes' pods, empty for none; without the agent's own and those that have ended.

    None: `proc` does not show the host's processes, and the driver's process IDs are those of others in it.
    Blocks.
    """
    found: dict[int, str] = {}
    try:
        if (proc / str(KTHREADD) / "comm").read_bytes() != b"kthreadd\n":
            return None
        own = _cgroups(proc, "self")
    except OSError:
        return None
    for pid in pids:
        with suppress(OSError):
            cgroups = _cgroups(proc, str(pid))
            if not started_by_agent(cgroups, own):
                container = container_of(cgroups)
                found[pid] = container.pod_uid if container else ""
    return found


def pods_of_strangers(pids: Iterable[int], proc: Path = PROC) -> Mapping[int, str]:
    """The UIDs of those of these processes' pods that may have ended before the agent began. Blocks.

    MPS daemons are left out: one that got no cgroup of its own stays in that of the agent's pod before. So
    are pods of other kubelets on the host, as of kind: the API server of this one knows none of them.
    """
    found: dict[int, str] = {}
    pods = pods_of_processes(pids, proc)
    kubelet = kubelet_of(_cgroups(proc, "self")) or "" if pods else ""
    for pid, uid in (pods or {}).items():
        with suppress(OSError):
            foreign = kubelet_of(_cgroups(proc, str(pid))) != kubelet
            if uid and not foreign and not (proc / str(pid) / "comm").read_bytes().startswith(MPS_NAME):
                found[pid] = uid
    return found


def _cgroups(proc: Path, pid: str) -> str:
    return (proc / pid / "cgroup").read_bytes().decode(errors="replace")
