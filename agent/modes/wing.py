"""A mode of the table as the rest of the agent sees it, and what it is built from.

Each mode has a wing: a room above this one with its plugins, its runtime, its metrics and its checks. Rooms
beside and below ask all wings alike, by the methods here; no wing imports another.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, Supervisor
from agent.kubelet.wire import ResourcePlugin
from agent.model.gpu import Driver, Gpu
from agent.model.holding import Growth, Holder, Holding, Place
from agent.model.look import Look
from agent.model.modes import Assignment, Mode
from agent.model.resource_claim import ClaimedShare
from agent.modes import transition
from agent.modes.desired import DesiredSource
from agent.modes.transition import WORKING, ModeStage, ModeState
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlPort
from agent.pairing.pairing import Recorder
from agent.pairing.pod_source import PodSource
from agent.settings import Settings
from agent.telemetry.container_use import Uses
from agent.telemetry.series import Series

log = structlog.get_logger()


class Announcer(Protocol):
    """Keeps the scheduler from sending pods to what is about to go."""

    async def withdraw(self, ahead: Assignment, publish: Callable[[], Awaitable[None]]) -> None:
        """Call `publish`, which puts an assignment that offers less in force, when no pod is lost by it.

        Returns once the kubelet and the node's status have followed, or after a bounded time: neither an API
        server nor a kubelet that fails keeps `publish` from being called.
        """


Document = dict[str, Any]


class SetUpFailed(Exception):
    """A mode could not be set up on a GPU; the text names cause and remedy."""


class NotYet(SetUpFailed):
    """The same, and it may come right by itself."""


class NotLeft(Exception):
    """Something of a mode is still on the node; the text says what, and why."""


@dataclass(frozen=True, slots=True)
class Node:
    """The node and the rooms of the agent that a wing may use."""

    settings: Settings  # of the agent's start
    name: str  # empty: there is no way to the Kubernetes API
    snapshot: Cell[Snapshot]
    assignment: Cell[Assignment]  # the modes in force; the switcher publishes it
    desired: DesiredSource
    holdings: HoldingsWatch
    injector: Injector
    pods: PodSource
    recorder: Recorder
    cluster: ClusterAccess | None  # None: there is no way to the Kubernetes API
    uses: Cell[Uses]  # of containers, with each sampling round
    nvml: NvmlPort
    calls: WorkerThread  # makes all calls to `nvml`
    supervisor: Supervisor  # for tasks that a task of the wing starts in a group of its own
    grown: Cell[Mapping[Place, Growth]]  # the mode that is resizable publishes it
    read_again: Callable[[], None]  # have the inventory read at once what each GPU consists of

    def allows(self, mode: Mode) -> bool:
        """Whether a mode may be requested under the configuration of now."""
        return mode in self.desired.catalog.modes

    def offers(self, mode: Mode) -> bool:
        """Whether a GPU is in the mode now."""
        return any(each.mode is mode for each in self.assignment.value.gpus.values())

    def event(self, reason: str, message: str, *, warning: bool) -> None:
        """Report an event of the node, where there is a way to the Kubernetes API; the caller logs it."""
        if self.cluster:
            self.cluster.events.node(reason, message, warning)


@dataclass(frozen=True, slots=True)
class Task:
    """A long-lived task, started again when it fails."""

    name: str  # in logs, probes and metrics
    run: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that is checked before an agent serves it."""

    driver: Driver | None  # None: it does not answer
    gpus: tuple[Gpu, ...]
    state: Path  # the folder `host.state`, as this process sees it
    root: Path | None = None  # the node's own root; None: not seen from here


