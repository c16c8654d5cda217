"""Work on a GPU that a change of modes asks for, and processes that keep a GPU from being offered."""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent.holdings.holdings import strangers_by_gpu
from agent.kit.cell import Cell
from agent.model.cgroup import ContainerRef
from agent.model.gpu import Gpu
from agent.model.holding import Record
from agent.model.modes import GpuMode, Mode, Offering
from agent.modes import transition
from agent.modes.planner import Wings
from agent.modes.transition import WORKING, ModeStage, ModeState
from agent.modes.wing import SetUpFailed, Wing

# GPUs that are offered in no mode because somebody is on them whom the record does not explain: pure.

Withheld = Mapping[str, str]  # why, by UUID


def held_by_strangers(pods: Record, gpus: Mapping[str, Gpu]) -> Withheld:
    """GPUs of which a pod holds something by a device ID that this agent cannot read."""
    found = strangers_by_gpu(pods, {gpu.index: uuid for uuid, gpu in gpus.items()})
    return {
        uuid: f"{holding.namespace}/{holding.pod} holds it as {text} of {holding.resource}, which is no "
        "device ID of this agent: another device plugin handed it out; it is offered when that pod has ended"
        for uuid, (holding, text) in found.items()
    }


def without(targets: Mapping[str, GpuMode], withheld: Withheld) -> Mapping[str, GpuMode]:
    """The targets, with withheld GPUs off."""
    return {
        uuid: closed(target, withheld[uuid]) if uuid in withheld and target.mode is not Mode.OFF else target
        for uuid, target in targets.items()
    }


def closed(target: GpuMode, reason: str) -> GpuMode:
    """A target that takes nobody any more. A device of DRA stays one: its taint keeps claims away."""
    if target.dra:
        return replace(target, offering=Offering.CLOSED, reason=reason)
    return GpuMode(reason=reason, refused=True)


# Processes that outlive their pod's end on a GPU: it is withheld until they have gone.
#
# After a deletion by force a pod holds nothing by any record, and a process of it that hangs in the driver
# has its memory on the GPU still. Whose it was, its cgroup says. Of processes of others nothing follows here.
#
# Who ended while no agent ran is found once at the start: a process on a GPU, of a pod that neither the API
# server nor the kubelet knows.

LOOK_SECONDS = 2.0  # between looks at processes that have stayed
IDLE_SECONDS = 30.0  # a namesake that holds the same changes the record, and nothing is published
# A GPU whose processes cannot be read is sick, or gone: its health keeps it off the lists.
MOST_FAILURES = 5

Processes = Callable[[Collection[str]], Awaitable[Mapping[str, Collection[int]]]]
Owners = Callable[[Iterable[int]], Mapping[int, ContainerRef | None]]


@dataclass(frozen=True, slots=True)
class Departed:
    """Finds pods that ended before this process, or any record, knew what they held."""

    gpus: Callable[[], Collection[str]]  # all of the node
    pods: Callable[[Iterable[int]], Mapping[int, str]]  # UIDs of processes' pods; it blocks
    # UIDs of all pods that the API server or the kubelet knows; None: these are not known now.
    known: Callable[[], Collection[str] | None]
    # UIDs of pods that have gone, and of which no record said what they held; each is handed out once.
    vanished: Callable[[], Collection[str]] = tuple


