"""The mode switcher: moves each GPU from what it is sold as to what it shall be sold as.

It is level-triggered: each round looks at what is wanted, what is in force and who holds what, and does
the next step of every GPU that differs. So a new wish in mid-switch, a restart and a failure need no
cases of their own. Steps of one GPU, in order:

1. have the scheduler send no more pods, wait until all that are bound have got their devices;
2. stop selling: all IDs turn Unhealthy; once no allocation is under way, free ones leave the list;
3. wait for the last holder;
4. tear down the old mode, set up the new one (`agent.modes.changes`);
5. sell in the new mode.

A GPU is never on the lists of two modes: step 5 waits until the list of step 2 has left.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.inventory.snapshot import Snapshot
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kubelet.holdings import Holder, holders_by_gpu
from agent.model.ids import parse
from agent.model.modes import OFF, Assignment, GpuMode, Mode
from agent.modes.changes import Change, Changes
from agent.modes.comparing import must_drain, named, pods_of, same, summary, switches_of, taken_over
from agent.modes.desired import Desired
from agent.modes.planner import Gate, Plan, decide, no_gate
from agent.modes.ports import NO_BACKENDS, Announcer, Backend, Holdings, Resources
from agent.modes.state import STARTING, Phase, SwitchState

log = structlog.get_logger()

DRAIN_LOOK_SECONDS = 0.5  # how often holders are looked at while a GPU drains
DELIVER_SECONDS = 2.0
IDLE_SECONDS = 3600.0  # nothing to do until something changes

Waiting = Mapping[str, tuple[str, ...]]  # GPU -> pods (namespace/name) that hold it
Holders = dict[str, list[Holder]]
NOBODY: Waiting = MappingProxyType({})


class ModeSwitcher:
    """Owns the assignment of GPUs to modes that the plugins read."""

    def __init__(
        self,
        inventory: Cell[Snapshot],
        desired: Cell[Desired],
        assignment: Cell[Assignment],
        holdings: Holdings,
        resources: Resources,
        *,
        announcer: Announcer | None = None,
        backends: Mapping[Mode, Backend] = NO_BACKENDS,
        gate: Gate = no_gate,
        when_busy: Literal["drain", "refuse"] = "drain",
        standing: Desired | None = None,
    ) -> None:
        """`standing`: what was in force before this process, for a wish that cannot be obeyed."""
        self._inventory = inventory
        self._desired = desired
        self._holdings = holdings
        self._resources = resources
        self._announcer = announcer
        self._gate = gate
        self.when_busy = when_busy  # may change with the configuration
        self._changes = Changes(backends, self._publish, self._woken)
        self._wake = anyio.Event()
        self._kubelet_retry = Backoff(first=0.2, longest=2.0)
        self._closing = False
        self.switches = 0  # how often a GPU came into another mode
        self.assignment = assignment  # nobody else publishes it
        self.accepted: Cell[Desired | None] = Cell(standing)  # the last wish that could be obeyed
        self.state: Cell[SwitchState] = Cell(STARTING)

    async def run(self) -> None:
        """Switch for ever; may be started again after a failure."""
        self._changes.forget_running()
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake_on, self._inventory)
            group.start_soon(self._wake_on, self._desired)
            group.start_soon(self._wake_on, self._holdings.cell)
            while not self._closing:
                self._wake = anyio.Event()
                pause = await self._round(group)
                with anyio.move_on_after(pause):
                    await self._wake.wait()
            await anyio.sleep_forever()

    async def close(self) -> None:
        """Offer nothing any more, for an agent that is about to stop: the kubelet hears it before the end."""
        self._closing = True
        self._woken()
        self._publish(self.assignment.value.gpus)
        await self._delivered()

    def _woken(self) -> None:
        self._wake.set()

    async def _wake_on(self, cell: Cell[Any]) -> None:
        async for _ in cell.values():
            self._woken()

    async def _round(self, group: TaskGroup) -> float:
        """One look and the steps that follow from it; how long to wait, in seconds, unless woken."""
        desired, snapshot = self._desired.value, self._inventory.value
        if snapshot.problem and not snapshot.gpus:
            self._tell(Phase.SWITCHING, desired, f"waiting for the GPUs: {snapshot.problem}", {})
            return IDLE_SECONDS
        plan = decide(snapshot, desired, self.accepted.value, self._gate)
        if any(state.uuid not in self.assignment.value.gpus for state in snapshot.gpus):
            holders = await self._holders()
            if holders is None:
                return self._kubelet_is_away(desired, plan)
            self._take_over(snapshot, holders, plan.targets)
        busy = NOBODY
        if plan.obeys and self.when_busy == "refuse" and desired != self.accepted.value:
            holders = await self._holders()
            if holders is None:
                return self._kubelet_is_away(desired, plan)
            plan, busy = self._refused_if_busy(plan, holders)
        if plan.obeys and desired != self.accepted.value:
            self.accepted.publish(desired)
        waiting = busy
        self._changes.forget_failed(plan.targets)
        if differing := self._differing(plan.targets):
            await self._stop_selling(differing)
            holders = await self._holders()
            if holders is None:
                return self._kubelet_is_away(desired, plan)
            waiting = self._advance(differing, plan.targets, holders, group) or busy
        await self._sell_what_is_ready(plan.targets)
        return self._told(desired, plan, waiting)

    async def _holders(self) -> Holders | None:
        """Who holds what, by a reading of this moment; None: the kubelet does not say."""
        pods = await self._holdings.refresh()
        if pods is None:
            return None
        self._kubelet_retry.reset()
        return holders_by_gpu(pods)

    def _kubelet_is_away(self, desired: Desired, plan: Plan) -> float:
        self._tell(
            Phase.SWITCHING, desired, f"waiting for the kubelet: {self._holdings.problem}", plan.targets
        )
        return self._kubelet_retry.next()

    def _refused_if_busy(self, plan: Plan, holders: Holders) -> tuple[Plan, Waiting]:
        """With whenBusy refuse: what stood before, while pods hold GPUs that would have to drain."""
        assignment = self.assignment.value
        busy = {
            uuid: pods_of(holders[uuid])
            for uuid, wanted in plan.targets.items()
            if holders.get(uuid) and must_drain(assignment.of(uuid), wanted)
        }
        if not busy:
            return plan, NOBODY
        text = f"whenBusy is refuse and GPUs are in use by {named(busy)[1]}; "
        refused = Desired(self._desired.value.name, problem=text + "end these pods or set whenBusy: drain")
        return decide(self._inventory.value, refused, self.accepted.value, self._gate), busy

    def _differing(self, targets: Mapping[str, GpuMode]) -> list[str]:
        """GPUs that are not as wanted and can be helped now."""
        found = []
        for uuid, wanted in targets.items():
            change = self._changes.of(uuid)
            if change and (change.running or change.waits(wanted)):
                continue
            if change and change.ready and change.wanted == wanted:
                continue  # it is about to be sold
            # Something may have been set up for a wish that has changed meanwhile.
            if not same(self._of(uuid), wanted) or (change and change.ready):
                found.append(uuid)
        return found

    def _of(self, uuid: str) -> GpuMode:
        return self.assignment.value.of(uuid)

    def _take_over(self, snapshot: Snapshot, holders: Holders, targets: Mapping[str, GpuMode]) -> None:
        """GPUs seen for the first time: whoever holds units of one tells the mode that it is in."""
        new: dict[str, GpuMode] = {}
        for state in snapshot.gpus:
            if state.uuid not in self.assignment.value.gpus:
                held = holders.get(state.uuid)
                new[state.uuid] = taken_over(held, targets.get(state.uuid, OFF)) if held else OFF
        self._publish(new)

    def _publish(self, changes: Mapping[str, GpuMode]) -> None:
        """Put changes of some GPUs in force and bring all lists up to date in the same breath."""
        before = self.assignment.value
        if self._closing:
            changes = {uuid: _ending(mode) for uuid, mode in changes.items()}
        for uuid, mode in changes.items():
            was = before.of(uuid)
            if mode != was:
                log.info(
                    "gpu_mode",
                    gpu=uuid,
                    mode=mode.mode.value,
                    selling=mode.selling,
                    reason=mode.reason or None,
                )
            if mode.mode is not Mode.OFF:
                self._resources.enable(mode.mode)
                self.switches += mode.mode is not was.mode
        self.assignment.publish(Assignment(MappingProxyType({**before.gpus, **changes})))
        self._resources.refresh()

    async def _delivered(self) -> None:
        with anyio.move_on_after(DELIVER_SECONDS):
            await self._resources.delivered()

    async def _stop_selling(self, differing: list[str]) -> None:
        stopping = {
            uuid: replace(mode, selling=False, leaving=True, reason="the GPU is changing its mode")
            for uuid in differing
            if (mode := self._of(uuid)).mode is not Mode.OFF and mode.selling
        }
        if not stopping:
            return

        async def publish() -> None:
            self._publish(stopping)
            await self._delivered()

        if self._announcer:
            ahead = Assignment(MappingProxyType({**self.assignment.value.gpus, **stopping}))
            await self._announcer.withdraw(ahead, publish)
        else:
            await publish()

    def _advance(
        self, differing: list[str], targets: Mapping[str, GpuMode], holders: Holders, group: TaskGroup
    ) -> Waiting:
        """Begin the change of every GPU that nobody holds any more; answers who is waited for."""
        granted = {parse(text).gpu for text in self._resources.granted_lately()}
        gpus = {state.uuid: state.gpu for state in self._inventory.value.gpus}
        waiting: dict[str, tuple[str, ...]] = {}
        left: dict[str, GpuMode] = {}
        begun: list[Change] = []
        for uuid in (each for each in differing if each in gpus):  # one may have been forgotten meanwhile
            active, wanted, known = self._of(uuid), targets[uuid], self._changes.of(uuid)
            if must_drain(active, wanted) and (holders.get(uuid) or uuid in granted):
                waiting[uuid] = pods_of(holders.get(uuid, ())) or ("a pod that is being admitted",)
                if active.leaving and uuid not in granted:
                    left[uuid] = replace(active, leaving=False)
            elif must_drain(active, wanted):
                begun.append(Change(gpus[uuid], active.mode, wanted, active))
            elif active.mode is not Mode.OFF:  # sold again as it was
                begun.append(Change(gpus[uuid], Mode.OFF, wanted, active))
            else:
                stale = known.wanted.mode if known and known.ready else Mode.OFF
                same_mode = stale is wanted.mode
                begun.append(Change(gpus[uuid], Mode.OFF if same_mode else stale, wanted))
        if left:
            self._publish(left)
        self._changes.begin(begun, group)
        return waiting

    async def _sell_what_is_ready(self, targets: Mapping[str, GpuMode]) -> None:
        """Step 5: everything that is ready and wanted is sold, all in one publication."""
        ready = self._changes.ready(targets)
        if ready:
            # What left the old mode's list a moment ago must be gone there before it stands in another.
            await self._delivered()
            self._publish(ready)
            self._changes.done(ready)

    def _told(self, desired: Desired, plan: Plan, waiting: Waiting) -> float:
        targets, problems = plan.targets, self._changes.problems()
        if all(same(self._of(uuid), wanted) for uuid, wanted in targets.items()):
            self._changes.done(targets)
            phase = Phase.BLOCKED if plan.problem else Phase.APPLIED
            self._tell(phase, desired, plan.problem or summary(targets), targets, waiting, applied=True)
            # Whoever is in the way is looked for again, until nobody is.
            return DRAIN_LOOK_SECONDS if waiting else IDLE_SECONDS
        if plan.problem:
            self._tell(Phase.BLOCKED, desired, plan.problem, targets, waiting, problems)
            return DRAIN_LOOK_SECONDS
        if waiting:
            count, pods = named(waiting)
            text = f"waiting for {count} pod(s) to end: {pods}"
            self._tell(Phase.SWITCHING, desired, text, targets, waiting, problems)
            return DRAIN_LOOK_SECONDS
        if problems:
            self._tell(Phase.FAILED, desired, next(iter(problems.values())), targets, NOBODY, problems)
            return self._changes.next_try() or DRAIN_LOOK_SECONDS
        self._tell(Phase.SWITCHING, desired, "setting up", targets)
        return DRAIN_LOOK_SECONDS

    def _tell(
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


def _ending(mode: GpuMode) -> GpuMode:
    """Of an agent that is about to stop: its units stay listed, and none is sold."""
    if mode.mode is Mode.OFF or not mode.selling:
        return mode
    return replace(mode, selling=False, leaving=True, reason="the agent is stopping")
