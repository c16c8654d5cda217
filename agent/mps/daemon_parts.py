"""How MPS daemons are run, by the configuration, the parts of one, and its status."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import structlog

from agent.kit.tasks import Cell
from agent.mps.compute_mode import ComputeModes, ExclusiveMode
from agent.mps.control_commands import Control, ServerState
from agent.mps.daemon_logs import Logs
from agent.mps.directories import Directories

# The status of one GPU's daemon as plugins, metrics and `status` see it, and the events of its changes.

log = structlog.get_logger()

RESTARTED = "; it is restarted"  # behind the reason of a daemon that ended


class DaemonState(Enum):
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
    cut: int = 0  # connections that said nothing and were cut off
    unguarded: str = ""  # why such connections cannot be seen, in words

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
    SILENT = "MPSSilentClient"
    ADVISORY = "MPSCapsAdvisory"


# Reports about a GPU, by UUID, in words; the last are processes that the words are about.
Reporter = Callable[[EventReason, str, str, frozenset[int]], None]


class StatusPublisher:
    """Publishes the status of one GPU's daemon in `status`, and reports its changes."""

    def __init__(self, uuid: str, report: Reporter) -> None:
        self.uuid = uuid
        self.status: Cell[DaemonStatus] = Cell(DaemonStatus())
        self._report = report
        self._failure: str | None = None  # the one that was reported last

    @property
    def now(self) -> DaemonStatus:
        return self.status.value

    def publish(self, after: DaemonStatus, culprits: frozenset[int] = frozenset()) -> None:
        """Publish a status; `culprits` are processes that a fault is about."""
        before = self.now
        if after == before:
            return
        self.status.publish(after)
        if (after.state, after.reason) == (before.state, before.reason):
            return
        log.info(
            "mps_daemon", gpu=self.uuid, state=after.state.value, reason=after.reason or None, pid=after.pid
        )
        mended = after.serving and (before.state is DaemonState.FAULT or self._failure is not None)
        if after.serving:
            self._failure = None
        if after.state is DaemonState.FAULT and before.state is not DaemonState.FAULT:
            self.report(EventReason.FAULT, after.reason, culprits)
        elif mended:
            self.report(EventReason.RECOVERED, "the MPS control daemon serves again")

    def failed(self, problem: str) -> None:
        """The daemon ended, or did not start: it will be started again. The same failure is reported once."""
        before = self.now
        self.publish(
            replace(
                before,
                state=DaemonState.STARTING,
                reason=f"{problem}{RESTARTED}",
                pid=None,
                server=None,
                server_state=None,
                adopted=False,
                restarts=before.restarts + 1,
            )
        )
        if problem != self._failure:
            self._failure = problem
            self.report(EventReason.FAILED, problem)

    def cut(self, number: int) -> None:
        """So many connections were cut off."""
        self.publish(replace(self.now, cut=self.now.cut + number))

    def unguarded(self, problem: str) -> None:
        self.publish(replace(self.now, unguarded=problem))

    def report(self, kind: EventReason, message: str, pids: frozenset[int] = frozenset()) -> None:
        self._report(kind, self.uuid, message, pids)


# How MPS daemons are run, by the configuration, and the parts of one that starting and probing share.


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