class Lingering:
    """Looks at a GPU's processes when a holder of it has ended."""

    def __init__(
        self,
        holders: Callable[[], Mapping[str, frozenset[str]]],
        processes: Processes,
        owners: Owners,
        record: Cell[Any],
        departed: Departed | None = None,
    ) -> None:
        """`holders`: GPUs by the UIDs of the pods that hold them. `processes` leaves out what it cannot read.

        `owners` blocks. `record` is published when `holders` change. `departed` None: nobody is looked for
        whom this process has not seen.
        """
        self._holders = holders
        self._processes = processes
        self._owners = owners
        self._record = record
        self._departed = departed
        self._recalls = departed is not None  # whether those are still to be found
        self._recalled: set[str] = set()
        self._recall_failures = 0
        self._swept = -math.inf  # when all GPUs were looked at last for pods that no record has shown
        self._before: Mapping[str, frozenset[str]] = {}
        self._left: dict[str, set[str]] = {}  # UIDs of pods that have ended and may have processes, by GPU
        self._failures: dict[str, int] = {}
        self.looks = Cell(0)  # published after each look
        self.found: Withheld = {}  # GPUs with a process of a pod that held them before

    @property
    def unsettled(self) -> frozenset[str]:
        """GPUs of which a holder has ended, by the record of now, and whose processes may be there still."""
        return frozenset(self._ended()) | self._left.keys()

    def ended(self, gpu: str) -> frozenset[str]:
        """UIDs of pods that have held a GPU, and may have processes on it still."""
        return frozenset(self._left.get(gpu, ())) | self._ended().get(gpu, set())

    async def run(self) -> None:
        """Look at each change of the record, and again while somebody stays; for ever."""
        while True:
            seen = self._record.version
            await self.look()
            soon = self._left or self._recalls or anyio.current_time() - self._swept < LOOK_SECONDS
            with anyio.move_on_after(LOOK_SECONDS if soon else IDLE_SECONDS):
                await self._record.wait_change(seen)

    async def look(self) -> None:
        """Take in who holds what now, and find whose processes have stayed."""
        for gpu, uids in self._ended().items():
            self._left.setdefault(gpu, set()).update(uids)
        self._before = held = self._holders()
        # Anybody may make pods that come and go in a moment: all GPUs are looked at once for many of them.
        rested = anyio.current_time() - self._swept >= LOOK_SECONDS
        if self._departed and rested and (vanished := self._departed.vanished()):
            self._swept = anyio.current_time()
            for gpu in self._departed.gpus():
                self._left.setdefault(gpu, set()).update(vanished)
        if self._departed and (self._recalls or self._recalled):
            await self._recall(self._departed)
        for gpu in tuple(self._left):  # who holds it again, by the kubelet's word, has not ended
            self._left[gpu] -= {uid for uid in self._left[gpu] if gpu in held.get(uid, ())}
            if not self._left[gpu]:
                self._forget(gpu)
        if self._left or self.found:
            self.found = await self._stayed()
            self.looks.publish(self.looks.value + 1)

    async def _recall(self, departed: Departed) -> None:
        """Take in, once, whose processes are on GPUs though nobody knows the pod.

        A pod that is known after all is no longer waited for.
        """
        known = departed.known()
        if known is None:
            return
        for uids in self._left.values():  # a watch may show a pod after its first process
            uids.difference_update(self._recalled.intersection(known))
        self._recalled.difference_update(known)
        if self._recalls:
            gpus = tuple(departed.gpus())
            pids = await self._processes(gpus)
            every = {pid for found in pids.values() for pid in found}
            pods = await anyio.to_thread.run_sync(departed.pods, every) if every else {}
            for gpu, found in pids.items():
                if gone := {uid for pid in found if (uid := pods.get(pid)) and uid not in known}:
                    self._left.setdefault(gpu, set()).update(gone)
                    self._recalled |= gone
            # A driver that is slow, or a GPU that hangs, is asked again.
            self._recall_failures += 1
            self._recalls = self._recall_failures < MOST_FAILURES and not (gpus and pids.keys() >= {*gpus})

    def _ended(self) -> Mapping[str, set[str]]:
        """UIDs of pods that hold GPUs no more, by GPU."""
        now, found = self._holders(), dict[str, set[str]]()
        for uid, gpus in self._before.items():
            for gpu in gpus - now.get(uid, frozenset()):
                found.setdefault(gpu, set()).add(uid)
        return found

    async def _stayed(self) -> Withheld:
        asked = tuple(self._left)
        pids = await self._processes(asked)
        every = {pid for found in pids.values() for pid in found}
        owners = await anyio.to_thread.run_sync(self._owners, every) if every else {}
        reasons: dict[str, str] = {}
        for gpu in asked:
            if gpu not in pids:
                self._failures[gpu] = self._failures.get(gpu, 0) + 1
                if gpu in self.found:  # who hangs in the driver may have others hang there, too
                    reasons[gpu] = self.found[gpu]
                elif self._failures[gpu] >= MOST_FAILURES:
                    self._forget(gpu)
                continue
            self._failures.pop(gpu, None)
            stay = {
                pid: owner.pod_uid
                for pid in pids[gpu]
                if (owner := owners.get(pid)) and owner.pod_uid in self._left[gpu]
            }
            self._left[gpu] &= set(stay.values())
            if not stay:
                self._forget(gpu)
                continue
            named = ", ".join(f"{pid} of pod {uid}" for pid, uid in sorted(stay.items()))
            reasons[gpu] = (
                f"the pod has ended, and its process is still on the GPU: {named}; it is offered when that "
                "has ended, or after a reset of the GPU"
            )
        return reasons

    def _forget(self, gpu: str) -> None:
        del self._left[gpu]
        self._failures.pop(gpu, None)


