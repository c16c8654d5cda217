"""Adopts the control daemon of one GPU from an earlier agent, or starts one."""

from dataclasses import replace

import anyio
import anyio.to_thread
import structlog

from agent.mps import launch, processes, shared_memory
from agent.mps.binary import Program
from agent.mps.control_commands import environment
from agent.mps.daemon_parts import DaemonParts
from agent.mps.daemon_status import DaemonState, EventReason
from agent.mps.mps_errors import StartFailed
from agent.mps.processes import Process
from agent.mps.server_users import use_of

log = structlog.get_logger()

ANSWER_SECONDS = 5.0  # a daemon that just started
POLL_SECONDS = 0.1
MOST_NAMED = 10  # of processes that are made to look like a daemon: any pod may start thousands


class Starter:
    def __init__(self, program: Program, parts: DaemonParts, multi_user: dict[object, bool]) -> None:
        """`multi_user` remembers which versions have the flag, for all daemons that share it."""
        self._program = program
        self._parts = parts
        self._multi_user = multi_user
        self._impostors: frozenset[Process] = frozenset()  # that were reported

    async def adopted(self) -> Process | None:
        """The daemon of an earlier agent, if there is one on our pipe folder."""
        await self._report_impostors()
        process = await anyio.to_thread.run_sync(processes.daemon_of, self._parts.folders)
        if process is None:
            return None
        uuid = self._parts.publisher.uuid
        words = await anyio.to_thread.run_sync(processes.arguments, process.pid)
        shared = await anyio.to_thread.run_sync(
            launch.adopt, process.pid, process.started, self._parts.folders
        )
        servers = await anyio.to_thread.run_sync(processes.servers, self._parts.folders.pipe)
        await self._parts.logs.skip(but={each.pid for each in servers})
        await self._parts.exclusive.hold(inherited=True)
        self._parts.publisher.publish(
            replace(
                self._parts.publisher.now,
                state=DaemonState.STARTING,
                reason="it was adopted and is being looked at",
                pid=process.pid,
                adopted=True,
                multi_user=launch.MULTI_USER in words,
                private_shm=shared,
            )
        )
        log.info("mps_daemon_adopted", gpu=uuid, pid=process.pid)
        if not await anyio.to_thread.run_sync(self._parts.folders.log.is_mount):
            problem = "its logs have no bound while no agent runs, until it is started again"
            log.warning("mps_daemon_degraded", gpu=uuid, lacks="log", problem=problem)
        return process

    async def started(self) -> Process:
        """Start one. Raises MpsError."""
        options, before, uuid = self._parts.options, self._parts.publisher.now, self._parts.publisher.uuid
        # The reason of a failure stays until the next try has an outcome.
        reason = before.reason or "the MPS control daemon starts"
        self._parts.publisher.publish(replace(before, state=DaemonState.STARTING, reason=reason, pid=None))
        inherited = await anyio.to_thread.run_sync(self._parts.folders.existing)
        await anyio.to_thread.run_sync(self._parts.folders.make)
        await self._no_orphans()
        await anyio.to_thread.run_sync(self._parts.folders.clear)
        if problem := await anyio.to_thread.run_sync(shared_memory.bound_logs, self._parts.folders.log):
            log.warning("mps_daemon_degraded", gpu=uuid, lacks="log", problem=problem)
        await self._parts.logs.skip()
        await self._parts.exclusive.hold(inherited=inherited)
        variables = environment(self._program, self._parts.folders) | {"CUDA_VISIBLE_DEVICES": uuid}
        version = await anyio.to_thread.run_sync(self._program.version)
        launched = await launch.launch(
            self._program,
            self._parts.folders,
            variables,
            options.cgroups,
            options.shared_memory,
            self._multi_user.get(version),
        )
        if launched.flag_known:
            self._multi_user[version] = launched.multi_user
        process = await self._appeared()
        for what, problem in launched.problems.items():
            log.warning("mps_daemon_degraded", gpu=uuid, lacks=what, problem=problem)
        self._parts.publisher.publish(
            replace(
                self._parts.publisher.now,
                pid=process.pid,
                adopted=False,
                multi_user=launched.multi_user,
                private_shm="namespace" not in launched.problems,
            )
        )
        return process

    async def _report_impostors(self) -> None:
        """Report processes that were made to look like this daemon, once each, and however many in one go."""
        # They are looked for in all pods, and an agent that stops does not wait for that.
        found = frozenset(
            await anyio.to_thread.run_sync(
                processes.impostors, self._parts.folders.pipe, abandon_on_cancel=True
            )
        )
        if pids := sorted(each.pid for each in found - self._impostors):
            named = pids[:MOST_NAMED]
            more = f" and {len(pids) - len(named)} more" if len(pids) > len(named) else ""
            message = (
                f"process {', '.join(map(str, named))}{more}: looks like its MPS control daemon and runs in "
                "a pod, or not as root; it is not adopted"
            )
            self._parts.publisher.report(EventReason.IMPOSTOR, message, frozenset(named))
        self._impostors = found

    async def _no_orphans(self) -> None:
        """Wait until no server of a dead daemon is left: it would hold the GPU against a new one."""
        logged = False
        with anyio.move_on_after(self._parts.options.orphan_seconds):
            while orphans := await anyio.to_thread.run_sync(processes.servers, self._parts.folders.pipe):
                if not logged:
                    logged = True
                    names = ", ".join(str(each.pid) for each in orphans)
                    reason = f"server {names} of the dead daemon still runs"
                    self._parts.publisher.publish(replace(self._parts.publisher.now, reason=reason))
                await anyio.sleep(5 * POLL_SECONDS)
            return
        log.warning(
            "mps_orphans_ended",
            gpu=self._parts.publisher.uuid,
            used=await use_of(self._parts, orphans),
            waited_seconds=self._parts.options.orphan_seconds,
        )
        await processes.end(orphans)

    async def _appeared(self) -> Process:
        with anyio.move_on_after(ANSWER_SECONDS):
            while True:
                process = await anyio.to_thread.run_sync(processes.daemon_of, self._parts.folders)
                if process:
                    await self._parts.control.alive()
                    return process
                await anyio.sleep(POLL_SECONDS / 10)
        raise StartFailed(
            f"the MPS control daemon of GPU {self._parts.publisher.uuid} ended at once; "
            f"see {self._parts.folders.log}/control.log"
        )
