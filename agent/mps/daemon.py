"""Looks after the control daemon of one GPU: starts or adopts it, watches it, restarts it, stops it.

Being cancelled leaves the daemon running: it outlives the agent, and the next one adopts it. Only `stop`
ends it.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.mps import launch, processes, shared_memory
from agent.mps.binary import Program
from agent.mps.compute import ComputeModes, give_back, hold
from agent.mps.control import Control, Survey, environment
from agent.mps.directories import Directories
from agent.mps.errors import MpsError, ProgramMissing, StartFailed, Unanswered
from agent.mps.following import Logs
from agent.mps.lock import Locked
from agent.mps.parse import ServerState
from agent.mps.processes import Process
from agent.mps.status import RESTARTED, DaemonState, DaemonStatus, Kind, Reporter
from agent.mps.terminate import end, gone

log = structlog.get_logger()

ANSWER_SECONDS = 5.0  # a daemon that just started
HEALTHY_AFTER_SECONDS = 60.0  # it served this long: the next restart is tried at once
HANG_SECONDS = 60.0  # without an answer, and without a server that clients could depend on
SERVER_SECONDS = 15.0  # the first context on a cold GPU takes seconds
POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0  # a server takes its own fault in


@dataclass(frozen=True, slots=True)
class Options:
    """How daemons are run; seconds throughout."""

    cgroups: Path = Path("/sys/fs/cgroup")
    shared_memory: int = 4 << 30  # bytes of each GPU
    prestart: bool = True  # start the server before the first client, and hold it to be up
    probe_seconds: float = 5.0
    log_seconds: float = 2.0  # between two looks into the logs, where the kernel does not tell of writes
    orphan_seconds: float = 30.0  # for clients of a dead daemon's server to leave
    quit_seconds: int = 5  # for clients to leave when the daemon is stopped


class Daemon:
    """The supervisor of one GPU's daemon; `status` is the newest truth about it."""

    def __init__(
        self,
        uuid: str,
        program: Program,
        folders: Directories,
        compute: ComputeModes,
        report: Reporter,
        options: Options,
        multi_user: dict[object, bool] | None = None,
    ) -> None:
        """`multi_user` remembers which versions have the flag, for all daemons that share it."""
        self.uuid = uuid
        self.folders = folders
        self.control = Control(program, folders)
        self.status: Cell[DaemonStatus] = Cell(DaemonStatus())
        self.clients: tuple[int, ...] = ()  # PIDs, as of the last probe
        self._program = program
        self._compute = compute
        self._report = report
        self._options = options
        self._multi_user = {} if multi_user is None else multi_user
        self._told: str | None = None  # the failure that people were told of last
        self._logs = Logs(folders.log, options.log_seconds)
        self._faulted = 0.0  # when the logs told of the newest fault
        self._clients_known = False  # whether this daemon has told us of them

    async def run(self) -> None:
        """Keep the daemon serving until cancelled. Raises MpsError if another agent looks after it."""
        async with Locked(self.folders):
            backoff = Backoff(first=0.5, longest=30.0)
            while True:
                started = anyio.current_time()
                try:
                    process = await self._adopted() or await self._started()
                    await self._watch(process)
                    problem = "the MPS control daemon ended"
                except (MpsError, OSError) as error:
                    # A pod that runs as root may have made anything of what is in the pipe folder.
                    problem = str(error)
                if anyio.current_time() - started >= HEALTHY_AFTER_SECONDS:
                    backoff.reset()
                self._failed(problem)
                await anyio.sleep(backoff.next())

    async def stop(self) -> None:
        """End daemon and servers; leave no socket, mount or cgroup; restore the compute mode. Never fails."""
        before = self.status.value
        self._publish(replace(before, state=DaemonState.STOPPING, reason="its GPU leaves MPS mode"))
        try:
            async with Locked(self.folders):
                await self._stop()
        except (MpsError, OSError) as error:
            log.error("mps_stop_incomplete", gpu=self.uuid, problem=str(error))
        self._publish(DaemonStatus(restarts=before.restarts, faults=before.faults))

    # -- start -------------------------------------------------------------------------------------

    async def _adopted(self) -> Process | None:
        """The daemon of an earlier agent, if there is one on our pipe folder."""
        found = await anyio.to_thread.run_sync(processes.daemons, self.folders.pipe)
        if not found:
            return None
        process = min(found, key=lambda each: (each.started, each.pid))
        words = await anyio.to_thread.run_sync(processes.arguments, process.pid)
        shared = await anyio.to_thread.run_sync(launch.adopt, process.pid, process.started, self.folders)
        servers = await anyio.to_thread.run_sync(processes.servers, self.folders.pipe)
        await self._logs.skip(but={each.pid for each in servers})
        await hold(self._compute, self.uuid)
        self._publish(
            replace(
                self.status.value,
                state=DaemonState.STARTING,
                reason="it was adopted and is being looked at",
                pid=process.pid,
                adopted=True,
                multi_user=launch.MULTI_USER in words,
                private_shm=shared,
            )
        )
        log.info("mps_daemon_adopted", gpu=self.uuid, pid=process.pid)
        return process

    async def _started(self) -> Process:
        """Start one. Raises MpsError."""
        options, before = self._options, self.status.value
        # The reason of a failure stays until the next try has an outcome.
        reason = before.reason or "the MPS control daemon starts"
        self._publish(replace(before, state=DaemonState.STARTING, reason=reason, pid=None))
        await anyio.to_thread.run_sync(self.folders.make)
        await self._no_orphans()
        await anyio.to_thread.run_sync(self.folders.clear)
        await self._logs.skip()
        await hold(self._compute, self.uuid)
        variables = environment(self._program, self.folders) | {"CUDA_VISIBLE_DEVICES": self.uuid}
        version = await anyio.to_thread.run_sync(self._program.version)
        launched = await launch.launch(
            self._program,
            self.folders,
            variables,
            options.cgroups,
            options.shared_memory,
            self._multi_user.get(version),
        )
        if launched.flag_known:
            self._multi_user[version] = launched.multi_user
        process = await self._appeared()
        for what, problem in launched.problems.items():
            log.warning("mps_daemon_degraded", gpu=self.uuid, lacks=what, problem=problem)
        self._publish(
            replace(
                self.status.value,
                pid=process.pid,
                adopted=False,
                multi_user=launched.multi_user,
                private_shm="namespace" not in launched.problems,
            )
        )
        return process

    async def _no_orphans(self) -> None:
        """Wait until no server of a dead daemon is left: it would hold the GPU against a new one."""
        told = False
        with anyio.move_on_after(self._options.orphan_seconds):
            while orphans := await anyio.to_thread.run_sync(processes.servers, self.folders.pipe):
                if not told:
                    told = True
                    names = ", ".join(str(each.pid) for each in orphans)
                    self._publish(
                        replace(self.status.value, reason=f"server {names} of the dead daemon still runs")
                    )
                await anyio.sleep(5 * POLL_SECONDS)
            return
        log.warning("mps_orphans_ended", gpu=self.uuid, waited_seconds=self._options.orphan_seconds)
        await end(orphans)

    async def _appeared(self) -> Process:
        with anyio.move_on_after(ANSWER_SECONDS):
            while True:
                found = await anyio.to_thread.run_sync(processes.daemons, self.folders.pipe)
                if found:
                    await self.control.alive()
                    return min(found, key=lambda each: (each.started, each.pid))
                await anyio.sleep(POLL_SECONDS / 10)
        raise StartFailed(
            f"the MPS control daemon of GPU {self.uuid} ended at once; see {self.folders.log}/control.log"
        )

    # -- watch -------------------------------------------------------------------------------------

    async def _watch(self, process: Process) -> None:
        """Return when the daemon has ended."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        self.clients, self._clients_known = (), False
        try:
            if not await anyio.to_thread.run_sync(process.alive):
                return  # its PID is another process's by now
            async with anyio.create_task_group() as group:
                group.start_soon(self._probing, process)
                await anyio.wait_readable(descriptor)
                group.cancel_scope.cancel()
        finally:
            anyio.notify_closing(descriptor)
            os.close(descriptor)

    async def _probing(self, process: Process) -> None:
        answered = anyio.current_time()
        mute = False  # there is nothing to ask the daemon with
        async with self._logs.watched():
            while True:
                try:
                    await self._probe()
                    answered, mute = anyio.current_time(), False
                except ProgramMissing as error:
                    # The daemon lives, and its clients with it: what it was last seen to be stays true.
                    if not mute:
                        log.warning("mps_daemon_not_asked", gpu=self.uuid, problem=str(error))
                    answered, mute = anyio.current_time(), True
                except MpsError as error:
                    self._publish(replace(self.status.value, state=DaemonState.STARTING, reason=str(error)))
                    if isinstance(error, Unanswered) and anyio.current_time() - answered > HANG_SECONDS:
                        await self._end_hung(process)
                with anyio.move_on_after(self._options.probe_seconds):
                    await self._until_log_tells()

    async def _until_log_tells(self) -> None:
        """Return when a fault begins or ends by the logs; one that begins is told at once."""
        before = self._logs.said.fault
        while (self._logs.said.fault is None) == (before is None):
            await self._logs.grown()
        if self._logs.said.fault and self.status.value.serving:
            self._faulted = anyio.current_time()
            self._publish(self._judged(self.status.value, self._logs.said.fault))

    async def _probe(self) -> None:
        """Look once and publish what was seen. Raises MpsError."""
        await hold(self._compute, self.uuid, lost=True)
        survey = await self._survey()
        server = survey.servers[0] if survey.servers else None
        state = survey.state
        if server is None or state is ServerState.INITIALIZING:
            self.clients, self._clients_known = (), True
        elif survey.clients is not None:
            self.clients, self._clients_known = survey.clients, True
        elif server != self.status.value.server:
            self.clients, self._clients_known = (), False
        # A server may call itself ACTIVE for a moment after its log has told of the fault.
        if state is ServerState.ACTIVE and anyio.current_time() - self._faulted > SETTLE_SECONDS:
            self._logs.said.clear()
        fault = self._logs.said.fault or ("its server says FAULT" if state is ServerState.FAULT else None)
        self._publish(self._judged(replace(self.status.value, server=server, server_state=state), fault))

    @staticmethod
    def _judged(seen: DaemonStatus, fault: str | None) -> DaemonStatus:
        """`seen`, in or out of fault."""
        return replace(
            seen,
            state=DaemonState.FAULT if fault else DaemonState.SERVING,
            reason=f"a client's fatal error: {fault}" if fault else "",
            faults=seen.faults + (fault is not None and seen.state is not DaemonState.FAULT),
        )

    async def _survey(self) -> Survey:
        """Server, state and clients; a server is started where there is none and one is wanted."""
        known, state = self.status.value.server, self.status.value.server_state
        try:
            survey = await self.control.survey(known, clients=state in (None, ServerState.ACTIVE))
        except Unanswered:
            survey = await self.control.survey(known)
        if not survey.servers and self._options.prestart:
            await self._start_server()
            survey = await self.control.survey()
        if survey.servers and survey.servers[0] != known:
            survey = await self.control.survey(survey.servers[0])
        return survey

    async def _start_server(self) -> None:
        failed = self._logs.said.failed_servers
        await self.control.start_server()
        with anyio.move_on_after(SERVER_SECONDS):
            while not await self.control.servers():
                await self._logs.read()
                if self._logs.said.failed_servers > failed:
                    break
                await anyio.sleep(POLL_SECONDS)
            else:
                return
        raise StartFailed(
            f"the MPS server of GPU {self.uuid} does not start; see {self.folders.log}/control.log and "
            "server.log (often: libcuda is missing, or a process without MPS holds the GPU)"
        )

    # -- end ---------------------------------------------------------------------------------------

    async def _end_hung(self, process: Process) -> None:
        """A daemon that answers nobody is of no use, unless clients live by its server."""
        servers = await anyio.to_thread.run_sync(processes.servers, self.folders.pipe)
        if servers and not (self._clients_known and await anyio.to_thread.run_sync(self._deserted)):
            return
        log.error("mps_daemon_hangs", gpu=self.uuid, pid=process.pid, seconds=HANG_SECONDS)
        await end((process, *servers))

    def _deserted(self) -> bool:
        """Whether all clients that were told of last have ended: without its daemon a server gets no more."""
        return not any(processes.identify(pid) for pid in self.clients)

    async def _stop(self) -> None:
        found = await anyio.to_thread.run_sync(processes.daemons, self.folders.pipe)
        if found:
            try:
                await self.control.quit(self._options.quit_seconds)
            except MpsError as error:
                # Its program was taken away before it: then it is ended without being asked.
                log.warning("mps_daemon_not_asked", gpu=self.uuid, problem=str(error))
            else:
                await gone(found, self._options.quit_seconds)
            await end(found)
        await end(await anyio.to_thread.run_sync(processes.servers, self.folders.pipe))
        await give_back(self._compute, self.uuid)
        # Last: as long as the folder is there, it is told that there is something to clear up.
        await anyio.to_thread.run_sync(self._clear_up)

    def _clear_up(self) -> None:
        shared_memory.unmount(self.folders.shm)
        if self.folders.existing():
            self.folders.clear()
            self.folders.remove()
        launch.leave_no_cgroup(self._options.cgroups)

    # -- told --------------------------------------------------------------------------------------

    def _failed(self, problem: str) -> None:
        before = self.status.value
        self._publish(
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
        self._logs.said.clear()
        if problem != self._told:
            self._told = problem
            self._report(Kind.FAILED, self.uuid, problem)

    def _publish(self, after: DaemonStatus) -> None:
        before = self.status.value
        if after == before:
            return
        self.status.publish(after)
        if (after.state, after.reason) == (before.state, before.reason):
            return
        log.info(
            "mps_daemon", gpu=self.uuid, state=after.state.value, reason=after.reason or None, pid=after.pid
        )
        mended = after.serving and (before.state is DaemonState.FAULT or self._told is not None)
        if after.serving:
            self._told = None
        if after.state is DaemonState.FAULT and before.state is not DaemonState.FAULT:
            self._report(Kind.FAULT, self.uuid, after.reason, frozenset(self._logs.said.culprits))
        elif mended:
            self._report(Kind.RECOVERED, self.uuid, "the MPS control daemon serves again")
