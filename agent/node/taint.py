"""Keeps the scheduler from sending pods to this node while its offer changes: by a taint.

Figures in node.status cannot do that. The kubelet goes by them, too, so that a pod which was bound a moment
before they shrank is refused although its devices are there; and a tick of the kubelet may write them back.
A taint NoSchedule stops the scheduler alone: kubelet 1.36 (`lifecycle/predicate.go`, generalFilter) looks at
NoExecute only.

One task writes it, one write at a time, until the node's taint is as wanted. To want it, and to want it
no longer, are assignments: there is no await at which a failure or a cancellation could leave it behind.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import structlog

from agent.cluster.own_node import NodeNotWritten, OwnNode
from agent.kit.cell import Cell
from agent.kit.tasks import Backoff

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
        seen = self._node.tainted()
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
                await self._node.write_taint(present=present)
        except (NodeNotWritten, TimeoutError) as error:
            problem = str(error) or f"the API server did not answer within {WRITE_SECONDS:g} s"
            if self.problem is None:
                log.warning("scheduling_not_held" if present else "scheduling_not_released", problem=problem)
            self.problem = problem
            self.failures += 1
            self._uncertain = not (isinstance(error, NodeNotWritten) and error.refused)
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
