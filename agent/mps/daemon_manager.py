"""All MPS daemons of the node: one supervisor for each GPU that is set up for MPS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent.kit.tasks import Cell, follow
from agent.model.cuda import refusal
from agent.model.gpu import Driver, Gpu
from agent.model.modes import Assignment, Mode
from agent.modes.wing import Node
from agent.mps import launch, processes
from agent.mps.binary import Program, find_any
from agent.mps.compute_mode import ComputeModes, ExclusiveMode
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import RESTARTED, DaemonStatus, EventReason, Options, Reporter
from agent.mps.directories import Directories, existing_below
from agent.mps.mps_errors import BadFolder, MpsError, ProgramMissing, StartFailed
from agent.mps.pods import Pods, share_holders

# Events of the node about MPS: reports of its daemons with the pods concerned, and advisory caps.

log = structlog.get_logger()


class MpsEvents:
    def __init__(self, node: Node, pods: Pods) -> None:
        self._node = node
        self._pods = pods

    def report(self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
        """Make an event and a line in the log; `pids` are processes that the message is about."""
        state = self._node.snapshot.value.by_uuid.get(uuid)
        gpu = f"GPU {state.gpu.index} ({uuid})" if state else f"GPU {uuid}"
        text = f"{gpu}: {message}"
        if kind is EventReason.FAULT:
            holders = share_holders(self._node.holdings.cell.value).get(uuid, ())
            if pods := sorted({each.pod for each in holders}):
                text += f"; every MPS client of the GPU is affected: {', '.join(pods)} must be restarted"
            if pids:
                text += f"; the log names process {', '.join(map(str, sorted(pids)))}"
        if kind is EventReason.SILENT:
            for pod in self._pods():
                # The supervisor of a daemon knows a pod by its cgroup, which has the UID.
                text = text.replace(f"pod {pod.uid}", f"pod {pod.key}")
        warning = kind is not EventReason.RECOVERED
        (log.warning if warning else log.info)("mps_report", gpu=uuid, reason=kind.value, message=text)
        self._node.event(kind.value, text, warning=warning)


class AdvisoryCaps:
    """Whether pods can undo the caps of their shares on this node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def problem(self) -> str | None:
        """Why caps do not hold, since a pod can undo them; None: they hold, or nothing is offered by them."""
        settings, injector = self._node.settings, self._node.injector
        problem = injector.caps_problem
        if problem is None or not self._node.offers(Mode.MPS):
            return None
        if self._node.cluster and injector.software is None and settings.injection.strategy == "auto":
            return None  # not known yet
        software = "containerd 2.0 or CRI-O 1.23 with kubelet 1.29, or newer ones"
        if settings.mps.advisory_caps == "refuse":
            return f"no MPS share is offered, since a pod could undo its caps here: {problem}; use {software}"
        return (
            f"caps of MPS shares are advisory here, a pod's own variables win over them: {problem}; "
            f"use {software}, or set mps.advisoryCaps: refuse"
        )

    async def run(self) -> None:
        """Report caps whenever they begin to be advisory, until cancelled."""
        before: str | None = None

        def look() -> None:
            nonlocal before
            now = self.problem
            if now and now != before:
                log.warning("mps_caps_advisory", problem=now)
                self._node.event(EventReason.ADVISORY.value, now, warning=True)
            before = now

        await follow(look, self._node.assignment, self._node.injector.looked)


SET_UP_SECONDS = 30.0
RETRY_SECONDS = 5.0  # of a daemon that another agent still looks after
OVER_SECONDS = 30.0  # for a supervision to end: what it has begun ends within some seconds, as a rule
LEFTOVER_SECONDS = 10.0
SETTLED_SECONDS = 1.0  # after a change of modes, until leftovers are looked for
NOBODY = DaemonStatus(reason="no MPS control daemon is set up for this GPU")

Finder = Callable[[], Program]


@dataclass
class _Kept:
    """One daemon under supervision; a new supervision gets a new scope."""

    daemon: Daemon
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)


