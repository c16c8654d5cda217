"""Asks a running control daemon how it is, and judges the answers.

The daemon's own word decides wherever it gives one (driver 550 and newer). Its logs are written by anybody
who reaches the fifo in its pipe folder: there they are a reason to ask at once. Before 550 nothing else shows
of a fault, and a fault by the logs is held to last the longer the more often one is logged.
"""

import os
from contextlib import suppress
from dataclasses import replace

import anyio
import anyio.to_thread
import structlog

from agent.kit.tasks import Backoff
from agent.mps import processes
from agent.mps.connections import Guard, use_of
from agent.mps.control_commands import ServerState, Survey
from agent.mps.daemon_parts import DaemonParts, DaemonState, DaemonStatus, EventReason
from agent.mps.mps_errors import DaemonRefused, MpsError, ProgramMissing, StartFailed, Unanswered
from agent.mps.processes import Process

log = structlog.get_logger()

HANG_SECONDS = 60.0  # without an answer, and without a server that clients could depend on
SERVER_SECONDS = 15.0  # the first context on a cold GPU takes seconds
POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0  # in which a server that takes its own fault in may still call itself ACTIVE
URGENT_SECONDS = 0.05  # before a probe that the logs call for; doubled while they call for nothing
LEAST_FAULT_SECONDS = 0.5  # of a fault by the logs alone; doubled each time ...
LONGEST_FAULT_SECONDS = 60.0  # ... up to this, and from the start where none was logged for so long
FULL_PERCENTAGE = 100.0
REPORT_SECONDS = 600.0  # a setting that is changed again and again is reported once in so long


