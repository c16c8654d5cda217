"""The status of one daemon as it changes, with the events of the changes."""

from dataclasses import replace

import structlog

from agent.kit.cell import Cell
from agent.mps.daemon_status import RESTARTED, DaemonState, DaemonStatus, EventReason, Reporter

log = structlog.get_logger()


class Publisher:
    """Publishes the status of one GPU's daemon in `status`, and reports what is worth an event."""

    def __init__(self, uuid: str, report: Reporter) -> None:
        self.uuid = uuid
        self.status: Cell[DaemonStatus] = Cell(DaemonStatus())
        self._report = report
        self._failure: str | None = None  # the one that was reported last

    @property
    def now(self) -> DaemonStatus:
        """The newest status."""
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

    def report(self, kind: EventReason, message: str, pids: frozenset[int] = frozenset()) -> None:
        """Tell people something about this GPU's daemon."""
        self._report(kind, self.uuid, message, pids)