class Wing(ABC):
    """One mode. What a mode does not need is left as it is here."""

    mode: ClassVar[Mode]
    # Whether GPUs are made ready for it, and given back. False: a switch takes no time.
    prepares: ClassVar[bool] = False

    # Of the node, with no agent running

    @classmethod
    def checks(cls, settings: Settings, machine: Machine) -> Iterator[Look]:  # noqa: ARG003
        """Look for what stands in the way of the mode, where it is allowed, for `check node`. Blocks."""
        yield from ()

    @classmethod  # noqa: B027
    async def leave(cls, settings: Settings, nvml: NvmlPort) -> None:
        """End what runs for the mode and remove its files outside of the agent's folders. Raises NotLeft.

        Again is nothing. What `needed_by_holders` names stays.
        """

    @classmethod
    def needed_by_holders(cls, settings: Settings) -> Sequence[Path]:  # noqa: ARG003
        """Files and folders that the kubelet repeats to containers that run, so that they stay with these."""
        return ()

    # Of the running agent

    @classmethod
    @abstractmethod
    async def build(cls, node: Node) -> Self:
        """Make the wing and find what an earlier agent left; starts no task, waits for a bounded time."""

    @abstractmethod
    def plugins(self) -> Sequence[ResourcePlugin]:
        """Its resources; none is registered before the mode is first used."""

    def tasks(self) -> Sequence[Task]:
        """The tasks of its runtime, from the agent's start to its end. Plugins have their own."""
        return ()

    def obstacle(self, state: GpuState) -> str:  # noqa: ARG002
        """Why a GPU cannot be offered in the mode, in words; empty: it can."""
        return ""

    def undoes(self, state: GpuState) -> str:  # noqa: ARG002
        """Say what `give_back` changes, without which no other mode can have a GPU; empty: nothing."""
        return ""

    async def prepare(self, gpu: Gpu) -> None:  # noqa: B027
        """Make a GPU ready; bounded in time, and may be cancelled. Raises SetUpFailed."""

    async def give_back(self, gpu: Gpu) -> None:  # noqa: B027
        """Leave a GPU as `prepare` found it; never fails, never hangs."""

    async def at_work(self, gpu: Gpu, *, surely: bool) -> bool | None:  # noqa: ARG002
        """Whether a pod, named or not, is at work on a GPU by what runs for the mode; bounded.

        Unless `surely`, also whether it only may be. None: it cannot be said now.
        """
        return False

    def unclaimable(self) -> str:
        """Why no GPU of this node can be a device of the mode for claims, in words; empty: they can."""
        return ""

    def claimed(
        self,
        share: ClaimedShare,  # noqa: ARG002
        holders: Sequence[Holder],  # noqa: ARG002
        *,
        owned: bool,  # noqa: ARG002
    ) -> Sequence[str]:
        """Qualified names of the CDI devices by which containers get a claim's device. Raises SetUpFailed.

        `holders`: the containers, as far as they are known. `owned`: the claim is one pod's alone; of
        others that use it later nobody asks.
        """
        raise SetUpFailed(f"mode {self.mode.value} has no devices for claims")

    def depends_on(self) -> object:
        """The inputs of `prepare`, by value: once they differ, one that failed is tried again."""
        return None

    def enforced(self) -> str | None:
        """Whether containers are kept to their shares: yes, no, memory (compute is not enforced).

        None: its GPUs are not shared by amounts.
        """
        return None

    def gpu_facts(self, uuid: str) -> Document:  # noqa: ARG002
        """Its keys of a GPU in the document of `status`."""
        return {}

    def holder_facts(self, holding: Holding, uuid: str) -> Document:  # noqa: ARG002
        """Its keys of a container that holds units of a GPU, in the document of `status`."""
        return {}

    def allotted(self) -> Mapping[Place, float]:
        """The share of its GPU, 0..1, that each container may compute with now, where it is held to one."""
        return {}

    def remarks(self) -> Sequence[str]:
        """Degradations, each in a sentence, for probes and `status`."""
        return ()

    def metrics(self) -> Iterable[Series]:
        """Its series of a scrape; called on the event loop."""
        return ()


Wings = Mapping[Mode, Wing]
NO_WINGS: Wings = MappingProxyType({})


# Does what the state of each GPU asks for: tears down, sets up, each GPU in a task of its own.

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
        self, wings: Wings, state_of: Callable[[str], ModeState], came: Callable[[str, Outcome], None]
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

    async def at_work(self, gpus: Iterable[Gpu], *, surely: bool) -> Mapping[str, Mode | None]:
        """By which mode a pod, named or not, is at work on GPUs, or only may be; None: it cannot be said.

        Those on which nobody is are left out.
        """
        found: dict[str, Mode | None] = {}

        async def ask(gpu: Gpu, mode: Mode, wing: Wing) -> None:
            answer = await wing.at_work(gpu, surely=surely)
            if answer or (answer is None and gpu.uuid not in found):
                found[gpu.uuid] = mode if answer else None

        async with anyio.create_task_group() as group:
            for gpu in gpus:
                for mode, wing in self._wings.items():
                    if wing.prepares:
                        group.start_soon(ask, gpu, mode, wing)
        return found

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
