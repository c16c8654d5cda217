"""Keeps capacity and allocatable in node.status true to the lists, and the scheduler away while these change.

The kubelet copies device lists into node.status every 10 s by default. Until then pods wait for room
that is there, or are bound to room that is gone and die at admission. So capacity and allocatable of our
own resources are patched, and in one order only: a list changes, the kubelet has taken it in, the figures
are patched. Never the other way round: a tick of the kubelet (1.36, `kubelet_node_status.go`) writes where
its device manager differs from the node as it saw it before the tick. While our figures are never ahead of
its lists, a tick that read the old list finds nothing to write, and cannot undo a patch that came later.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import anyio
import structlog

from agent.cluster.api import ApiError
from agent.cluster.node import Amounts, OwnNode
from agent.kit.tasks import Backoff, Cell
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.modes import Assignment

# Keeps the scheduler from sending pods to this node while its offer changes: by a taint.
#
# Figures in node.status cannot do that. The kubelet goes by them, too, so that a pod which was bound a moment
# before they shrank is refused although its devices are there; and a tick of the kubelet may write them back.
# A taint NoSchedule stops the scheduler alone: kubelet 1.36 (`lifecycle/predicate.go`, generalFilter) looks
# at NoExecute only.
#
# One task writes it, one write at a time, until the node's taint is as wanted. To want it, and to want it no
# longer, are assignments: there is no await at which a failure or a cancellation could leave it behind.

log = structlog.get_logger()

TAINT = "gpu-node-agent.io/switching"
EFFECT = "NoSchedule"
WRITE_SECONDS = 3.5  # for one write, its answer included
# How long the scheduler may still bind after it could have seen the taint; on a busy machine twice as long as
# it took until we saw it ourselves.
BINDING_SECONDS = 0.1
LONGEST_BINDING_SECONDS = 1.0
SEEN_SECONDS = 1.0  # a watch that is mute shall not hold up a switch


class Hold:
    """Somebody who wants the taint to stand."""

    def __init__(self, until: float) -> None:
        self.until = until  # on the loop's clock: no write that sets it is begun after this


class SchedulingTaint:
    """The taint stands while somebody holds it, and goes when nobody does."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._holds: list[Hold] = []
        self._left_alone = False
        self._uncertain = False  # a write was begun, and its end is not known
        self._written = False  # the last write; counts while the node is not seen
        self._turns = Cell(None)  # published whenever any of these or the node changed
        self._one_writer = anyio.Lock()
        self.patches = 0
        self.failures = 0
        self.problem: str | None = None  # why the taint could not be written last

    @contextmanager
    def held(self, until: float = math.inf) -> Iterator[Hold]:
        """The taint is wanted inside. No write that sets it is begun after `until`, on the loop's clock."""
        hold = Hold(until)
        self._holds.append(hold)
        self._turn()
        try:
            yield hold
        finally:
            self.drop(hold)

    def drop(self, hold: Hold) -> None:
        """End a hold early; again is nothing."""
        if hold in self._holds:
            self._holds.remove(hold)
        self._turn()

    def drop_all(self) -> None:
        """End all holds, and leave nothing alone: the taint goes, no matter who set it."""
        self._holds.clear()
        self._left_alone = False
        self._turn()

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """A taint that stands already is not removed inside, but by `drop_all`."""
        self._left_alone = True
        try:
            yield
        finally:
            self._left_alone = False
            self._turn()

    def stands(self) -> bool | None:
        """Whether the node carries the taint; None: a write is under way, or its end is not known."""
        if self._uncertain:
            return None
        seen = self._node.tainted(TAINT)
        return self._written if seen is None else seen

    async def effective(self, within: float) -> bool:
        """Return once the scheduler binds no more pods; False: the taint does not stand `within` seconds."""
        began = anyio.current_time()
        with anyio.move_on_after(within):
            await self._until(lambda: self.stands() is True)
        if not self.stands():
            return False
        with anyio.move_on_after(SEEN_SECONDS):
            await self._node.seen()
        pause = max(BINDING_SECONDS, 2 * (anyio.current_time() - began))
        await anyio.sleep(min(pause, LONGEST_BINDING_SECONDS))
        return True

    async def gone(self) -> None:
        """Return once the taint does not stand, or is wanted; bound it with a cancel scope."""
        await self._until(lambda: self.stands() is False or self._wanted() is not False)

    async def run(self) -> None:
        """Write the taint until it is as wanted, for ever. Only one run at a time does anything."""
        async with self._one_writer, anyio.create_task_group() as group:
            group.start_soon(self._follow_node)
            pauses, tried = Backoff(first=0.2, longest=30.0, jitter=0.5), None
            while True:
                seen, wanted = self._turns.version, self._wanted()
                if wanted is None or wanted is self.stands():
                    await self._turns.wait_change(seen)
                    continue
                if wanted is tried:  # it failed, or somebody undid it: they may do so again
                    with anyio.move_on_after(pauses.next()):
                        await self._while_wanted(wanted)
                        continue
                else:
                    pauses.reset()
                    tried = wanted
                if self._wanted() is wanted is not self.stands():
                    await self._write(present=wanted)

    def _wanted(self) -> bool | None:
        """Whether the taint shall stand; None: it may be as it is."""
        if self._holds:
            now = anyio.current_time()
            return True if any(hold.until >= now for hold in self._holds) else None
        return None if self._left_alone else False

    async def _write(self, *, present: bool) -> None:
        self._uncertain = True  # stays so when this is cancelled
        try:
            with anyio.fail_after(WRITE_SECONDS):
                await self._node.write_taint(TAINT, EFFECT, present=present)
        except (ApiError, TimeoutError) as error:
            problem = str(error) or f"the API server did not answer within {WRITE_SECONDS:g} s"
            if self.problem is None:
                log.warning("scheduling_not_held" if present else "scheduling_not_released", problem=problem)
            self.problem = problem
            self.failures += 1
            self._uncertain = not (isinstance(error, ApiError) and error.refused)
        else:
            self._uncertain, self._written, self.problem = False, present, None
            self.patches += 1
        self._turn()

    def _turn(self) -> None:
        self._turns.publish(None)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._turns.wait_change(self._turns.version)

    async def _while_wanted(self, wanted: bool) -> None:
        await self._until(lambda: self._wanted() is not wanted)

    async def _follow_node(self) -> None:
        async for _ in self._node.changes.values():
            self._turn()


