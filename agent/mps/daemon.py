"""Looks after the control daemon of one GPU: starts or adopts it, watches it, restarts it, stops it.

Being cancelled leaves the daemon running: it outlives the agent, and the next one adopts it. Only `stop`
ends it.
"""

from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread
import structlog

from agent.kit import bounded
from agent.kit.tasks import Backoff, Cell
from agent.model.cuda import PIPE_DIRECTORY
from agent.mps import launch, processes, shared_memory
from agent.mps.binary import CONTROL, Program
from agent.mps.compute_mode import ComputeModes, ExclusiveMode
from agent.mps.connections import used_in_pods
from agent.mps.control_commands import Control
from agent.mps.daemon_logs import Logs
from agent.mps.daemon_parts import DaemonParts, DaemonState, DaemonStatus, Options, Reporter, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.launch import Starter
from agent.mps.mps_errors import MpsError
from agent.mps.probing import DaemonProber

log = structlog.get_logger()

HEALTHY_AFTER_SECONDS = 60.0  # it served this long: the next restart is tried at once


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
        self._exclusive = ExclusiveMode(uuid, compute, folders.root, options.exclusive)
        self._options = options
        self._publisher = StatusPublisher(uuid, report)
        self._logs = Logs(folders.log, options.log_seconds)
        parts = DaemonParts(
            self.control, folders, self._exclusive, self._logs, self._publisher, options, compute
        )
        self._starter = Starter(program, parts, {} if multi_user is None else multi_user)
        self._prober = DaemonProber(parts)
        self._parts = parts

    @property
    def status(self) -> Cell[DaemonStatus]:
        return self._publisher.status

    @property
    def clients(self) -> tuple[int, ...]:
        return self._prober.clients

    async def used(self, *, surely: bool) -> bool | None:
        """Whether a pod is at work by a server here; None: that is not known. Within some 2 s.

        Unless `surely`, also whether a server has outlived its daemon, which it does for its clients.
        """
        pipe = self.folders.pipe

        def look() -> bool:
            servers = processes.servers(pipe)
            outlived = servers and not (surely or processes.daemons(pipe))
            return bool(outlived) or used_in_pods(servers)

        # A process whose memory is locked, as in a driver that hangs, keeps those waiting who read of it.
        bound = partial(bounded.call, ("used", str(pipe)), look)
        try:
            return await anyio.to_thread.run_sync(bound, abandon_on_cancel=True)
        except OSError:
            return None

    async def run(self) -> None:
        """Keep the daemon serving until cancelled. Raises MpsError if another agent looks after it."""
        async with self.folders.locked():
            backoff = Backoff(first=0.5, longest=30.0)
            while True:
                started = anyio.current_time()
                try:
                    process = await self._starter.adopted() or await self._starter.started()
                    await self._prober.watch(process)
                    problem = "the MPS control daemon ended"
                except (MpsError, OSError) as error:
                    # A pod that runs as root may have made anything of what is in the pipe folder.
                    problem = str(error)
                if anyio.current_time() - started >= HEALTHY_AFTER_SECONDS:
                    backoff.reset()
                self._publisher.failed(problem)
                self._logs.said.clear()
                await anyio.sleep(backoff.next())

    async def stop(self) -> str | None:
        """End daemon and servers; leave no socket, mount or cgroup; restore the compute mode.

        Never fails; what could not be done, in words. Then the folder stays, for another try.
        """
        before = self._publisher.now
        if before.state is not DaemonState.STOPPED:
            reason = "its GPU leaves MPS mode"
            self._publisher.publish(replace(before, state=DaemonState.STOPPING, reason=reason))
        problem = None
        try:
            async with self.folders.locked():
                await self._stop()
        except (MpsError, OSError) as error:
            problem = str(error)
        self._publisher.publish(DaemonStatus(restarts=before.restarts, faults=before.faults, cut=before.cut))
        return problem

    async def _stop(self) -> None:
        found = await anyio.to_thread.run_sync(processes.daemons, self.folders.pipe)
        if found:
            try:
                await self.control.quit(self._options.quit_seconds)
            except MpsError as error:
                # Its program was taken away before it: then it is ended without being asked.
                log.warning("mps_daemon_not_asked", gpu=self.uuid, problem=str(error))
            else:
                await processes.gone(found, self._options.quit_seconds)
            await processes.end(found)
        await processes.end(await anyio.to_thread.run_sync(processes.servers, self.folders.pipe))
        if not await processes.silent(self.folders):
            raise MpsError(
                f"a process that is not to be seen from here listens in {self.folders.root}: the agent ends "
                "it where it has the host's process IDs (mps.enabled of the chart); by hand: echo quit | "
                f"{PIPE_DIRECTORY}={self.folders.pipe} {CONTROL}"
            )
        inherited = await anyio.to_thread.run_sync(self.folders.existing)
        await self._exclusive.give_back(inherited)
        # Last: as long as the folder is there, something is known to be left over.
        await anyio.to_thread.run_sync(self._clear_up)

    def _clear_up(self) -> None:
        shared_memory.unmount(self.folders.shm)
        shared_memory.release_logs(self.folders.log)
        if self.folders.existing():
            self.folders.clear()
            self.folders.remove()
        launch.leave_no_cgroup(self._options.cgroups)
