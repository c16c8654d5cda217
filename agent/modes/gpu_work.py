"""Does what the state of each GPU asks for: tears down, sets up, each GPU in a task of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.model.gpu import Gpu
from agent.model.modes import Mode
from agent.modes import transition
from agent.modes.planner import Wings
from agent.modes.transition import WORKING, ModeStage, ModeState
from agent.modes.wing import SetUpFailed, Wing

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
