"""The mode switcher, and metrics of modes.

It is level-triggered: each round looks at what is wanted, what is in force and who holds what, and does
the next step of every GPU that differs. So a new request in mid-switch, a restart and a failure need no
cases of their own. The steps of one GPU, and what may follow what, stand in `agent.modes.transition`; here
they are taken: the scheduler sends no more pods before a GPU that is offered is closed, a list has left for
the kubelet before anything is concluded from it, and no GPU is on the lists of two modes.

Set-ups that fail are tried again together (`agent.modes.retry`): each try takes GPUs that are offered as
before off the lists for a while.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.holdings.holdings import HoldingsWatch
from agent.inventory.snapshot import NOT_YET, Snapshot
from agent.kit.tasks import Backoff, Cell, follow
from agent.model.gpu import Gpu
from agent.model.holding import GpuHolder
from agent.model.modes import OFF, SEPARATOR, WHOLE_GPUS, Assignment, GpuMode, Mode
from agent.modes import transition
from agent.modes.desired import ClaimRequests, Desired
from agent.modes.planner import (
    STARTING,
    Phase,
    Plan,
    Retry,
    SwitchState,
    decide,
    handed_out_here,
    in_use,
    log_changes,
    named,
    pods_of,
    summary,
    switches_of,
    taken_over,
    uncounted,
)
from agent.modes.resources import ResourceSet
from agent.modes.transition import LEAVING, WORKING, ModeStage, ModeState
from agent.modes.unexplained import Unexplained
from agent.modes.wing import NO_WINGS, Announcer, GpuWork, Outcome, Wings
from agent.modes.withholding import (
    NO_CORDONS,
    Cordons,
    Lingering,
    Withheld,
    cordoned,
    held_by_strangers,
    without,
)
from agent.telemetry import definitions as d
from agent.telemetry.series import Series

# The mode switcher: moves each GPU from the mode that it is offered in to the one that is wanted.

log = structlog.get_logger()

DRAIN_LOOK_SECONDS = 0.5  # how often holders are looked at while a GPU drains
RETRY_LOOK_SECONDS = 10.0  # how often it is looked whether another try could help
DELIVER_SECONDS = 2.0
IDLE_SECONDS = 3600.0  # nothing to do until something changes

Waiting = Mapping[str, tuple[str, ...]]  # GPU -> pods (namespace/name) that hold it
Holders = Mapping[str, Sequence[GpuHolder]]
NOBODY: Waiting = MappingProxyType({})
ADMITTED, ENDED = "a pod that is being admitted", "a process of a pod that has ended"
NAMELESS = "a process of a pod that nobody names"


class ModeSwitcher:
    """Owns the assignment of GPUs to modes that the plugins read."""

    def __init__(
        self,
        inventory: Cell[Snapshot],
        desired: Cell[Desired],
        assignment: Cell[Assignment],
        holdings: HoldingsWatch,
        resources: ResourceSet,
        *,
        state: Cell[SwitchState] | None = None,
        announcer: Announcer | None = None,
        wings: Wings = NO_WINGS,
        when_busy: Literal["drain", "refuse"] = "drain",
        standing: Desired | None = None,
        draining: Collection[Mode] = (),
        cordons: Cell[Cordons] | None = None,
        lingering: Lingering | None = None,
        unexplained: Unexplained | None = None,
        lacks: Cell[str] | None = None,
        claims: ClaimRequests | None = None,
    ) -> None:
        """`standing`: what was in force before this process, for a request that cannot be obeyed.

        `draining`: modes of instances that GPUs were leaving then, for their holders.

        `lacks`: why containers would miss what is to come with a GPU; nothing is offered then.
        """
        self._inventory = inventory
        self._desired = desired
        self._holdings = holdings
        self._resources = resources
        self._announcer = announcer
        self._wings = wings
        self._cordons = cordons or Cell(NO_CORDONS)
        self.when_busy = when_busy  # may change with the configuration
        self._states: dict[str, ModeState] = {}
        self._gpus: dict[str, Gpu] = {}
        self._lingering = lingering
        self._unexplained = unexplained
        self._looks: list[Cell[Any]] = [lingering.looks] if lingering else []
        self._looks += [unexplained.withheld] if unexplained else []
        self._lacks = lacks or Cell("")
        self._claims = claims or ClaimRequests()  # without a door: nobody has any
        self._others: Withheld = {}  # who is on GPUs beside those that hold them
        self._strangers: Withheld = {}  # those of them that hold units of another plugin
        self._nameless: set[str] = set()  # GPUs with pods at work that no reading may have named
        self._tasks = GpuWork(wings, self._states.__getitem__, self._came)
        self._draining = draining
        self._group: TaskGroup | None = None
        self._retry = Retry()
        self._failing = False  # set-ups fail, and that has been published
        self._wake = anyio.Event()
        self._kubelet_retry = Backoff(first=0.2, longest=2.0)
        self._closing = False
        self.switches = 0  # how often a GPU came into another mode
        self.assignment = assignment  # nobody else publishes it
        self.accepted: Cell[Desired | None] = Cell(standing)  # the last request that could be obeyed
        self.state = state or Cell(STARTING)  # the same

    async def run(self) -> None:
        """Switch for ever; may be started again after a failure."""
        self._tasks.forget()
        async with anyio.create_task_group() as group:
            self._group = group
            door = (self._claims.wanted, self._claims.listed)
            news = (self._inventory, self._desired, self._holdings.cell, self._cordons, *door, self._lacks)
            group.start_soon(follow, self._wake_up, *news, *self._looks)
            self._work(self._states)
            while not self._closing:
                self._wake = anyio.Event()
                with anyio.move_on_after(await self._round()):
                    await self._wake.wait()
            await anyio.sleep_forever()

    async def close(self) -> None:
        """Offer nothing any more, for an agent that is about to stop: the kubelet hears it before the end."""
        self._closing = True
        self._wake.set()
        self._change({uuid: transition.stopped(state) for uuid, state in self._states.items()})
        await self._delivered()

    def remarks(self) -> list[str]:
        """A request that cannot be obeyed."""
        return self.state.value.remarks()

    def _wake_up(self) -> None:
        self._wake.set()

    async def _round(self) -> float:
        """One look and the steps that follow from it; how long to wait, in seconds, unless woken."""
        desired, snapshot = self._desired.value, self._inventory.value
        if snapshot.problem and not snapshot.gpus:
            self._without_gpus(desired, snapshot.problem)
            return IDLE_SECONDS
        self._resources.look()
        plan = self._decided(desired)
        self._gpus |= {state.uuid: state.gpu for state in snapshot.gpus}
        new = [state.uuid for state in snapshot.gpus if state.uuid not in self._states]
        refusing = plan.obeys and self.when_busy == "refuse" and desired != self.accepted.value
        busy = NOBODY
        if new or refusing:
            holders = await self._holders(plan)
            if holders is None:
                return await self._kubelet_is_away(desired, plan)
            await self._take_over(new, holders, plan.targets)
            self._draining = ()  # what was taken over says it from now on
            if refusing:
                plan, busy = self._refused_if_busy(plan, holders)
        if plan.obeys and desired != self.accepted.value:
            self.accepted.publish(desired)
        targets = without(plan.targets, self._withheld())
        targets = self._claims.chosen(cordoned(targets, self._gpus, self._cordons.value))
        plan = Plan(targets, plan.problem, plan.obeys)
        waiting, missing = busy, ""
        await self._aim(plan.targets)
        if any(self._states[uuid].stage in LEAVING for uuid in plan.targets):
            await self._forget_nameless()  # before the reading: what is granted later may be in no older one
            holders = await self._holders(plan)
            if holders is None:
                return await self._kubelet_is_away(desired, plan)
            if self._closing:
                return IDLE_SECONDS  # what was closed for the stop came after this reading
            waiting = self._look(plan.targets, holders) or busy
            missing = uncounted(holders, self.assignment.value)
        await self._offer_ready_ones()
        return self._report(desired, plan, waiting, missing)

    def _decided(self, desired: Desired) -> Plan:
        snapshot, standing = self._inventory.value, self.accepted.value
        return decide(snapshot, desired, standing, self._wings, self._lacks.value)

    def _withheld(self) -> Withheld:
        """GPUs that are to be off because of others on them, as last known; logged as they come and go."""
        before, pods = self._others, self._holdings.cell.value
        if pods is not None:  # while the kubelet does not answer nobody knows of others
            self._strangers = held_by_strangers(pods, self._gpus)
        stay = self._lingering.found if self._lingering else {}
        others = self._unexplained.withheld.value if self._unexplained else {}
        self._others = {**others, **self._strangers, **stay}
        for uuid, reason in self._others.items():
            if before.get(uuid) != reason:
                log.warning("gpu_withheld", gpu=uuid, reason=reason)
        for uuid in before.keys() - self._others.keys():
            log.info("gpu_let_back", gpu=uuid)
        return self._others

    def _without_gpus(self, desired: Desired, problem: str) -> None:
        """No GPU was ever seen. A node that shall offer nothing is ready so: its agent may go."""
        ready = desired.nothing and problem != NOT_YET
        if ready:
            self.accepted.publish(desired)
        text = f"{'no GPU is wanted' if ready else 'waiting for the GPUs'}: {problem}"
        self._show(Phase.APPLIED if ready else Phase.SWITCHING, desired, text, {}, applied=ready)

    async def _holders(self, plan: Plan) -> Holders | None:
        """Who holds what, by a reading of this moment; None: the kubelet does not say."""
        pods = await self._holdings.refresh()
        if pods is None:
            return None
        self._kubelet_retry.reset()
        standing = self.accepted.value
        had = {entry.mode for entry in standing.entries} if standing else set[Mode]()
        had |= {target.mode for target in plan.targets.values()} | set(self._draining)
        had |= {state.mode for state in self._states.values()}
        return handed_out_here(pods.by_gpu, had)

    async def _kubelet_is_away(self, desired: Desired, plan: Plan) -> float:
        self._close_used(plan.targets)
        await self._delivered()
        self._show(
            Phase.SWITCHING, desired, f"waiting for the kubelet: {self._holdings.problem}", plan.targets
        )
        return self._kubelet_retry.next()

    def _refused_if_busy(self, plan: Plan, holders: Holders) -> tuple[Plan, Waiting]:
        """With whenBusy refuse: what stood before, while pods hold GPUs that would have to drain."""
        busy = in_use(self.assignment.value, plan.targets, holders, self._cordons.value)
        if not busy:
            return plan, NOBODY
        text = f"whenBusy is refuse and GPUs are in use by {named(busy)[1]}; "
        refused = Desired(self._desired.value.name, problem=text + "end these pods or set whenBusy: drain")
        return self._decided(refused), busy

    async def _take_over(self, new: list[str], holders: Holders, targets: Mapping[str, GpuMode]) -> None:
        """GPUs seen for the first time: units of one that pods hold show the mode that it is in.

        A kubelet that lost its records names no pods for a while: what runs for them shows it then.
        """
        found: dict[str, ModeState] = {}
        asked = (self._gpus[uuid] for uuid in new if not targets.get(uuid, OFF).dra)
        used = await self._tasks.at_work(asked, surely=False)
        for uuid in new:
            held = holders.get(uuid)
            mode = taken_over(held, targets.get(uuid, OFF)) if held else self._claims.left(uuid)
            if by := used.get(uuid):
                mode = mode or GpuMode(by)
                self._nameless.add(uuid)  # one that is named says nothing of others
            found[uuid] = transition.first_seen(mode)
        self._change(found)

    async def _forget_nameless(self) -> None:
        """Forget GPUs where nobody is at work any more."""
        left = await self._tasks.at_work([self._gpus[uuid] for uuid in self._nameless], surely=True)
        self._nameless.intersection_update(left)

    async def _aim(self, targets: Mapping[str, GpuMode]) -> None:
        """Set every GPU on its way to its target; GPUs that are offered are closed, the scheduler first."""
        after = {uuid: transition.wanted(self._states[uuid], target) for uuid, target in targets.items()}
        after |= self._tried_again(after)
        # No list has anything of a device of DRA, whose taint keeps claims away.
        leaving = {
            uuid: state
            for uuid, state in after.items()
            if state.stage is ModeStage.CLOSING
            and self._states[uuid].stage is ModeStage.OFFERED
            and not state.dra
        }
        # What others use is handed out no more, not even to pods that are bound.
        closing = {uuid: state for uuid, state in leaving.items() if uuid not in self._others}
        self._change({uuid: state for uuid, state in after.items() if uuid not in closing})
        if len(closing) < len(leaving):
            await self._delivered()
        if not closing:
            return

        async def publish() -> None:
            # Not those that were closed meanwhile, since others came to be on them or the agent stops.
            offered = {uuid for uuid, state in self._states.items() if state.stage is ModeStage.OFFERED}
            self._change({uuid: state for uuid, state in closing.items() if uuid in offered})
            await self._delivered()

        if self._announcer:
            listed = {uuid: state.listed for uuid, state in closing.items()}
            ahead = Assignment(MappingProxyType({**self.assignment.value.gpus, **listed}))
            async with anyio.create_task_group() as group:
                group.start_soon(follow, partial(self._close_used, targets), *self._looks)
                await self._announcer.withdraw(ahead, publish)
                group.cancel_scope.cancel()
            await self._delivered()  # of what was closed since
        else:
            await publish()

    def _close_used(self, targets: Mapping[str, GpuMode]) -> None:
        """Close what others use now: bound pods are waited for beside, or the kubelet's answer."""
        for uuid, target in without(targets, self._withheld()).items():
            state = self._states.get(uuid)
            if state and uuid in self._others and state.stage is ModeStage.OFFERED:
                self._change({uuid: transition.wanted(state, target)})

    def _tried_again(self, states: Mapping[str, ModeState]) -> dict[str, ModeState]:
        """All GPUs whose set-up failed, in one try, once it is due."""
        failed = {uuid: state for uuid, state in states.items() if state.failure}
        if not failed:
            self._retry.reset()
            self._failing = False
            return {}
        if any(state.stage in WORKING or state.stage is ModeStage.READY for state in states.values()):
            return {}  # of this round of tries some are still under way
        snapshot = self._inventory.value
        healthy = [state.healthy for state in snapshot.gpus if state.uuid in failed]
        depends_on = snapshot.driver, healthy, [each.depends_on() for each in self._wings.values()]
        if any(state.resting for state in failed.values()):
            self._retry.failed(depends_on)
        if not self._retry.due(depends_on):
            return {}
        return {uuid: transition.tried_again(state) for uuid, state in failed.items()}

    def _look(self, targets: Mapping[str, GpuMode], holders: Holders) -> Waiting:
        """Begin the change of every GPU that nobody holds any more; answers who is waited for."""
        # Of another plugin's IDs, which the kubelet may ask for while it has that one's list, alike.
        # An instance that was handed out may be gone by now: whose it was, the record remembers.
        record = self._holdings.cell.value
        parents = {**(record.parents if record else {}), **self._inventory.value.parents}
        begins = {text.partition(SEPARATOR)[0] for text in self._resources.granted_lately()}
        granted = {parents.get(uuid, uuid) for uuid in begins}
        # No record names a holder any more, and one may have left a process.
        stay = self._lingering.unsettled if self._lingering else frozenset[str]()
        changed: dict[str, ModeState] = {}
        waiting: dict[str, tuple[str, ...]] = {}
        for uuid in targets:
            state = self._states[uuid]
            held = (
                bool(holders.get(uuid))
                or uuid in stay
                or uuid in self._nameless
                or (state.dra and self._claims.holds(uuid, leaving=not state.target.dra))
            )
            after = transition.looked(state, held=held, granted=uuid in granted)
            changed[uuid] = after
            if after.stage in LEAVING and not after.stands_as_wanted:
                nobody = ENDED if uuid in stay else NAMELESS if uuid in self._nameless else ADMITTED
                nobody = ADMITTED if uuid in granted else nobody
                waiting[uuid] = pods_of(holders.get(uuid, ())) or (nobody,)
        self._change(changed)
        return waiting

    async def _offer_ready_ones(self) -> None:
        """Everything that is ready is offered, all in one publication."""
        if any(state.stage is ModeStage.READY for state in self._states.values()):
            # IDs that left the old mode's list a moment ago must be gone there before they stand in another.
            await self._delivered()
            if not self._closing:
                self._change({uuid: transition.offered(state) for uuid, state in self._states.items()})

    def _came(self, uuid: str, outcome: Outcome) -> None:
        """A task of a GPU is over."""
        self._change({uuid: outcome(self._states[uuid])})
        self._wake.set()

    def _change(self, changes: Mapping[str, ModeState]) -> None:
        """Put states of some GPUs in force and bring all lists up to date in the same breath."""
        changed: dict[str, ModeState] = {}
        for uuid, state in changes.items():
            after = self._tasks.without_work(state)
            after = transition.stopped(after) if self._closing else after
            if after != self._states.get(uuid):
                changed[uuid] = after
        self._states |= changed
        before = self.assignment.value
        listed = {uuid: state.listed for uuid, state in changed.items()}
        for uuid, mode in listed.items():
            if mode.mode is not Mode.OFF:
                # A kubelet that knows a plugin's name from before refuses the device of DRA that is asked
                # for by it, unless a plugin is there: one with no units.
                if not mode.dra or WHOLE_GPUS in self._claims.modes:
                    self._resources.enable(WHOLE_GPUS if mode.dra else mode.mode)
                self.switches += mode.mode is not before.of(uuid).mode
        log_changes(before, self._states, listed)
        if any(before.gpus.get(uuid) != mode for uuid, mode in listed.items()):
            self.assignment.publish(Assignment(MappingProxyType({**before.gpus, **listed})))
            self._resources.refresh()
        self._work(changed)

    def _work(self, changed: Mapping[str, ModeState]) -> None:
        if self._group:
            for uuid in changed:
                self._tasks.begin(self._gpus[uuid], self._group)

    async def _delivered(self) -> None:
        with anyio.move_on_after(DELIVER_SECONDS):
            await self._resources.delivered()

    def _report(self, desired: Desired, plan: Plan, waiting: Waiting, missing: str) -> float:
        targets = plan.targets
        states = {uuid: self._states[uuid] for uuid in targets}
        # Claims choose modes of devices of DRA without the request: it is in force meanwhile.
        claimed = {uuid for uuid, state in states.items() if state.claimed}
        apart = {*self._cordons.value, *self._others, *claimed}
        problems = {uuid: state.failure for uuid, state in states.items() if state.failure}
        working = any(state.stage in WORKING or state.stage is ModeStage.READY for state in states.values())
        # Whose processes have gone is published; the kubelet is not asked about them, maybe for days.
        asked = any(pods != (ENDED,) for pods in waiting.values())
        pause = DRAIN_LOOK_SECONDS if asked else IDLE_SECONDS
        # A GPU that is cordoned by hand, or withheld, drains beside: the request is in force without it.
        mode_waits = {uuid: pods for uuid, pods in waiting.items() if uuid not in apart}
        if all(state.reached or uuid in apart for uuid, state in states.items()):
            phase = Phase.BLOCKED if plan.problem else Phase.APPLIED
            text = (plan.problem or summary(targets)) + missing
            self._show(phase, desired, text, targets, waiting, problems, applied=True)
            if problems:
                pause = min(pause, RETRY_LOOK_SECONDS, self._retry.seconds or DRAIN_LOOK_SECONDS)
        elif plan.problem:
            self._show(Phase.BLOCKED, desired, plan.problem, targets, waiting, problems)
            pause = DRAIN_LOOK_SECONDS
        elif problems and (self._failing or not (working or mode_waits)):
            # While it is tried again, too: one failure is published once.
            self._failing = True
            self._show(Phase.FAILED, desired, next(iter(problems.values())), targets, waiting, problems)
            pause = min(pause, RETRY_LOOK_SECONDS, self._retry.seconds or DRAIN_LOOK_SECONDS)
        elif mode_waits:
            count, pods = named(mode_waits)
            text = f"waiting for {count} pod(s) to end: {pods}{missing}"
            self._show(Phase.SWITCHING, desired, text, targets, waiting, problems)
        else:
            self._show(Phase.SWITCHING, desired, "setting up", targets, waiting)
            pause = DRAIN_LOOK_SECONDS
        return pause

    def _show(
        self,
        phase: Phase,
        desired: Desired,
        message: str,
        targets: Mapping[str, GpuMode],
        waiting: Waiting = NOBODY,
        problems: Mapping[str, str] = MappingProxyType({}),
        *,
        applied: bool = False,
    ) -> None:
        before, accepted = self.state.value, self.accepted.value
        state = SwitchState(
            phase,
            desired.name,
            message,
            switches_of(self._inventory.value, self.assignment.value, targets, waiting, problems),
            accepted.word if applied and accepted else before.applied,
        )
        if state == before:
            return
        self.state.publish(state)
        if (state.phase, state.message, state.desired) != (before.phase, before.message, before.desired):
            level = log.info if phase in (Phase.APPLIED, Phase.SWITCHING) else log.warning
            level("mode_state", state=phase.value, desired=desired.name, message=message)


# Metrics of modes.


def modes_collector(switcher: ModeSwitcher, unexplained: Unexplained) -> Iterator[Series]:
    """The switcher's metrics: the mode of each GPU, the node's phase, how often GPUs flipped."""
    state = switcher.state
    for gpu in state.value.gpus:
        active, wanted = gpu.active, gpu.wanted
        yield d.GPU_MODE, 1, (gpu.uuid, str(gpu.index), active.mode.value, wanted.mode.value)
        yield d.GPU_SELLING, active.offered and active.mode is wanted.mode, (gpu.uuid, str(gpu.index))
        if gpu.uuid in unexplained.counts:
            yield d.GPU_UNEXPLAINED, unexplained.counts[gpu.uuid], (gpu.uuid, str(gpu.index))
    for phase in Phase:
        yield d.MODE_STATE, state.value.phase is phase, (phase.value,)
    yield d.MODE_SWITCHES, switcher.switches, ()