# Keeps capacity and allocatable in node.status true to the lists, ahead of the kubelet's next tick.

PATCH_SPACING_SECONDS = 1.0
# A switch takes two patches, for the old and the new resources: neither waits for the other's second to pass.
PATCH_BURST = 3
LONGEST_RETRY_SECONDS = 10.0  # the kubelet's tick has come by then
GATHER_SECONDS = 0.005  # several lists change in one breath
ARRIVE_SECONDS = 10.0  # for a busy kubelet
# Where the kubelet cannot be asked: its time to read a list of thousands and to write its checkpoint.
UNASKED_SECONDS = 0.1
ASK_SECONDS = 0.02  # until the kubelet is asked again whether it has; its socket takes 100 calls a second
LONGEST_PAUSE_SECONDS = 0.5
# Between two tries to be registered again: a kubelet that is only slow must not be held up by them.
AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 60.0, 600.0
GONE_SECONDS = 5.0  # how long more is held back for a taint that is to go


@dataclass(frozen=True)
class Offer:
    """Lists as offered to the kubelet, and as it has taken them in."""

    assignment: Cell[Assignment]
    # Capacity and allocatable of each registered resource under an assignment.
    amounts: Callable[[Assignment], Amounts]
    # Returns when all lists as they are now have left for the kubelet, or cannot (bounded).
    delivered: Callable[[], Awaitable[None]]
    # How many healthy devices the kubelet knows of each resource. Raises PodResourcesUnavailable.
    allocatable: Callable[[], Awaitable[Mapping[str, int]]]
    # Have the kubelet register these resources again.
    register_again: Callable[[frozenset[str]], None]

    def now(self) -> Amounts:
        """Under the assignment in force."""
        return self.amounts(self.assignment.value)

    async def taken_in(self) -> Mapping[str, int] | None:
        """The devices that the kubelet knows; None: it has no such call. Raises PodResourcesUnavailable."""
        try:
            return await self.allocatable()
        except PodResourcesUnavailable as error:
            if error.unsupported:
                return None
            raise

    async def arrived(self, within: float) -> bool:
        """Return once the kubelet has taken in all lists as they are then: of a pair, both halves.

        False: not `within` seconds. A kubelet that does not answer may be reading thousands of IDs.
        """
        pause = ASK_SECONDS
        with anyio.move_on_after(within):
            await self.delivered()
            while True:
                with suppress(PodResourcesUnavailable):
                    known = await self.taken_in()
                    if known is None:
                        await anyio.sleep(UNASKED_SECONDS)
                        return True
                    if all(known.get(name, 0) == left for name, (_, left) in self.now().items()):
                        return True
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return False