class DaemonProber:
    """Watches one running daemon; `clients` are the PIDs of its clients as of the last probe."""

    def __init__(self, parts: DaemonParts) -> None:
        self.clients: tuple[int, ...] = ()
        self._parts = parts
        self._kept: str | None = None  # why one that hangs was not ended, as it was logged last
        self._urgency = Backoff(URGENT_SECONDS, parts.options.probe_seconds, jitter=0.0)
        self._turned = -SETTLE_SECONDS  # when the logs last showed a fault's begin or end
        self._faults = Backoff(LEAST_FAULT_SECONDS, LONGEST_FAULT_SECONDS, jitter=0.0)
        self._held_until = 0.0  # a fault by the logs alone lasts so long at least
        self._setting_reported = -REPORT_SECONDS
        self._guard = Guard(parts)

    @property
    def _uuid(self) -> str:
        return self._parts.publisher.uuid

    async def watch(self, process: Process) -> None:
        """Return when the daemon has ended."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        self.clients = ()
        try:
            if not await anyio.to_thread.run_sync(process.alive):
                return  # its PID is another process's by now
            async with anyio.create_task_group() as group:
                group.start_soon(self._probing, process)
                group.start_soon(self._guard.run, process)
                await anyio.wait_readable(descriptor)
                group.cancel_scope.cancel()
        finally:
            anyio.notify_closing(descriptor)
            os.close(descriptor)

    async def _probing(self, process: Process) -> None:
        answered = anyio.current_time()
        mute = False  # there is nothing to ask the daemon with
        async with self._parts.logs.watched():
            while True:
                try:
                    with self._guard.asking():
                        await self._probe()
                    answered, mute = anyio.current_time(), False
                except ProgramMissing as error:
                    # The daemon lives, and its clients with it: what it was last seen to be stays true.
                    if not mute:
                        log.warning("mps_daemon_not_asked", gpu=self._uuid, problem=str(error))
                    answered, mute = anyio.current_time(), True
                except MpsError as error:
                    now = self._parts.publisher.now
                    self._parts.publisher.publish(replace(now, state=DaemonState.STARTING, reason=str(error)))
                    if isinstance(error, Unanswered) and anyio.current_time() - answered > HANG_SECONDS:
                        await self._end_hung(process)
                await self._until_due()

    # -- what the logs are worth -------------------------------------------------------------------

    async def _until_due(self) -> None:
        """Return when the daemon is to be asked again: sooner where the logs call for it.

        Writing into them without end causes no more than the usual probes.
        """
        now = anyio.current_time()
        due = now + self._parts.options.probe_seconds
        called = self._unsettled()
        if called:
            due = now + self._urgency.next()
        elif self._held_until > now:
            due = min(due, self._held_until)
        turns = self._parts.logs.said.turns
        while (left := due - anyio.current_time()) > 0:
            with anyio.move_on_after(left):
                await self._parts.logs.grown()
                self._guard.suspect()
            if self._parts.logs.said.turns != turns and not called:
                called = True
                self._turned = anyio.current_time()
                due = min(due, self._turned + self._urgency.next())
                self._judge_by_logs()
        if not called:
            self._urgency.reset()

    def _unsettled(self) -> bool:
        """Whether the logs showed a change a moment ago that the server has not owned to."""
        said = self._parts.logs.said.fault is not None
        owned = self._parts.publisher.now.state is DaemonState.FAULT
        return said != owned and anyio.current_time() - self._turned < SETTLE_SECONDS

    def _judge_by_logs(self) -> None:
        """Publish a fault of the logs at once, where the daemon itself reports none."""
        now = self._parts.publisher.now
        if self._parts.control.gives_state or now.server is None:
            return
        if now.serving or now.state is DaemonState.FAULT:
            self._publish_judged(now, self._fault_by_logs())

    def _fault_by_logs(self) -> str | None:
        """The fault by the logs of a server of an old driver; it lasts a while at least."""
        now = anyio.current_time()
        before = self._parts.publisher.now
        if (fault := self._parts.logs.said.fault) is None:
            return before.fault if before.state is DaemonState.FAULT and now < self._held_until else None
        if before.state is not DaemonState.FAULT:
            if now - self._held_until > LONGEST_FAULT_SECONDS:
                self._faults.reset()
            self._held_until = now + self._faults.next()
        return fault

    # -- one probe ---------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Look once and publish what was seen. Raises MpsError."""
        await self._parts.exclusive.hold(lost=True)
        survey = await self._survey()
        server = survey.servers[0] if survey.servers else None
        state = survey.state
        if server is None or state is ServerState.INITIALIZING:
            self.clients = ()
        elif survey.clients is not None:
            self.clients = survey.clients
        elif server != self._parts.publisher.now.server:
            self.clients = ()
        await self._restore_percentage(survey.percentage)
        seen = replace(self._parts.publisher.now, server=server, server_state=state)
        self._publish_judged(seen, self._fault(server, state))

    def _fault(self, server: int | None, state: ServerState | None) -> str | None:
        if server is not None and not self._parts.control.gives_state:
            return self._fault_by_logs()
        if state is ServerState.FAULT:
            return "its server says FAULT"
        if anyio.current_time() - self._turned >= SETTLE_SECONDS:
            self._parts.logs.said.clear()
        return None

    def _publish_judged(self, seen: DaemonStatus, fault: str | None) -> None:
        """Publish `seen`, in or out of fault."""
        begins = fault is not None and seen.state is not DaemonState.FAULT
        ends = fault is None and seen.state is DaemonState.FAULT
        if self._parts.control.gives_state and (begins or ends):
            self._urgency.reset()  # what the logs called for was true
        if fault and not begins:
            fault = seen.fault  # one fault, one reason
        after = replace(
            seen,
            state=DaemonState.FAULT if fault else DaemonState.SERVING,
            reason=f"a client's fatal error: {fault}" if fault else "",
            fault=fault or "",
            faults=seen.faults + begins,
        )
        # A writer of the log may name any process; at least it must be a client.
        self._parts.publisher.publish(after, frozenset(self._parts.logs.said.culprits & set(self.clients)))

    async def _restore_percentage(self, found: float | None) -> None:
        """Set the default percentage back, which MPS of driver 535 lets any user change."""
        if found in (None, FULL_PERCENTAGE):
            return
        try:
            await self._parts.control.set_default_percentage(int(FULL_PERCENTAGE))
        except DaemonRefused as error:
            # Clients are served all the same.
            log.warning("mps_percentage_not_restored", gpu=self._uuid, found=found, problem=str(error))
            return
        if anyio.current_time() - self._setting_reported >= REPORT_SECONDS:
            self._setting_reported = anyio.current_time()
            self._parts.publisher.report(
                EventReason.SETTING,
                f"somebody set the default active thread percentage to {found:g}, it was set back to "
                f"{FULL_PERCENTAGE:g}: MPS of driver 535 lets every user change it who reaches the control "
                "socket, that of 550 only root",
            )

    async def _survey(self) -> Survey:
        """Server, state and clients; a server is started where there is none and one is wanted."""
        known, state = self._parts.publisher.now.server, self._parts.publisher.now.server_state
        try:
            survey = await self._parts.control.survey(known, clients=state in (None, ServerState.ACTIVE))
        except Unanswered:
            survey = await self._parts.control.survey(known)
        if not survey.servers and self._parts.options.prestart:
            await self._start_server()
            survey = await self._parts.control.survey()
        if survey.servers and survey.servers[0] != known:
            survey = await self._parts.control.survey(survey.servers[0])
            if survey.state is ServerState.ACTIVE:
                # At once: clients that were named count, should it hang.
                with suppress(Unanswered):
                    survey = await self._parts.control.survey(survey.servers[0], clients=True)
        return survey

    async def _start_server(self) -> None:
        failed = self._parts.logs.said.failed_servers
        await self._parts.control.start_server()
        with anyio.move_on_after(SERVER_SECONDS):
            while not await self._parts.control.servers():
                await self._parts.logs.read()
                # Anybody may write that it failed: it has, where there is no such process.
                if self._parts.logs.said.failed_servers > failed and not await self._server_processes():
                    break
                await anyio.sleep(POLL_SECONDS)
            else:
                return
        raise StartFailed(
            f"the MPS server of GPU {self._uuid} does not start; see control.log and server.log in "
            f"{self._parts.folders.log} (often: libcuda is missing, or a process without MPS holds the GPU)"
        )

    async def _server_processes(self) -> tuple[Process, ...]:
        return await anyio.to_thread.run_sync(processes.servers, self._parts.folders.pipe)

    # -- a daemon that hangs -----------------------------------------------------------------------

    async def _end_hung(self, process: Process) -> None:
        """A daemon that answers nobody is of no use, unless clients live by its server."""
        servers = await self._server_processes()
        used = await use_of(self._parts, servers, self.clients) if servers else None
        if used:
            if used != self._kept:
                log.warning("mps_hung_daemon_kept", gpu=self._uuid, pid=process.pid, problem=used)
            self._kept = used
            return
        log.error("mps_daemon_hangs", gpu=self._uuid, pid=process.pid, seconds=HANG_SECONDS)
        await processes.end((process, *servers))
