"""The mode switcher: moves each GPU from what it is sold as to what it shall be sold as.

It is level-triggered: each round looks at what is wanted, what is in force and who holds what, and does
the next step of every GPU that differs. So a new wish in mid-switch, a restart and a failure need no
cases of their own. Steps of one GPU, in order:

1. announce to the scheduler that less is sold, wait until no pod is caught in between;
2. stop selling: all IDs turn Unhealthy; once no allocation is under way, free ones leave the list;
3. wait for the last holder;
4. tear down the old mode, set up the new one;
5. sell in the new mode.

A GPU is never on the lists of two modes: step 5 waits until the list of step 2 has left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.inventory.snapshot import Snapshot
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kubelet.holdings import Holder, holders_by_gpu
from agent.model.gpu import Gpu
from agent.model.ids import parse
from agent.model.modes import OFF, Assignment, GpuMode, Mode
from agent.modes.desired import Desired
from agent.modes.planner import Gate, LayoutError, no_gate, plan
from agent.modes.ports import NO_BACKENDS, Announcer, Backend, Holdings, Resources, SetUpFailed
from agent.modes.state import STARTING, GpuSwitch, Phase, SwitchState

log = structlog.get_logger()

DRAIN_LOOK_SECONDS = 0.5  # how often holders are looked at while a GPU drains
DELIVER_SECONDS = 2.0
HOLDINGS_RETRY_SECONDS = 0.2
IDLE_SECONDS = 3600.0  # nothing to do until something changes


@dataclass
class _SetUp:
    """A GPU whose new mode is being set up, or could not be."""

    wanted: GpuMode
    previous: GpuMode = OFF  # goes back in force when the set-up fails
    running: bool = True
    problem: str = ""
    retry_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(first=1.0, longest=60.0))

    @property
    def ready(self) -> bool:
        """Whether the new mode may be sold."""
        return not self.running and not self.problem


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
    ) -> None:
        self._inventory = inventory
        self._desired = desired
        self._holdings = holdings
        self._resources = resources
        self._announcer = announcer
        self._backends = backends
        self._gate = gate
        self.when_busy = when_busy  # may change with the configuration
        self._set_ups: dict[str, _SetUp] = {}
        self._wake = anyio.Event()
        self.switches = 0  # how often a GPU came into another mode
        self.assignment = assignment  # nobody else publishes it
        self.state: Cell[SwitchState] = Cell(STARTING)

    async def run(self) -> None:
        """Switch for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake_on, self._inventory)
            group.start_soon(self._wake_on, self._desired)
            group.start_soon(self._wake_on, self._holdings.cell)
            while True:
                self._wake = anyio.Event()
                pause = await self._round(group)
                with anyio.move_on_after(pause):
                    await self._wake.wait()

    async def _wake_on(self, cell: Cell[Any]) -> None:
        async for _ in cell.values():
            self._wake.set()

    async def _round(self, group: TaskGroup) -> float:
        """One look and the steps that follow from it; how long to wait, in seconds, unless woken."""
        desired, snapshot = self._desired.value, self._inventory.value
        if snapshot.problem and not snapshot.gpus:
            self._tell(Phase.SWITCHING, desired, f"waiting for the GPUs: {snapshot.problem}", {})
            return IDLE_SECONDS
        holders = await self._holders(fresh=self.when_busy == "refuse")
        if holders is None:
            self._tell(Phase.SWITCHING, desired, f"waiting for the kubelet: {self._holdings.problem}", {})
            return HOLDINGS_RETRY_SECONDS
        targets, problem = self._targets(desired, snapshot)
        self._take_over(snapshot, holders, targets)
        if problem:
            self._tell(Phase.BLOCKED, desired, problem, self.assignment.value.gpus)
            return IDLE_SECONDS
        await self._drop_unwanted(targets)
        differing = self._differing(targets)
        if self.when_busy == "refuse" and (busy := self._busy(differing, holders)):
            pods = ", ".join(sorted({pod for names in busy.values() for pod in names}))
            text = f"whenBusy is refuse and GPUs are in use by {pods}; end these pods or set whenBusy: drain"
            self._tell(Phase.BLOCKED, desired, text, targets, busy)
            return DRAIN_LOOK_SECONDS
        if not differing:
            return self._told(desired, targets, {})
        await self._stop_selling(differing)
        holders = await self._holders(fresh=True)
        if holders is None:
            return HOLDINGS_RETRY_SECONDS
        waiting = await self._advance(differing, targets, holders, group)
        await self._sell_what_is_ready(targets)
        return self._told(desired, targets, waiting)

    async def _holders(self, fresh: bool) -> dict[str, list[Holder]] | None:
        pods = self._holdings.cell.value
        if fresh or pods is None:
            pods = await self._holdings.refresh()
        return None if pods is None else holders_by_gpu(pods)

    def _targets(self, desired: Desired, snapshot: Snapshot) -> tuple[Mapping[str, GpuMode], str | None]:
        """What each GPU shall be sold as, or why nothing may change."""
        if not desired.entries:
            return {}, desired.problem or "nothing is wanted"
        try:
            return plan(snapshot, desired, self._gate), None
        except LayoutError as error:
            return {}, f"layout {desired.name}: {error}"

    def _differing(self, targets: Mapping[str, GpuMode]) -> list[str]:
        """GPUs that are not as wanted, but for those whose set-up failed and waits for its next try."""
        now = anyio.current_time()
        return [
            uuid
            for uuid, wanted in targets.items()
            if not _same(self._of(uuid), wanted)
            and not (
                (failed := self._set_ups.get(uuid))
                and failed.problem
                and failed.retry_at > now
                and failed.wanted == wanted
            )
        ]

    def _of(self, uuid: str) -> GpuMode:
        return self.assignment.value.of(uuid)

    def _take_over(
        self, snapshot: Snapshot, holders: Mapping[str, list[Holder]], targets: Mapping[str, GpuMode]
    ) -> None:
        """GPUs seen for the first time: whoever holds units of one tells the mode that it is in."""
        new: dict[str, GpuMode] = {}
        for state in snapshot.gpus:
            if state.uuid in self.assignment.value.gpus:
                continue
            held = holders.get(state.uuid)
            new[state.uuid] = _taken_over(held, targets.get(state.uuid, OFF)) if held else OFF
        if new:
            self._publish(new)

    def _publish(self, changes: Mapping[str, GpuMode]) -> None:
        """Put changes of some GPUs in force and bring all lists up to date in the same breath."""
        before = self.assignment.value
        for uuid, mode in changes.items():
            if mode != before.of(uuid):
                log.info(
                    "gpu_mode",
                    gpu=uuid,
                    mode=mode.mode.value,
                    selling=mode.selling,
                    reason=mode.reason or None,
                )
            if mode.mode is not Mode.OFF:
                self._resources.enable(mode.mode)
                self.switches += mode.mode is not before.of(uuid).mode
        self.assignment.publish(Assignment(MappingProxyType({**before.gpus, **changes})))
        self._resources.refresh()

    def _busy(self, differing: list[str], holders: Mapping[str, list[Holder]]) -> dict[str, tuple[str, ...]]:
        return {uuid: _pods(holders[uuid]) for uuid in differing if holders.get(uuid)}

    async def _stop_selling(self, differing: list[str]) -> None:
        stopping = {
            uuid: replace(mode, selling=False, leaving=True, reason="the GPU is changing its mode")
            for uuid in differing
            if (mode := self._of(uuid)).mode is not Mode.OFF and mode.selling
        }
        if not stopping:
            return
        if self._announcer:
            ahead = Assignment(MappingProxyType({**self.assignment.value.gpus, **stopping}))
            await self._announcer.shrink(ahead)
        self._publish(stopping)
        with anyio.move_on_after(DELIVER_SECONDS):
            await self._resources.delivered()
        if self._announcer:
            self._announcer.settled()

    async def _advance(
        self,
        differing: list[str],
        targets: Mapping[str, GpuMode],
        holders: Mapping[str, list[Holder]],
        group: TaskGroup,
    ) -> dict[str, tuple[str, ...]]:
        """Tear down and set up every GPU that nobody holds any more; answers who is waited for."""
        granted = {parse(text).gpu for text in self._resources.granted_lately()}
        gpus = {state.uuid: state.gpu for state in self._inventory.value.gpus}
        waiting: dict[str, tuple[str, ...]] = {}
        for uuid in differing:
            active, wanted = self._of(uuid), targets[uuid]
            wanted_back = _same(replace(active, selling=True), wanted)
            if active.mode is not Mode.OFF and not wanted_back:
                if holders.get(uuid) or uuid in granted:
                    waiting[uuid] = _pods(holders.get(uuid, [])) or ("a pod that is being admitted",)
                    if active.leaving and uuid not in granted:
                        self._publish({uuid: replace(active, leaving=False)})
                    continue
                if backend := self._backends.get(active.mode):
                    await backend.tear_down(gpus[uuid])
                self._publish({uuid: replace(OFF, reason=wanted.reason or "between two modes")})
            if wanted.mode is Mode.OFF:
                self._publish({uuid: wanted})
            else:
                self._begin_set_up(gpus[uuid], wanted, OFF if wanted_back else active, group)
        return waiting

    def _begin_set_up(self, gpu: Gpu, wanted: GpuMode, previous: GpuMode, group: TaskGroup) -> None:
        """Set a mode up in a task of its own. One that is under way ends first, whatever is wanted now."""
        known = self._set_ups.get(gpu.uuid)
        if known and (known.running or (known.ready and known.wanted == wanted)):
            return
        backend = self._backends.get(wanted.mode)
        set_up = _SetUp(wanted, previous, running=backend is not None)
        if known and known.wanted == wanted:
            set_up.backoff = known.backoff
        self._set_ups[gpu.uuid] = set_up
        if backend is not None:
            group.start_soon(self._set_up, gpu, set_up, backend)

    async def _set_up(self, gpu: Gpu, mine: _SetUp, backend: Backend) -> None:
        try:
            await backend.set_up(gpu)
        except SetUpFailed as error:
            mine.problem = str(error)
            mine.retry_at = anyio.current_time() + mine.backoff.next()
            log.error("mode_set_up_failed", gpu=gpu.uuid, mode=mine.wanted.mode.value, problem=mine.problem)
            await self._go_back(gpu, mine)
        mine.running = False
        self._wake.set()

    async def _drop_unwanted(self, targets: Mapping[str, GpuMode]) -> None:
        """Tear down what was set up for a wish that has changed meanwhile."""
        gpus = {state.uuid: state.gpu for state in self._inventory.value.gpus}
        for uuid, done in tuple(self._set_ups.items()):
            if done.ready and (uuid not in targets or targets[uuid].mode is not done.wanted.mode):
                del self._set_ups[uuid]
                if (backend := self._backends.get(done.wanted.mode)) and uuid in gpus:
                    await backend.tear_down(gpus[uuid])

    async def _go_back(self, gpu: Gpu, failed: _SetUp) -> None:
        """After a failed set-up the GPU is sold as before rather than not at all."""
        previous = replace(failed.previous, selling=True, reason="")
        if previous.mode is Mode.OFF:
            self._publish({gpu.uuid: replace(OFF, reason=failed.problem)})
            return
        try:
            if backend := self._backends.get(previous.mode):
                await backend.set_up(gpu)
        except SetUpFailed as error:
            self._publish({gpu.uuid: replace(OFF, reason=f"{failed.problem}; and back again: {error}")})
        else:
            self._publish({gpu.uuid: previous})

    async def _sell_what_is_ready(self, targets: Mapping[str, GpuMode]) -> None:
        """Step 5: everything that is ready and wanted is sold, all in one publication."""
        ready = {
            uuid: targets[uuid]
            for uuid, done in self._set_ups.items()
            if done.ready and uuid in targets and done.wanted == targets[uuid]
        }
        if ready:
            # What left the old mode's list a moment ago must be gone there before it stands in another.
            with anyio.move_on_after(DELIVER_SECONDS):
                await self._resources.delivered()
            self._publish(ready)
            for uuid in ready:
                del self._set_ups[uuid]

    def _told(
        self, desired: Desired, targets: Mapping[str, GpuMode], waiting: Mapping[str, tuple[str, ...]]
    ) -> float:
        problems = {uuid: one.problem for uuid, one in self._set_ups.items() if one.problem}
        if all(_same(self._of(uuid), wanted) for uuid, wanted in targets.items()):
            self._set_ups = {uuid: one for uuid, one in self._set_ups.items() if one.running}
            phase = Phase.BLOCKED if desired.problem else Phase.APPLIED
            self._tell(phase, desired, desired.problem or _summary(targets), targets)
            return IDLE_SECONDS
        if waiting:
            pods = sorted({pod for names in waiting.values() for pod in names})
            text = f"waiting for {len(pods)} pod(s) to end: {', '.join(pods[:5])}"
            self._tell(Phase.SWITCHING, desired, text, targets, waiting, problems)
            return DRAIN_LOOK_SECONDS
        if problems:
            self._tell(Phase.FAILED, desired, next(iter(problems.values())), targets, {}, problems)
            soonest = min(one.retry_at for one in self._set_ups.values() if one.problem)
            return max(0.05, soonest - anyio.current_time())
        self._tell(Phase.SWITCHING, desired, "setting up", targets)
        return DRAIN_LOOK_SECONDS

    def _tell(
        self,
        phase: Phase,
        desired: Desired,
        message: str,
        targets: Mapping[str, GpuMode],
        waiting: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        problems: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        before = self.state.value
        state = SwitchState(
            phase,
            desired.name,
            message,
            tuple(
                GpuSwitch(
                    gpu.gpu.index,
                    gpu.uuid,
                    self._of(gpu.uuid),
                    targets.get(gpu.uuid, self._of(gpu.uuid)),
                    waiting.get(gpu.uuid, ()),
                    problems.get(gpu.uuid, ""),
                )
                for gpu in self._inventory.value.gpus
            ),
            desired.name if phase is Phase.APPLIED else before.applied,
        )
        if state == before:
            return
        self.state.publish(state)
        if (state.phase, state.message, state.desired) != (before.phase, before.message, before.desired):
            level = log.info if phase in (Phase.APPLIED, Phase.SWITCHING) else log.warning
            level("mode_state", state=phase.value, desired=desired.name, message=message)


def _same(active: GpuMode, wanted: GpuMode) -> bool:
    if wanted.mode is Mode.OFF:
        return active.mode is Mode.OFF and active.reason == wanted.reason
    return (active.mode, active.replicas, active.selling) == (wanted.mode, wanted.replicas, wanted.selling)


def _taken_over(held: list[Holder], wanted: GpuMode) -> GpuMode:
    """The mode that a GPU must be in, since pods got units of it that way before this process began."""
    mode, sliced = held[0].mode, held[0].replica
    if wanted.mode is mode and (wanted.replicas > 1) is sliced:
        return replace(wanted, selling=False, reason="taken over from before")
    # How many replicas there were only matters to a list; those that are held must be on it.
    numbers = [parse(text).number for holder in held for text in holder.holding.ids if holder.replica]
    return GpuMode(mode, selling=False, reason="taken over from before", replicas=max(numbers, default=0) + 1)


def _pods(holders: list[Holder]) -> tuple[str, ...]:
    return tuple(sorted({holder.pod for holder in holders}))


def _summary(targets: Mapping[str, GpuMode]) -> str:
    counts: dict[str, int] = {}
    for wanted in targets.values():
        sliced = f" in {wanted.replicas} slices" if wanted.replicas > 1 else ""
        counts[wanted.mode.value + sliced] = counts.get(wanted.mode.value + sliced, 0) + 1
    return ", ".join(f"{count} GPU(s) {mode}" for mode, count in sorted(counts.items())) or "no GPU"
