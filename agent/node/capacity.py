"""Tells the scheduler at once what the kubelet will tell it at its next tick.

The kubelet copies device lists into node.status every 10 s by default. Until then pods wait for room
that is there, or are bound to room that is gone and die at admission. So capacity and allocatable of our
own resources are patched, and in one order only: a list changes, the kubelet has taken it in, the figures
are patched. Never the other way round: a tick of the kubelet (1.36, `kubelet_node_status.go`) writes where
its device manager differs from the node as it saw it before the tick. While our figures are never ahead of
its lists, a tick that read the old list finds nothing to write, and cannot undo a patch that came later.

Between a list that shrinks and its patch nothing may be bound by the old figures: a taint sees to that
(`agent.node.taint`). Where it cannot be set, the smaller figures are patched before the list: the next best.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import anyio
import structlog

from agent.kit.cell import Cell
from agent.model.modes import Assignment
from agent.node.taint import BINDING_SECONDS, SEEN_SECONDS, SchedulingHold

log = structlog.get_logger()

Figures = Mapping[str, tuple[int, int]]  # resource -> (capacity, allocatable)

PATCH_SPACING_SECONDS = 1.0
# A switch takes two patches, for what goes and for what comes: neither waits for the other's second to pass.
PATCH_BURST = 3
GATHER_SECONDS = 0.005  # several lists change in one breath
SECOND_LOOK_SECONDS = 0.15  # a tick of the kubelet that began before the lists had changed has ended then
SHRINK_SECONDS = 20.0  # how long a shrink is held up for one more pod that is caught between, at most
HOLD_SECONDS = 2 * SHRINK_SECONDS  # how long scheduling is held at all
LOOK_SECONDS = 0.05  # how often they are looked for
# Where the kubelet cannot be asked: what it needs to read a list of thousands and to write its checkpoint.
TAKEN_IN_SECONDS = 0.1
CLOSING_ARRIVE_SECONDS = 2.0  # of an agent that is about to stop
ARRIVE_SECONDS = 10.0  # what a busy kubelet is given
ASK_SECONDS = 0.02  # until the kubelet is asked again whether it has; its socket takes 100 calls a second
LONGEST_PAUSE_SECONDS = 0.5
RELEASE_SECONDS = 1.0  # of an agent that is about to stop
INHERITED_SECONDS = 10.0  # an agent before us left its taint, its figures: until there are lists to go by


class FiguresFailed(Exception):
    """The node's status could not be patched; the text says why."""


class KubeletMute(Exception):
    """The kubelet does not say now what it knows of."""


class NodeStatusPort(Protocol):
    """The own node's status."""

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""

    def figures(self, resources: frozenset[str]) -> Figures | None:
        """Capacity and allocatable as the node's status has them (0 where absent); None: not known now."""

    async def patch_resources(self, figures: Figures) -> None:
        """Write them. Raises FiguresFailed."""


async def _nothing() -> None:
    return


async def _not_known() -> Mapping[str, int] | None:
    return None


