"""Brings the instances of each GPU to its layout, one after the other, while the others run and are offered.

Each round looks at what is wanted, what the driver lists and who holds what, and takes the steps that can be
taken; so a new layout half-way, a restart, a reset of the GPU and a failure need no cases of their own. An
instance is destroyed only if this agent made it (`agent.mig.made`), it is offered no more, a reading of the
kubelet's records that began afterwards names no holder, and the driver knows no process on it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
import structlog

from agent.inventory.snapshot import GpuState
from agent.kit.tasks import Backoff, repeat
from agent.mig.made import Made, MadeBook
from agent.mig.placing import Making, Misfit, Standing, Steps, plan_layout, sentences
from agent.mig.plugin import MigPlugin
from agent.model.holding import Record
from agent.model.modes import Mode, Offering
from agent.modes.wing import Node
from agent.nvml.port import GpuInstance, MigProfile, NvmlCode, NvmlError, NvmlHung, NvmlLeftOver, Partition

log = structlog.get_logger()

CALL_SECONDS = 30.0  # to make one takes the driver a second or so
LOOK_SECONDS = 30.0  # at a GPU that cannot get its layout: others may destroy what stands in its way
DRAIN_LOOK_SECONDS = 2.0
BUSY_SECONDS = 5.0  # until an instance on which there was a process is tried again, at first
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 2.0, 300.0
MOST_STEPS = 32  # of one GPU in one round
LEAVING = "the layout of its GPU has no place for it: it is destroyed as soon as nobody holds it"
ADMITTED = "a pod that is being admitted"
NOT_KNOWN = "nobody knows whom: the kubelet does not say"


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """The way of one GPU, for people."""

    wanted: tuple[str, ...]
    steps: tuple[str, ...] = ()
    problem: str = ""


@dataclass
class _Course:
    """One GPU under a layout."""

    wanted: tuple[str, ...] = ()
    told: GpuLayout | None = None
    problem: str = ""  # of the last try
    announced: object = None  # as which event it was reported last
    reached: object = None  # what was wanted and there when it had its layout
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS))
    retry_at: float = 0.0
    retry_for: object = None  # a failure of other inputs is no reason to wait
    # Instances with processes on them when they were to be destroyed: whose, and when to try again.
    busy: dict[GpuInstance, tuple[str, float, Backoff]] = field(default_factory=dict)
    ours: frozenset[str] = frozenset()  # instances that this agent made, by UUID


NOT_BUSY: Final = ("", 0.0, Backoff(BUSY_SECONDS, LONGEST_RETRY_SECONDS))


class Layouts:
    """Of all GPUs that are offered in mode mig and have a layout."""

    def __init__(self, node: Node, book: MadeBook, plugins: Callable[[], Sequence[MigPlugin]]) -> None:
        self._node = node
        self._book = book
        self._plugins = plugins
        self._courses: dict[str, _Course] = {}
        self._marked: dict[str, frozenset[str]] = {}  # instances that leave, by GPU
        self._making: set[Made] = set()  # by calls that have not come back
        self.leaving: dict[str, str] = {}  # why an instance is offered no more, by UUID
        self.changes: Counter[tuple[str, str]] = Counter()  # by action and result

    def of(self, uuid: str) -> GpuLayout | None:
        """The way of a GPU; None: it has no layout."""
        course = self._courses.get(uuid)
        return course.told if course else None

    def made_here(self, uuid: str, instance: str) -> bool:
        course = self._courses.get(uuid)
        return course is not None and instance in course.ours

    async def run(self) -> None:
        """Follow requests, GPUs and holders, for ever."""
        await repeat(self._round, self._node.assignment, self._node.snapshot, self._node.holdings.cell)

    async def _round(self) -> float | None:
        assignment = self._node.assignment.value
        wanted = {uuid: names for uuid in assignment.gpus if (names := self._wanted(uuid))}
        for state in self._node.snapshot.value.gpus:
            if not state.gpu.mig_enabled:
                with suppress(OSError):
                    await self._book.forget(state.uuid)
        for uuid in self._courses.keys() - wanted.keys():
            del self._courses[uuid]
        # What drained before a restart does so until it is known that no layout asks for it.
        known = {uuid for uuid, mode in assignment.gpus.items() if mode.offered and mode.mode is not Mode.OFF}
        for uuid in self._marked.keys() & known - wanted.keys():
            await self._mark(uuid, frozenset())
        pauses = []
        for uuid, names in wanted.items():
            async with self._book.turns[uuid]:
                pauses.append(await self._gpu(uuid, names))
        return min((pause for pause in pauses if pause is not None), default=None)

    def _wanted(self, uuid: str) -> tuple[str, ...]:
        """The layout of a GPU now; empty: it has none, or it is not offered."""
        mode = self._node.assignment.value.of(uuid)
        return mode.instances if mode.mode is Mode.MIG and mode.offering is Offering.OPEN else ()

    async def _gpu(self, uuid: str, wanted: tuple[str, ...]) -> float | None:
        """Take the steps of one GPU that can be taken; how long to wait then, unless something changes."""
        state = self._node.snapshot.value.by_uuid.get(uuid)
        if state is None or not state.healthy or not state.gpu.mig_enabled or self._wanted(uuid) != wanted:
            return None
        course = self._courses.setdefault(uuid, _Course())
        course.wanted = wanted
        inputs = (wanted, state.gpu.instances)
        if course.reached == inputs:
            return None
        left = course.retry_at - anyio.current_time()
        if left > 0 and course.retry_for == inputs:
            return left
        try:
            pause = await self._steps(state, course, wanted)
        except Misfit as error:
            await self._mark(uuid, frozenset())
            self._tell(state, course, GpuLayout(wanted, problem=str(error)))
            return LOOK_SECONDS
        except (NvmlError, OSError) as error:
            course.problem = self._words(error)
            steps = course.told.steps if course.told and course.told.wanted == wanted else ()
            self._tell(state, course, GpuLayout(wanted, steps, course.problem))
            course.retry_at, course.retry_for = anyio.current_time() + course.backoff.next(), inputs
            return course.retry_at - anyio.current_time()
        if course.problem and course.told:
            course.problem = ""
            self._tell(state, course, replace(course.told, problem=""))
        course.backoff.reset()
        course.reached = inputs if pause is None else None
        return pause

    async def _steps(self, state: GpuState, course: _Course, wanted: tuple[str, ...]) -> float | None:
        for _ in range(MOST_STEPS):
            partition = await self._read(state.uuid)
            if self._wanted(state.uuid) != wanted:
                break  # before each step, too: this one may have taken long
            there = self._standing(state.uuid, course, partition)
            steps = plan_layout(partition.profiles, wanted, there)
            self._refuse_if_busy(steps)
            # A failure stands until a try went well: one that goes on is one event.
            self._tell(state, course, GpuLayout(wanted, tuple(sentences(steps)), course.problem))
            leaving = frozenset(each.uuid for each in (*steps.destroy, *steps.drain) if each.uuid)
            await self._mark(state.uuid, leaving)
            if not steps:
                # The inventory may lag behind: what it shows is taken for reached once it shows the same.
                return None if partition.devices == state.gpu.instances else DRAIN_LOOK_SECONDS
            going = [*steps.destroy, *(each for each in steps.drain if _is_due(course, each))]
            destroyed = going and await self._destroy(state, course, going)
            if not destroyed and not await self._make(state, course, steps):
                break
        return DRAIN_LOOK_SECONDS

    def _refuse_if_busy(self, steps: Steps) -> None:
        """With whenBusy refuse nothing begins to drain. Raises Misfit."""
        held = [each for each in steps.drain if each.uuid not in self.leaving]
        if held and self._node.desired.catalog.when_busy == "refuse":
            names = ", ".join(f"{each.profile} (GPU instance {each.instance.number})" for each in held)
            raise Misfit(
                f"whenBusy is refuse and {names} would have to drain, held by "
                f"{', '.join(sorted({each.holder for each in held}))}; end these pods or set whenBusy: drain"
            )

    async def _read(self, uuid: str) -> Partition:
        awaited = self._making.copy()  # one that comes back meanwhile may not be seen yet
        partition = await self._node.calls.run(self._node.nvml.partition, uuid, deadline=CALL_SECONDS)
        await self._book.look(uuid, partition, awaited)
        return partition

    def _standing(self, uuid: str, course: _Course, partition: Partition) -> list[Standing]:
        names = {each.number: each.name for each in partition.profiles}
        course.busy = {each: busy for each, busy in course.busy.items() if each in partition.instances}
        found, ours = [], []
        for each in partition.instances:
            uuids, alone = partition.uuids_of(each), partition.uuid_of(each)
            mine = self._book.is_ours(uuid, each, alone)
            ours += [alone] if mine else []
            holders = [
                holder for text in uuids if (holder := self._holder(text, self._node.holdings.cell.value))
            ]
            busy, until, _ = course.busy.get(each, NOT_BUSY)
            if busy and not holders and (alone in self.leaving or anyio.current_time() < until):
                holders = [busy]
            adopted = self._node.settings.mig.adopt_foreign and each.whole and bool(alone)
            found.append(
                Standing(each, names.get(each.profile, ""), mine or adopted, "; ".join(holders), alone)
            )
        course.ours = frozenset(ours)
        return found

    def _holder(self, instance: str, record: Record | None) -> str:
        """Who has an instance, in words; empty: nobody."""
        if record is None:
            return NOT_KNOWN
        for holding in record.holdings:
            if instance in holding.gpus:
                return f"{holding.namespace}/{holding.pod}".removeprefix("/")
        return ADMITTED if instance in self._node.holdings.granted() else ""

    async def _destroy(self, state: GpuState, course: _Course, going: Sequence[Standing]) -> bool:
        """Destroy what nobody has by a reading that begins now; whether anything went."""
        record = await self._node.holdings.refresh()
        went = False
        # All at once: a later reading ends grants that it shows, and this one may not show them.
        for each in [each for each in going if not (each.uuid and self._holder(each.uuid, record))]:
            one = each.instance
            if self._wanted(state.uuid) != course.wanted:
                break
            # One that is adopted is ours if only a part of it goes.
            await self._book.note(Made(state.uuid, one.profile, one.start, one.number, each.uuid))
            try:
                await self._node.calls.run(
                    self._node.nvml.destroy_instance, state.uuid, one, each.uuid, deadline=CALL_SECONDS
                )
            except NvmlError as error:
                self.changes["destroy", "failed"] += 1
                if error.code == NvmlCode.NOT_FOUND:
                    continue  # others were faster
                if error.code != NvmlCode.IN_USE:
                    raise
                pauses = replace(course.busy.get(one, NOT_BUSY)[2])
                course.busy[one] = (str(error), anyio.current_time() + pauses.next(), pauses)
                continue
            went = True
            self._changed(state, "destroy", each.profile, each.instance.start)
        return went

    def make_instance(self, intention: Made, profile: MigProfile) -> None:
        """Make one. Blocks, and may come back when nobody waits for it any more. Raises NvmlError."""
        self._making.add(intention)
        try:
            self._node.nvml.make_instance(intention.gpu, profile, intention.start)
        finally:
            self._making.discard(intention)

    async def _make(self, state: GpuState, course: _Course, steps: Steps) -> bool:
        """Make what has room. Raises the first failure, when all others were tried or one hangs."""
        failure: NvmlError | None = None
        for making in steps.makeable:
            profile = making.profile
            if self._wanted(state.uuid) != course.wanted:
                break
            intention = Made(state.uuid, profile.number, making.start)
            await self._book.note(intention)
            try:
                await self._node.calls.run(
                    self.make_instance, intention, profile, deadline=CALL_SECONDS, about=lambda: state.uuid
                )
            except NvmlError as error:
                self.changes["make", "failed"] += 1
                if not isinstance(error, NvmlHung | NvmlLeftOver):
                    self._book.retract(intention)
                failure = failure or _of(making, error)
                if isinstance(error, NvmlHung):
                    break  # others would hang as well, and count against the GPU until it is asked nothing
                continue
            self._changed(state, "make", profile.name, making.start)
        if failure:
            with suppress(NvmlError):
                await self._read(state.uuid)  # of what was intended nothing is there
            raise failure
        return bool(steps.makeable)

    def _changed(self, state: GpuState, action: str, profile: str, start: int) -> None:
        self.changes[action, "done"] += 1
        event = "mig_instance_made" if action == "make" else "mig_instance_destroyed"
        log.info(event, gpu=state.uuid, profile=profile, start=start)
        self._node.read_again()

    def restore(self) -> None:
        """Offer no more what was draining when an earlier agent ended."""
        for uuid, instances in self._book.leaving.items():
            self._marked[uuid] = frozenset(instances)
            self.leaving |= dict.fromkeys(instances, LEAVING)

    async def _mark(self, uuid: str, going: frozenset[str]) -> None:
        """Offer these instances of a GPU no more, and all others again: before anybody else can run."""
        before = self._marked.get(uuid, frozenset())
        if going == before:
            return
        self._marked[uuid] = going
        for instance in before - going:
            self.leaving.pop(instance, None)
        self.leaving |= dict.fromkeys(going, LEAVING)
        for plugin in self._plugins():
            plugin.refresh()
        with suppress(OSError):  # nothing can be made then, and that is said
            await self._book.note_leaving(uuid, going)

    def _tell(self, state: GpuState, course: _Course, layout: GpuLayout) -> None:
        """Put the way into words for status; log it and make an event where it takes a turn."""
        first, course.told = course.told is None, layout
        waits = tuple(each for each in layout.steps if each.startswith("drain"))
        announced: Mapping[str, object] = {
            "wanted": layout.wanted,
            "waits": waits,
            "problem": layout.problem,
            "reached": not layout.steps,
        }
        if announced == course.announced:
            return
        course.announced = announced
        gpu, names = f"GPU {state.gpu.index} ({state.uuid})", ", ".join(layout.wanted)
        if layout.problem:
            log.warning("mig_layout_failed", gpu=state.uuid, wanted=layout.wanted, problem=layout.problem)
            self._node.event("MIGLayoutFailed", f"{gpu}: {names}: {layout.problem}", warning=True)
        elif layout.steps:
            log.info("mig_plan", gpu=state.uuid, wanted=layout.wanted, steps=layout.steps)
            self._node.event(
                "MIGLayoutChanging", f"{gpu}: to {names}: {'; '.join(layout.steps)}", warning=False
            )
        elif not first:
            log.info("mig_layout_reached", gpu=state.uuid, wanted=layout.wanted)
            self._node.event("MIGLayoutReady", f"{gpu} has its instances: {names}", warning=False)

    def _words(self, error: NvmlError | OSError) -> str:
        if isinstance(error, OSError):
            return f"nothing is made, since it cannot be written down: {error}"
        driver = self._node.snapshot.value.driver
        version = driver.version if driver else "of this node"
        match error.code:
            case NvmlCode.NO_PERMISSION:
                return f"{error}: the agent may not; give it the privilege, by mig.manage of the chart"
            case NvmlCode.FUNCTION_NOT_FOUND:
                return f"{error}: driver {version} lacks it; take a newer one"
        return f"{error}; it is tried again"


def _is_due(course: _Course, standing: Standing) -> bool:
    """Whether no record names its holder, and it is to be tried again whether processes are on it."""
    busy, until, _ = course.busy.get(standing.instance, NOT_BUSY)
    return standing.holder == busy and anyio.current_time() >= until


def _of(making: Making, error: NvmlError) -> NvmlError:
    text = f"{making.profile.name} at slice {making.start} cannot be made: {error}"
    return NvmlError(error.code, error.call, text)
