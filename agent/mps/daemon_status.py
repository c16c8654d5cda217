"""How one GPU's daemon is doing, as plugins, metrics and `status` see it."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from agent.mps.directories import Directories
from agent.mps.parse import ServerState

RESTARTED = "; it is restarted"  # behind the reason of a daemon that ended


class DaemonState(Enum):
    """The life of a daemon."""

    STOPPED = "stopped"
    STARTING = "starting"
    SERVING = "serving"
    FAULT = "fault"  # a client's fatal error: no new clients until the affected ones have left
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """One daemon at one moment. Only `serving` ones take pods."""

    state: DaemonState = DaemonState.STOPPED
    reason: str = ""  # in words; empty when serving
    pid: int | None = None
    server: int | None = None
    server_state: ServerState | None = None  # None: driver before 550, or no server yet
    adopted: bool = False  # it was started by an earlier agent
    restarts: int = 0
    fault: str = ""  # what a fault is known by, in words
    faults: int = 0
    multi_user: bool | None = None  # None: not known, as of an adopted one
    private_shm: bool = True  # False: it shares /dev/shm with the node

    @property
    def serving(self) -> bool:
        """Whether a pod that starts now would find it."""
        return self.state is DaemonState.SERVING


class EventReason(Enum):
    """Reports of a supervisor; the values are reasons of Kubernetes events."""

    FAILED = "MPSDaemonFailed"
    FAULT = "MPSFault"
    RECOVERED = "MPSRecovered"
    IMPOSTOR = "MPSFalseDaemon"
    SETTING = "MPSSettingRestored"
    LEFT = "MPSNotGivenBack"
    OTHERS_MODE = "ComputeModeExclusive"
    USERS = "MPSUsersApart"
    ADVISORY = "MPSCapsAdvisory"


class Reporter(Protocol):
    """Makes an event of it, and a log line."""

    def __call__(
        self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()
    ) -> None:
        """`pids` are processes that the message is about."""


def shared_memory_source(status: DaemonStatus, folders: Directories) -> str:
    """The host folder that pods must have as /dev/shm: the one that the daemon has."""
    return str(folders.shm) if status.private_shm else "/dev/shm"  # noqa: S108