# Does what the state of each GPU asks for: tears down, sets up, each GPU in a task of its own.

log = structlog.get_logger()

# What came of a GPU's work, as a change of its state.
Outcome = Callable[[ModeState], ModeState]


@dataclass
class _Job:
    stage: ModeStage
    running: Mode
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def fits(self, state: ModeState) -> bool:
        """Whether the state still asks for it."""
        return (self.stage, self.running) == (state.stage, state.running)


class GpuWork:
    """All work of the node; GPUs do not wait for each other, and a set-up that nobody wants any more ends."""

    def __init__(
        self,
        wings: Wings,
        state_of: Callable[[str], ModeState],
        came: Callable[[str, Outcome], None],
    ) -> None:
        self._wings = wings
        self._state_of = state_of
        self._came = came
        self._jobs: dict[str, _Job | None] = {}  # GPUs with a task

    def forget(self) -> None:
        """The task group of all tasks has ended."""
        self._jobs.clear()

    def without_work(self, state: ModeState) -> ModeState:
        """The state once all work is done that is none, for modes that need nothing but their lists."""
        while state.stage in WORKING and not self._preparing(state.running):
            done = transition.torn_down if state.stage is ModeStage.TEARING_DOWN else transition.set_up
            state = done(state)
        return state

    def begin(self, gpu: Gpu, group: TaskGroup) -> None:
        """Have a GPU's work done as its state asks for by now; ends what it asks for no more."""
        state = self._state_of(gpu.uuid)
        if gpu.uuid in self._jobs:
            job = self._jobs[gpu.uuid]
            # What is being torn down cannot be left half torn down.
            if job and job.stage is not ModeStage.TEARING_DOWN and not job.fits(state):
                job.scope.cancel()
        elif state.stage in WORKING:
            self._jobs[gpu.uuid] = None
            group.start_soon(self._work, gpu)

    def _preparing(self, mode: Mode) -> Wing | None:
        wing = self._wings.get(mode)
        return wing if wing and wing.prepares else None

    async def _work(self, gpu: Gpu) -> None:
        uuid = gpu.uuid
        try:
            while (state := self._state_of(uuid)).stage in WORKING:
                job = self._jobs[uuid] = _Job(state.stage, state.running)
                outcome: Outcome | None = None
                with job.scope:
                    outcome = await self._done(gpu, job)
                # Its state may have changed meanwhile: then it is looked at again.
                if outcome and job.fits(self._state_of(uuid)):
                    self._came(uuid, outcome)
        finally:
            self._jobs.pop(uuid, None)

    async def _done(self, gpu: Gpu, job: _Job) -> Outcome:
        wing = self._preparing(job.running)
        if job.stage is ModeStage.TEARING_DOWN:
            if wing:
                await wing.give_back(gpu)
            return transition.torn_down
        try:
            if wing:
                await wing.prepare(gpu)
        except SetUpFailed as error:
            problem = str(error)
            mode = job.running.value
            known = self._state_of(gpu.uuid).failure == problem  # it has been tried again
            (log.info if known else log.error)("mode_set_up_failed", gpu=gpu.uuid, mode=mode, problem=problem)
            return lambda state: transition.failed(state, problem)
        return transition.set_up
