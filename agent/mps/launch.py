"""Adopts the control daemon of one GPU, or starts one: mounts, cgroups, the launcher."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit import programs
from agent.model.cgroup import MPS_CGROUP
from agent.mps import launcher, processes, shared_memory
from agent.mps.binary import Program
from agent.mps.connections import use_of
from agent.mps.control_commands import environment
from agent.mps.daemon_parts import DaemonParts, DaemonState, EventReason
from agent.mps.directories import SOCKETS, Directories
from agent.mps.mps_errors import StartFailed
from agent.mps.processes import Process

log = structlog.get_logger()

CGROUP = MPS_CGROUP
START_SECONDS = 10.0
MOST_OUTPUT_BYTES = 1 << 20
SOCKET_SECONDS = 5.0  # after the program went into the background, where it does so before it listens
POLL_SECONDS = 0.01
MULTI_USER = "-multiuser-server"
# What a version without the flag says: up to driver 550 it takes any further argument for a request to be a
# client, since 580 it explains its usage and ends with 0.
NO_SUCH_FLAG = ("cannot find mps control daemon", "unrecognized option")
# Since driver 580 the daemon itself loads libcuda, and without it ends so, saying nothing: CUDA error 500.
NO_LIBRARY = 500 & 0xFF
ANSWER_SECONDS = 5.0  # a daemon that just started
ORPHAN_POLL_SECONDS = 0.5
MOST_NAMED = 10  # of processes that are made to look like a daemon: any pod may start thousands


@dataclass(frozen=True, slots=True)
class Launched:
    """A daemon went into the background. `problems` name what it had to do without."""

    multi_user: bool
    problems: Mapping[str, str]
    flag_known: bool = True  # False: it failed with the flag in words that do not say that it lacks it


async def launch(
    program: Program,
    folders: Directories,
    environment: Mapping[str, str],
    cgroups: Path,
    size: int,
    multi_user: bool | None,
) -> Launched:
    """Start the daemon detached, with `size` bytes of shared memory for it and its pods.

    `multi_user` None: find out whether it has the flag. Raises StartFailed, BadFolder.
    """
    problems: dict[str, str] = {}
    if problem := await anyio.to_thread.run_sync(shared_memory.prepare, folders, size):
        problems["tmpfs"] = problem
    if problem := await anyio.to_thread.run_sync(folders.label):
        problems["selinux"] = problem
    known = True
    for flagged in (True, False) if multi_user is None else (multi_user,):
        order = {
            "program": program.inner,
            "arguments": ["-d", MULTI_USER] if flagged else ["-d"],
            "environment": dict(environment),
            "root": str(program.root),
            "folder": str(folders.root),
            "own": str(folders.own),
            "pipe": str(folders.pipe),
            "shm": str(folders.shm),
            "cgroups": [
                str(folder / CGROUP) for folder in await anyio.to_thread.run_sync(hierarchies, cgroups)
            ],
        }
        code, out, complaint = await _run(order)
        lacks_flag = any(words in f"{out} {complaint}".lower() for words in NO_SUCH_FLAG)
        if code == 0 and not lacks_flag:
            problems |= _problems(out)
            await _shown(folders, private="namespace" not in problems)
            return Launched(flagged, problems, known)
        # Whatever a version says to a flag that it lacks: what is wrong besides shows without the flag, too.
        known = lacks_flag
    said = complaint or "it said nothing"
    if code == NO_LIBRARY:
        said += (
            ", as it does where it finds no libcuda.so.1: have the driver's libraries beside the program, in "
            "the driver root or known to the loader"
        )
    raise StartFailed(f"{program.path} -d ended with {code}: {said}; see {folders.log}/control.log")


async def _shown(folders: Directories, private: bool) -> None:
    """Have pods, or the agent, find the sockets of a daemon that was started now. Raises BadFolder."""
    made = folders.own if private else folders.pipe
    with anyio.move_on_after(SOCKET_SECONDS):
        # One that never listens is reported by the next probe.
        while not await anyio.to_thread.run_sync(os.path.lexists, made / SOCKETS[0]):
            await anyio.sleep(POLL_SECONDS)
    await anyio.to_thread.run_sync(folders.show if private else partial(folders.take_in, "started"))


def adopt(pid: int, started: int, folders: Directories) -> bool:
    """Have the agent find the sockets of a running daemon, and pods too. Whether it has their /dev/shm.

    `started` distinguishes it from another of the same PID. Blocks. Raises BadFolder.
    """
    if exposed(pid, folders):
        folders.take_in(f"{pid} {started}")
    else:
        folders.show()
    return shared_memory.private(pid, folders)


def exposed(pid: int, folders: Directories) -> bool:
    """Whether a running daemon works in the folder that pods mount. Blocks."""
    try:
        seen = os.stat(f"/proc/{pid}/root{folders.pipe}")  # noqa: PTH116  the root is the daemon's
        return not os.path.samestat(seen, folders.own.stat())
    except FileNotFoundError:
        return not folders.own.exists() and folders.pipe.exists()


async def _run(order: Mapping[str, object]) -> tuple[int | None, str, str]:
    # -I and -S: nothing of the environment or of installed packages is read, which halves the start.
    command = [sys.executable, "-I", "-S", launcher.__file__, json.dumps(order)]
    try:
        done = await programs.run(
            command, environment={}, seconds=START_SECONDS, most_bytes=MOST_OUTPUT_BYTES
        )
    except TimeoutError:
        return None, "", f"it did not go into the background within {START_SECONDS:g} s"
    except programs.OutputTooLong as error:
        return None, "", str(error)
    return done.code, done.output.decode(errors="replace"), " ".join(done.errors.split())


def _problems(out: str) -> Mapping[str, str]:
    try:
        found = json.loads(out.splitlines()[0])
    except (ValueError, IndexError):
        return {}
    return {str(key): str(value) for key, value in found.items()}


def hierarchies(cgroups: Path) -> tuple[Path, ...]:
    """Roots of the cgroup hierarchies: one on v2, one per controller on v1. Blocks."""
    if (cgroups / "cgroup.controllers").exists():
        return (cgroups,)
    if not cgroups.is_dir():
        return ()
    return tuple(
        sorted(
            folder
            for folder in cgroups.iterdir()
            if not folder.is_symlink() and (folder / "cgroup.procs").exists()
        )
    )


def leave_no_cgroup(cgroups: Path) -> None:
    """Remove the daemons' cgroup where nobody is in it any more. Blocks."""
    for folder in hierarchies(cgroups):
        try:
            (folder / CGROUP).rmdir()
        except OSError:
            continue  # another GPU's daemon is in it, or there is none


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
        shared = await anyio.to_thread.run_sync(adopt, process.pid, process.started, self._parts.folders)
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
                multi_user=MULTI_USER in words,
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
        launched = await launch(
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
                await anyio.sleep(ORPHAN_POLL_SECONDS)
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
                await anyio.sleep(POLL_SECONDS)
        raise StartFailed(
            f"the MPS control daemon of GPU {self._parts.publisher.uuid} ended at once; "
            f"see {self._parts.folders.log}/control.log"
        )