class Capacity:
    """Patches what differs; stands still while something is being withdrawn (`agent.node.withdrawal`)."""

    def __init__(self, node: OwnNode, offer: Offer, taint: SchedulingTaint) -> None:
        self._node = node
        self._offer = offer
        self._taint = taint
        self._withdrawals = 0
        self._wake = Cell(None)
        self._again = Backoff(first=AGAIN_SECONDS, longest=LONGEST_AGAIN_SECONDS)
        self._again_from = 0.0  # not before, in seconds of the loop's clock
        self.patches = 0
        self.failures = 0
        self.problem: str | None = None  # why the node's status could not be patched last

    def wake(self) -> None:
        """A list or the node changed: compare."""
        self._wake.publish(None)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside, nothing is patched but by `patch`."""
        self._withdrawals += 1
        try:
            yield
        finally:
            self._withdrawals -= 1
            self.wake()

    async def run(self) -> None:
        """Compare and patch for ever: at most once a second, but for a short burst."""
        allowed, refilled = float(PATCH_BURST), anyio.current_time()
        retry = Backoff(first=PATCH_SPACING_SECONDS, longest=LONGEST_RETRY_SECONDS)
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_node)
            while True:
                seen, now = self._wake.version, anyio.current_time()
                allowed = min(PATCH_BURST, allowed + (now - refilled) / PATCH_SPACING_SECONDS)
                refilled = now
                if allowed < 1:
                    await anyio.sleep((1 - allowed) * PATCH_SPACING_SECONDS)
                elif (done := await self._compare()) is True:
                    allowed -= 1
                    retry.reset()
                elif done is False:
                    await anyio.sleep(retry.next())
                else:
                    with anyio.move_on_after(5 * PATCH_SPACING_SECONDS):
                        await self._wake.wait_change(seen)
                    await anyio.sleep(GATHER_SECONDS)

    async def _compare(self) -> bool | None:
        """Patch what differs; whether it was patched, None: there is nothing to patch now."""
        more, less = self._differing()
        if less and not self._withdrawals:
            return await self.patch(less)
        if not more:
            return None
        # A pod that is tried under the taint goes into the scheduler's back-off.
        with anyio.move_on_after(GONE_SECONDS):
            await self._taint.gone()
        # More is never offered than the kubelet says that it knows of.
        arrived = await self._offer.arrived(ARRIVE_SECONDS)
        if self._withdrawals:
            return None
        if not arrived:
            await self._register_lost()
            return None
        self._again.reset()
        more, _ = self._differing()
        return await self.patch(more) if more else None

    async def _register_lost(self) -> None:
        """Have resources registered again of which the kubelet knows no device, though it listens to them.

        It takes a resource for gone when an agent that had its name before ends its stream, also where
        another one has registered the name since (kubelet 1.36, `devicemanager.PluginDisconnected`).
        """
        at = anyio.current_time()
        if at < self._again_from:
            return
        with suppress(PodResourcesUnavailable):
            known = await self._offer.taken_in()
            offered = {name for name, (_, left) in self._offer.now().items() if left}
            lost = offered - {name for name, count in known.items() if count} if known is not None else None
            if lost:
                self._again_from = at + self._again.next()
                log.warning("kubelet_lost_resources", resources=sorted(lost))
                self._offer.register_again(frozenset(lost))

    def less(self) -> Amounts:
        """The amounts to take off node.status; all that is offered, where the node is not known."""
        wanted = self._offer.now()
        known = self._node.amounts(frozenset(wanted))
        return wanted if known is None else _differing(wanted, known)[1]

    def _differing(self) -> tuple[Amounts, Amounts]:
        wanted = self._offer.now()
        known = self._node.amounts(frozenset(wanted))
        return ({}, {}) if known is None else _differing(wanted, known)

    async def patch(self, amounts: Amounts) -> bool:
        """Write these amounts; whether it could be done."""
        try:
            await self._node.write_amounts(amounts)
        except ApiError as error:
            self.failures += 1
            if self.problem is None:
                log.warning("node_status_not_patched", problem=str(error))
            self.problem = str(error)
            return False
        self.problem = None
        self.patches += 1
        return True

    async def _follow_node(self) -> None:
        async for _ in self._node.changes.values():
            self.wake()


def _differing(wanted: Amounts, known: Amounts) -> tuple[Amounts, Amounts]:
    """Resources whose amounts in the node's status are wrong: those to offer more of, and the others."""
    differing = {name: amounts for name, amounts in wanted.items() if known[name] != amounts}
    more = {name: amounts for name, amounts in differing.items() if amounts[1] > known[name][1]}
    return more, {name: amounts for name, amounts in differing.items() if name not in more}