class DaemonManager:
    """Sets GPUs up for MPS and takes them back. `statuses` is the newest truth about all daemons, by UUID."""

    def __init__(
        self,
        run: Path,
        find: Finder,
        compute: ComputeModes,
        report: Reporter,
        options: Options,
        set_up_seconds: float = SET_UP_SECONDS,
    ) -> None:
        self.statuses: Cell[Mapping[str, DaemonStatus]] = Cell(MappingProxyType({}))
        self._run = run
        self._find = find
        self._compute = compute
        self._report = report
        self._options = options
        self._set_up_seconds = set_up_seconds
        self._kept: dict[str, _Kept] = {}
        self._tasks: TaskGroup | None = None
        self._assignment: Cell[Assignment] = Cell(Assignment())
        self.program: object = None  # the version that was found last
        self._stopping: set[str] = set()
        self._begun: set[str] = set()  # GPUs with a set-up under way
        self._problem: str | None = None
        self._multi_user: dict[object, bool] = {}
        # What stands in the way on GPUs that are in another mode, in words, by UUID.
        self.leftovers: dict[str, str] = {}

    async def run(self, assignment: Cell[Assignment]) -> None:
        """Supervise until cancelled, which leaves the daemons to the next agent."""
        self._assignment = assignment
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for kept in self._kept.values():
                    self._supervise(kept)
                await self._sweep(assignment)
        finally:
            self._tasks = None

    async def look(self) -> None:
        """Find the program, so that `refusal` knows whether it is there."""
        try:
            self.program = await anyio.to_thread.run_sync(lambda: self._find().version())
            self._problem = processes.kernel_problem()
        except ProgramMissing as error:
            self._problem = str(error)

    def refusal(self, gpu: Gpu, driver: Driver | None) -> str | None:
        """Why a GPU cannot be offered as MPS shares; None: it can."""
        return refusal(gpu, driver, self._problem)

    def status(self, uuid: str) -> DaemonStatus:
        return self.statuses.value.get(uuid, NOBODY)

    def unready(self, uuid: str) -> str:
        status = self.status(uuid)
        return "" if status.serving else status.reason or f"its MPS control daemon is {status.state.value}"

    def pipe(self, uuid: str) -> str:
        return str(Directories.of(self._run, uuid).pipe)

    def shared_memory(self, uuid: str) -> str:
        """The host folder that pods of a GPU must have as /dev/shm: the one that the daemon has."""
        private = self.status(uuid).private_shm
        return str(Directories.of(self._run, uuid).shm) if private else "/dev/shm"  # noqa: S108

    def daemon(self, uuid: str) -> Daemon | None:
        kept = self._kept.get(uuid)
        return kept.daemon if kept else None

    async def wait_serving(self, uuid: str) -> None:
        await self.statuses.wait_for(lambda statuses: statuses.get(uuid, NOBODY).serving)

    async def set_up(self, gpu: Gpu) -> None:
        """Start or adopt the daemon of a GPU and wait until it serves. Raises MpsError.

        A failure leaves nothing, except on a GPU that is in mode MPS already: pods may be at work there, by a
        server that outlived the agent, and their daemon stays under supervision. On other GPUs nobody waits
        for a daemon that has ended, which the error alone shows. May be cancelled: `tear_down` then
        takes back what was done.
        """
        uuid = gpu.uuid
        self._begun.add(uuid)
        try:
            if uuid not in self._kept:
                program = await anyio.to_thread.run_sync(self._find)
                self._kept[uuid] = _Kept(self._daemon(uuid, program))
                if self._tasks:
                    self._supervise(self._kept[uuid])
            before = self.status(uuid).restarts
            with anyio.move_on_after(self._set_up_seconds):
                await self.statuses.wait_for(
                    lambda _: (
                        self.status(uuid).serving
                        or (self.status(uuid).restarts > before and self._is_new(uuid))
                    )
                )
            if self.status(uuid).serving:
                return
            reason = self.unready(uuid).removesuffix(RESTARTED)
            if self._is_new(uuid):
                await self.tear_down(gpu)
            raise StartFailed(f"GPU {uuid} (index {gpu.index}) cannot be set up for MPS: {reason}")
        finally:
            self._begun.discard(uuid)

    def _is_new(self, uuid: str) -> bool:
        """Whether a GPU is being set up with no pods on it."""
        return uuid in self._begun and self._assignment.value.of(uuid).mode is not Mode.MPS

    def _reported(self, kind: EventReason, uuid: str, message: str, pids: frozenset[int]) -> None:
        """Report it, except a set-up that fails: its caller gets the error."""
        if kind is not EventReason.FAILED or not self._is_new(uuid):
            self._report(kind, uuid, message, pids)

    async def at_work(self, uuid: str, *, surely: bool) -> bool | None:
        """See `Daemon.used`; also of the daemon of an earlier agent."""
        try:
            if not await anyio.to_thread.run_sync(Directories.of(self._run, uuid).existing):
                return False
        except BadFolder:
            return False  # no daemon ever works there
        daemon = self.daemon(uuid) or await self._unkept(uuid)
        return await daemon.used(surely=surely)

    async def tear_down(self, gpu: Gpu) -> None:
        """Stop the daemon of a GPU, also one of an earlier agent, and put the GPU back. Never fails; bounded.

        Steps that cannot be done now stand in `leftovers`, and are tried again by `run`.
        """
        await self._stop(gpu.uuid)

    async def _stop(self, uuid: str) -> None:
        self._stopping.add(uuid)
        try:
            kept = self._kept.pop(uuid, None)
            if kept:
                kept.scope.cancel()
                if self._tasks:
                    # One that hangs keeps the daemon locked, so that the stop below fails and says so.
                    with anyio.move_on_after(OVER_SECONDS):
                        await kept.over.wait()
                daemon = kept.daemon
            else:
                daemon = await self._unkept(uuid)
            problem = await daemon.stop()
            self._publish()
            self._report_once(uuid, EventReason.LEFT, problem)
        finally:
            self._stopping.discard(uuid)

    async def _unkept(self, uuid: str) -> Daemon:
        """For the daemon of an earlier agent, with whatever program there is."""
        return self._daemon(uuid, await anyio.to_thread.run_sync(find_any, self._find))

    def _daemon(self, uuid: str, program: Program) -> Daemon:
        folders = Directories.of(self._run, uuid)
        report = self._reported
        return Daemon(uuid, program, folders, self._compute, report, self._options, self._multi_user)

    def _supervise(self, kept: _Kept) -> None:
        assert self._tasks is not None
        kept.scope, kept.over = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._supervised, kept)

    async def _supervised(self, kept: _Kept) -> None:
        try:
            with kept.scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._follow, kept.daemon)
                    while True:
                        try:
                            await kept.daemon.run()
                        except MpsError as error:
                            log.error("mps_daemon_not_ours", gpu=kept.daemon.uuid, problem=str(error))
                        await anyio.sleep(RETRY_SECONDS)
        finally:
            kept.over.set()

    async def _follow(self, daemon: Daemon) -> None:
        async for _ in daemon.status.values():
            self._publish()

    def _publish(self) -> None:
        now = {uuid: kept.daemon.status.value for uuid, kept in self._kept.items()}
        if now != self.statuses.value:
            self.statuses.publish(MappingProxyType(now))

    async def _sweep(self, assignment: Cell[Assignment]) -> None:
        """Stop daemons that an earlier agent left on GPUs which are no longer offered as MPS shares."""
        seen_off: set[str] = set()
        while True:
            off = set()
            for left in await anyio.to_thread.run_sync(existing_below, self._run):
                uuid = left.root.name
                # Looked up for each: stopping the one before took seconds, in which this one may be set up.
                mode = assignment.value.gpus.get(uuid)
                if mode is None or uuid in self._kept or uuid in self._stopping:
                    # One that the switcher has not judged yet may be in use: with the kubelet or the driver
                    # away that takes as long as they are.
                    continue
                if mode.mode is Mode.OFF and uuid not in seen_off:
                    # Off is also what a GPU is for a moment before it is set up.
                    off.add(uuid)
                elif mode.mode is not Mode.MPS:
                    if uuid not in self.leftovers:
                        log.info("mps_leftover", gpu=uuid, mode=mode.mode.value)
                    await self._stop(uuid)
            seen_off = off
            await self._look_at_modes(assignment.value)
            await self.look()  # the program may have been installed, or taken away, since
            if not self._kept:
                # A daemon that nobody has reaped yet keeps its cgroup busy for a moment.
                await anyio.to_thread.run_sync(launch.leave_no_cgroup, self._options.cgroups)
            version = assignment.version
            with anyio.move_on_after(LEFTOVER_SECONDS):
                await assignment.wait_change(version)
                # Not in the middle of a switch: dozens of trips to other threads would hold up its lists.
                await anyio.sleep(LEFTOVER_SECONDS if seen_off else min(SETTLED_SECONDS, LEFTOVER_SECONDS))

    async def _look_at_modes(self, assignment: Assignment) -> None:
        """Put compute modes right on GPUs in other modes, where an earlier try failed; report others'."""
        # On most nodes there are none: one trip to a thread says so of all GPUs.
        known = await anyio.to_thread.run_sync(lambda: {each.name for each in (self._run / "mps").glob("*")})
        for uuid, mode in assignment.gpus.items():
            if mode.mode is Mode.MPS or uuid in self._kept or uuid in self._stopping:
                self.leftovers.pop(uuid, None)
                continue
            folders = Directories.of(self._run, uuid)
            exclusive = ExclusiveMode(uuid, self._compute, folders.root)
            try:
                if uuid in known and await anyio.to_thread.run_sync(folders.existing):
                    continue  # there is more to clear up than the mode
                if uuid in known and await exclusive.ours():
                    async with folders.locked():  # nobody begins to use it meanwhile
                        await exclusive.give_back()
            except (MpsError, OSError) as error:
                self._report_once(uuid, EventReason.LEFT, str(error))
                continue
            try:
                others = await exclusive.others()
            except MpsError:
                continue  # with the driver away there is nothing to report
            text = None
            if others:
                text = (
                    f"it is in compute mode {others.name}, which the agent did not set: processes of several "
                    "pods cannot use it at once; nvidia-smi -c DEFAULT ends that"
                )
            self._report_once(uuid, EventReason.OTHERS_MODE, text)

    def _report_once(self, uuid: str, kind: EventReason, problem: str | None) -> None:
        """Report what stands in the way on a GPU, once."""
        before = self.leftovers.get(uuid)
        if problem is None:
            self.leftovers.pop(uuid, None)
        elif problem != before:
            self.leftovers[uuid] = problem
            self._report(kind, uuid, problem, frozenset())
