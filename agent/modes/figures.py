"""Tells the scheduler at once what the kubelet will tell it at its next tick.

The kubelet copies device lists into node.status every 10 s by default. Until then pods wait for room
that is there, or are bound to room that is gone and die at admission. So capacity and allocatable of our
own resources are patched: after a list that grew, and before one that shrinks. A tick that began before
a list writes the old figure back; whatever the status says is therefore compared and patched again.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import anyio
import structlog

from agent.kit.cell import Cell
from agent.model.modes import Assignment

log = structlog.get_logger()

Figures = Mapping[str, tuple[int, int]]  # resource -> (capacity, allocatable)

PATCH_SPACING_SECONDS = 1.0
# A switch takes two patches, for what goes and for what comes: neither waits for the other's second to pass.
PATCH_BURST = 3
GATHER_SECONDS = 0.005  # several lists change in one breath
SECOND_LOOK_SECONDS = 0.15  # a tick of the kubelet that began before the lists had changed has ended then
SHRINK_SECONDS = 20.0  # how long a shrink is held up for pods that are caught between, at most
# What the scheduler may still bind after it could have seen the patch; on a busy machine twice as long as it
# took until we saw it ourselves.
BINDING_SECONDS = 0.1
TAKEN_IN_SECONDS = 0.1  # what the kubelet needs to read a list of thousands and to write its checkpoint
SEEN_SECONDS = 2.0  # a watch that is mute shall not hold up a switch


# The longest that kubelets with their default of 10 s wait between two ticks: they add up to 4 %.
TICK_SECONDS = 10.5


class FiguresFailed(Exception):
    """The node's status could not be patched; the text says why."""


class NodeStatusPort(Protocol):
    """The own node's status."""

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""

    def figures(self, resources: frozenset[str]) -> Figures | None:
        """Capacity and allocatable as the node's status has them (0 where absent); None: not known now."""

    async def patch_resources(self, figures: Figures) -> None:
        """Write them. Raises FiguresFailed."""


async def _no_demand(_: frozenset[str]) -> bool:
    return False


async def _nothing() -> None:
    return


class NodeFigures:
    """Keeps node.status true to our lists; an `Announcer` for the switcher."""

    def __init__(
        self,
        node: NodeStatusPort,
        lists: Callable[[Assignment], Figures],
        assignment: Cell[Assignment],
        caught: Callable[[], Awaitable[bool]],
        demand: Callable[[frozenset[str]], Awaitable[bool]] = _no_demand,
        delivered: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """`caught`: whether a pod is bound here and has not got its devices yet. `demand`: whether pods that
        are not bound anywhere yet ask for one of these resources. `delivered`: returns when all lists have
        left for the kubelet.
        """
        self._node = node
        self._lists = lists
        self._assignment = assignment
        self._caught = caught
        self._demand = demand
        self._delivered = delivered
        self._probed: str | None = None  # a resource whose figures are wrong on purpose
        self._ahead: Assignment | None = None
        self._closing = False
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
                elif self._grows() and not await self._arrived():
                    continue
                elif await self._patch_differences():
                    allowed -= 1
                else:
                    with anyio.move_on_after(5 * PATCH_SPACING_SECONDS):
                        await self._wake.wait()
                    await anyio.sleep(GATHER_SECONDS)

    def _grows(self) -> bool:
        """Whether more of something is to be offered than the node's status tells."""
        wanted = self._wanted()
        found = self._node.figures(frozenset(wanted)) or {}
        return any(left > found.get(name, (0, 0))[1] for name, (_, left) in wanted.items())

    async def _arrived(self) -> bool:
        """Wait until the kubelet has taken in the lists: all of a pair's, or a pod would find but one half.

        False: they have changed meanwhile.
        """
        wanted = self._wanted()
        with anyio.move_on_after(SEEN_SECONDS):
            await self._delivered()
        await anyio.sleep(TAKEN_IN_SECONDS)
        return self._wanted() == wanted

    async def shrink(self, assignment: Assignment) -> None:
        """Announce the figures of a smaller assignment; return when no bound pod lacks its devices."""
        before = self._lists(self._assignment.value)
        after = self._lists(assignment)
        fewer = frozenset(name for name, (_, left) in after.items() if left < before.get(name, (0, 0))[1])
        began = anyio.current_time()
        waited = False
        with anyio.move_on_after(SHRINK_SECONDS) as deadline:
            if fewer and (waited := await self._demand(fewer)):
                await self._tick(min(fewer))
            self._ahead = assignment
            if not await self._seen_patch():
                return
            while await self._caught():
                await anyio.sleep(BINDING_SECONDS / 2)
                await self._patch_differences()
        log.info(
            "shrink_announced",
            resources=sorted(fewer),
            waited_for_tick=waited,
            seconds=round(anyio.current_time() - began, 3),
            late=deadline.cancelled_caught or None,
        )

    def settled(self) -> None:
        """The lists carry what was announced: they are the measure again."""
        self._ahead = None
        self.wake()

    async def close(self, ending: Callable[[], Awaitable[None]] | None = None) -> None:
        """Announce that nothing is sold here any more, for an agent that is about to stop.

        `ending` makes the lists say so, once no pod is caught between. Bound it with a cancel scope.
        """
        self._closing = True
        if await self._seen_patch():
            while await self._caught():
                await anyio.sleep(BINDING_SECONDS / 2)
        if ending:
            await ending()
            await anyio.sleep(SECOND_LOOK_SECONDS)
            await self._patch_differences()

    async def _tick(self, resource: str) -> None:
        """Wait until the kubelet has written its figures: its next tick is far away then.

        One that had read the old lists and wrote after they had changed would have pods that wait bound to
        units that are gone. A tick is only seen where it finds something to mend, so that the capacity of a
        resource is patched one too high, which nobody counts with: scheduler and kubelet go by allocatable.
        """
        found = (self._node.figures(frozenset({resource})) or {}).get(resource)
        if found is None:
            return
        self._probed = resource
        try:
            await self._node.patch_resources({resource: (found[0] + 1, found[1])})
            self.patches += 1
            seen = False
            with anyio.move_on_after(TICK_SECONDS):
                while True:
                    now = (self._node.figures(frozenset({resource})) or {}).get(resource)
                    probing = now is not None and now[0] == found[0] + 1
                    if seen and not probing:
                        break
                    seen = seen or probing
                    await self._changed()
        except FiguresFailed as error:
            self.problem = str(error)
        finally:
            self._probed = None

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

    async def _patch_differences(self, *, blindly: bool = False) -> bool:
        """Patch what differs; answers whether a patch was made. `blindly`: a node that is not seen, too."""
        wanted = self._wanted()
        found = self._node.figures(frozenset(wanted))
        if found is None:
            if not blindly:
                return False
            found = {}
        differing = {name: figures for name, figures in wanted.items() if found.get(name) != figures}
        differing.pop(self._probed or "", None)
        if not differing:
            return False
        try:
            await self._node.patch_resources(differing)
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