class NodeFigures:
    """Keeps node.status true to our lists; an `Announcer` for the switcher."""

    def __init__(
        self,
        node: NodeStatusPort,
        lists: Callable[[Assignment], Figures],
        assignment: Cell[Assignment],
        caught: Callable[[], Awaitable[AbstractSet[str]]],
        hold: SchedulingHold,
        delivered: Callable[[], Awaitable[None]] = _nothing,
        taken_in: Callable[[], Awaitable[Mapping[str, int] | None]] = _not_known,
        inherited: AbstractSet[str] = frozenset(),
    ) -> None:
        """`caught`: pods that are bound here and have not got their devices yet. `delivered`: returns when
        all lists have left for the kubelet. `taken_in`: how many healthy devices the kubelet knows of each
        resource; None: it has no such call. Raises KubeletMute. `inherited`: resources that an agent before
        this one may have offered.
        """
        self._node = node
        self._lists = lists
        self._assignment = assignment
        self._caught = caught
        self.hold = hold
        self._delivered = delivered
        self._taken_in = taken_in
        self._inherited = frozenset(inherited)
        self._late = False  # the kubelet has not taken in the lists for long
        self._settled = False  # the lists have shrunk, for which scheduling is held
        self._held_since = 0.0
        self._ahead: Assignment | None = None
        self._stopping = False
        self._closing = False  # nothing is offered any more
        self._began = anyio.current_time()
        self._wake = anyio.Event()
        self.problem: str | None = None  # why the node's status could not be patched last
        self.patches = 0
        self.failures = 0

    def wake(self) -> None:
        """A list or the node changed: compare."""
        self._wake.set()

    async def run(self) -> None:
        """Compare and patch for ever: at most once a second, but for a short burst."""
        allowed, refilled = float(PATCH_BURST), anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_node)
            while True:
                self._wake = anyio.Event()
                now = anyio.current_time()
                allowed = min(PATCH_BURST, allowed + (now - refilled) / PATCH_SPACING_SECONDS)
                refilled = now
                if allowed < 1:
                    await anyio.sleep((1 - allowed) * PATCH_SPACING_SECONDS)
                elif await self._renounce():
                    allowed -= 1
                elif self._follows_lists() and not await self._arrived():
                    continue
                elif await self._patch_differences() or await self._let_go():
                    allowed -= 1
                else:
                    with anyio.move_on_after(5 * PATCH_SPACING_SECONDS):
                        await self._wake.wait()
                    await anyio.sleep(GATHER_SECONDS)

    def _follows_lists(self) -> bool:
        """Whether there is something to patch that the kubelet must have taken in first."""
        growing, shrinking = self._differing()
        return bool(growing) or (self.hold.wanted and bool(shrinking))

    async def _arrived(self) -> bool:
        """Wait until the kubelet has taken in the lists: all of a pair's, or a pod would find but one half.

        False: they have changed meanwhile.
        """
        wanted, pause = self._wanted(), ASK_SECONDS
        self._late = True
        with anyio.move_on_after(ARRIVE_SECONDS):
            await self._delivered()
            while self._wanted() == wanted:
                # One that does not answer may be reading thousands of IDs: more is offered when it says so.
                with contextlib.suppress(KubeletMute):
                    known = await self._taken_in()
                    if known is None:
                        await anyio.sleep(TAKEN_IN_SECONDS)
                    if known is None or all(known.get(name, 0) == left for name, (_, left) in wanted.items()):
                        self._late = False
                        break
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return self._wanted() == wanted

    async def _renounce(self) -> bool:
        """Take back what an agent before this one offered and the kubelet lost with it; whether it was done.

        One that was killed leaves its figures in node.status until the kubelet's next tick. Whatever is bound
        by them dies at admission, for this agent may sell something else, or not be registered yet.
        """
        self._inherited -= self._lists(self._assignment.value).keys()
        if anyio.current_time() - self._began > INHERITED_SECONDS:
            self._inherited = frozenset()  # the kubelet's tick has come by now
        found = self._node.figures(self._inherited) if self._inherited else {}
        if found is None:
            return False
        offered = {name: (capacity, 0) for name, (capacity, left) in found.items() if left > 0}
        try:
            known = await self._taken_in() if offered else None
        except KubeletMute:
            return False
        if known is None:
            self._inherited = frozenset()
            return False
        # What it knows of is somebody else's, or it has not heard of that agent's end yet.
        gone = {name: figures for name, figures in offered.items() if not known.get(name)}
        if not gone or not await self._patch(gone):
            return False
        log.info("stale_figures_taken_back", resources=sorted(gone))
        self._inherited -= gone.keys()
        return True

    async def _let_go(self) -> bool:
        """Let the scheduler send pods again once the node's status tells of nothing that is gone."""
        ours, now = self.hold.wanted, anyio.current_time()
        if ours and now - self._held_since > HOLD_SECONDS:
            self._settled = True  # whoever took it is gone
        if self._stopping or not (self._settled if ours else self.hold.present):
            return False
        wanted = self._wanted()
        found = self._node.figures(frozenset(wanted))
        if found is None or any(left < found[name][1] for name, (_, left) in wanted.items()):
            return False
        if not ours and (self._inherited or not wanted) and now - self._began < INHERITED_SECONDS:
            return False
        if await self.hold.release():
            return True
        await anyio.sleep(PATCH_SPACING_SECONDS)
        return False

    async def shrink(self, assignment: Assignment) -> None:
        """Have no more pods sent here; return when no bound pod lacks its devices.

        `settled` ends it, once the lists are those of the smaller assignment.
        """
        before = self._lists(self._assignment.value)
        after = self._lists(assignment)
        fewer = sorted(name for name, (_, left) in after.items() if left < before.get(name, (0, 0))[1])
        if not fewer:
            return
        began, held = anyio.current_time(), False
        self._settled, self._held_since = False, began
        with anyio.move_on_after(SHRINK_SECONDS) as deadline:
            held = await self.hold.take()
            if not held:
                self._ahead = assignment
                if not await self._seen_patch():
                    return
            await self._all_served(deadline)
        log.info(
            "shrink_announced",
            resources=fewer,
            held=held,
            seconds=round(anyio.current_time() - began, 3),
            late=deadline.cancelled_caught or None,
        )

    def settled(self) -> None:
        """The lists carry what was announced: they are the measure again."""
        self._ahead = None
        self._settled = True
        self.wake()

    async def close(self, ending: Callable[[], Awaitable[None]] | None = None) -> None:
        """Announce that nothing is sold here any more, for an agent that is about to stop.

        `ending` makes the lists say so, once no pod is caught between. Bound it with a cancel scope.
        """
        self._stopping = True
        try:
            held = await self.hold.take()
            if not held:
                self._closing = True
                await self._seen_patch()
            if held or not self.problem:
                await self._all_served()
            if ending:
                await ending()
                with anyio.move_on_after(CLOSING_ARRIVE_SECONDS if held else SECOND_LOOK_SECONDS):
                    await (self._arrived() if held else anyio.sleep_forever())
            self._closing = True
            await self._patch_differences(blindly=True)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(RELEASE_SECONDS):
                await self.hold.release()

    async def _all_served(self, deadline: anyio.CancelScope | None = None) -> None:
        """Wait until no pod is bound here that has not got its devices.

        `deadline` is for the first of them, then for the next: a kubelet that is slow gets through them all.
        """
        busy = True
        while busy:
            busy, before = False, frozenset[str]()
            asked = anyio.current_time()
            while caught := frozenset(await self._caught()):
                if before - caught and deadline:
                    self._held_since = anyio.current_time()
                    deadline.deadline = self._held_since + SHRINK_SECONDS
                busy, before = True, caught
                # A kubelet that answers slowly has pods to admit, and every question holds it up.
                await anyio.sleep(max(LOOK_SECONDS, 2 * (anyio.current_time() - asked)))
                asked = anyio.current_time()
                if self._ahead:
                    await self._patch_differences()
            if busy:
                # The scheduler was at work a moment ago.
                await anyio.sleep(BINDING_SECONDS)

    async def _seen_patch(self) -> bool:
        """Patch, and return once the scheduler has seen it, too; False: the node cannot be patched."""
        began = anyio.current_time()
        await self._patch_differences(blindly=True)
        if self.problem:
            return False
        with anyio.move_on_after(SEEN_SECONDS):
            while not self._agrees():
                await self._changed()
        await anyio.sleep(max(BINDING_SECONDS, 2 * (anyio.current_time() - began)))
        return True

    async def _changed(self) -> None:
        with anyio.move_on_after(0.2):
            await self._node.changes.wait_change(self._node.changes.version)

    async def _follow_node(self) -> None:
        async for _ in self._node.changes.values():
            self.wake()

    def _wanted(self) -> Figures:
        figures = self._lists(self._ahead or self._assignment.value)
        if self._closing:
            return {name: (capacity, 0) for name, (capacity, _) in figures.items()}
        return figures

    def _agrees(self) -> bool:
        wanted = self._wanted()
        return self._node.figures(frozenset(wanted)) == wanted

    def _differing(self, *, blindly: bool = False) -> tuple[Figures, Figures]:
        """What the node's status does not tell as it is: where more is to be offered, and the rest.

        `blindly`: everything of a node that is not seen.
        """
        wanted = self._wanted()
        found = self._node.figures(frozenset(wanted))
        if found is None:
            return {}, dict(wanted) if blindly else {}
        differing = {name: figures for name, figures in wanted.items() if found[name] != figures}
        growing = {name: figures for name, figures in differing.items() if figures[1] > found[name][1]}
        return growing, {name: figures for name, figures in differing.items() if name not in growing}

    async def _patch_differences(self, *, blindly: bool = False) -> bool:
        """Patch what differs; answers whether a patch was made. `blindly`: a node that is not seen, too.

        While scheduling is held, only what shrinks: pods that wait for more would be tried in vain, and then
        wait for their back-off. Nor does what grows while the kubelet says that it knows of something else.
        """
        growing, differing = self._differing(blindly=blindly)
        if not self.hold.wanted and not self._late:
            differing = {**growing, **differing}
        return bool(differing) and await self._patch(differing)

    async def _patch(self, figures: Figures) -> bool:
        try:
            await self._node.patch_resources(figures)
        except FiguresFailed as error:
            self.failures += 1
            if self.problem is None:
                log.warning("node_status_not_patched", problem=str(error))
            self.problem = str(error)
            await anyio.sleep(PATCH_SPACING_SECONDS)
            return False
        self.problem = None
        self.patches += 1
        return True
