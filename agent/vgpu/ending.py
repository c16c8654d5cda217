"""Ends a container that keeps more memory of a GPU than it may, or the agent from its files: by option only.

All of its processes get SIGKILL, the first one among them, so that the kubelet sees the container end and
does with it what its pod's restartPolicy says. It takes the host's process IDs, and the right to signal
processes of other users (CAP_KILL).
"""

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from agent.holdings.owners import ProcessUnreadable, container_of_process
from agent.model.cgroup import ContainerRef
from agent.vgpu.isolation_errors import IsolationError

# A process may be forking when it is looked for.
MOST_PASSES = 5


class NotEnded(IsolationError):
    """Processes of a container cannot be ended."""


def end(pids: Collection[int], proc: Path) -> int:
    """End the containers that these processes are in; how many processes were ended. Blocks.

    Raises NotEnded. A process in no pod, or in one whose container is unknown, is left alone.
    """
    containers = {ref for pid in pids if (ref := _container(pid, proc)) and ref.container_id}
    ended: set[int] = set()
    for _ in range(MOST_PASSES if containers else 0):
        found = [pid for pid in _processes(proc) if pid not in ended and _container(pid, proc) in containers]
        if not found:
            break
        ended |= {pid for pid in found if _kill(pid, containers, proc)}
    return len(ended)


def processes_of(ids: Collection[str], proc: Path) -> list[int]:
    """Processes of containers that have these IDs at the runtime. Blocks. Raises NotEnded."""
    return [pid for pid in _processes(proc) if (ref := _container(pid, proc)) and ref.container_id in ids]


def _processes(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208  names alone
    except OSError as error:
        raise NotEnded(f"{proc} cannot be listed: {error.strerror}") from error


def _kill(pid: int, containers: Collection[ContainerRef], proc: Path) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise NotEnded(f"process {pid} cannot be named to the kernel: {error.strerror}") from error
    try:
        # Looked at again: the descriptor stays that process's, even if the number is used again meanwhile.
        if _container(pid, proc) not in containers:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except PermissionError as error:
        raise NotEnded(
            f"process {pid} cannot be ended: {error.strerror}; the agent needs the capability KILL, "
            "which the chart gives it with config.vgpu.aboveCap: end"
        ) from error
    finally:
        os.close(process)
    return True


def _container(pid: int, proc: Path) -> ContainerRef | None:
    try:
        return container_of_process(pid, proc)
    except ProcessUnreadable:
        return None
