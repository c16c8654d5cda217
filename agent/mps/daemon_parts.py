"""How MPS daemons are run, by the configuration, and the parts of one that starting and probing share."""

from dataclasses import dataclass
from pathlib import Path

from agent.mps.compute_mode import ComputeModes, ExclusiveMode
from agent.mps.control_commands import Control
from agent.mps.daemon_logs import Logs
from agent.mps.daemon_status import StatusPublisher
from agent.mps.directories import Directories


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all daemons of a node; durations in seconds."""

    cgroups: Path = Path("/sys/fs/cgroup")
    shared_memory: int = 4 << 30  # bytes of each GPU
    exclusive: bool = True  # keep GPUs in compute mode EXCLUSIVE_PROCESS while they serve
    prestart: bool = True  # start the server before the first client, and hold it to be up
    probe_seconds: float = 5.0
    log_seconds: float = 2.0  # between two looks into the logs, where the kernel does not report writes
    orphan_seconds: float = 30.0  # for clients of a dead daemon's server to leave
    quit_seconds: int = 5  # for clients to leave when the daemon is stopped


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """Made by the daemon's supervisor, for as long as it lives."""

    control: Control
    folders: Directories
    exclusive: ExclusiveMode
    logs: Logs
    publisher: StatusPublisher
    options: Options
    compute: ComputeModes
