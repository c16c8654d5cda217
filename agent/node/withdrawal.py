"""Takes back the offer so that no pod is lost by it: for a switch, and for an agent that stops.

One order for both: taint, wait for the pods that are bound, publish smaller lists, at a stop wait for the
second half of what is being admitted, wait until the kubelet has taken the lists in, patch the figures, let
the taint go. Each step has its share of the time, and none can keep the next from coming: the lists are
published and the taint goes whatever else fails.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import anyio
import structlog

from agent.cluster.node import Amounts, OwnNode
from agent.kit.tasks import Backoff
from agent.model.holding import Record
from agent.model.modes import Assignment
from agent.model.pod import Pod
from agent.node.capacity import BINDING_SECONDS, WRITE_SECONDS, Capacity, Offer, SchedulingTaint

# Pods that are bound to this node and do not have their devices yet.

NOBODY: frozenset[tuple[str, str]] = frozenset()


async def unadmitted(
    pods: Callable[[], Mapping[str, Pod] | None],
    resources: Callable[[], AbstractSet[str]],
    refresh: Callable[[], Awaitable[Record | None]],
) -> frozenset[str]:
    """UIDs of pods that are bound to this node and lack any of `resources` that they ask for.

    `pods`: those bound here by UID, None: not known now. `refresh`: who holds what; where the kubelet does
    not say (None), each pod that waits to start counts as unadmitted: a kubelet that is too busy to answer is
    the very one that has not got to them yet.
    """

    def waiting() -> dict[str, Pod]:
        return {uid: pod for uid, pod in (pods() or {}).items() if pod.pending and pod.asks_for(resources())}

    if not waiting():
        return frozenset()
    listed = await refresh()
    held: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for one in listed.holdings if listed else ():
        held.setdefault((one.namespace, one.pod), set()).add((one.container, one.resource))
    # Once more, after the kubelet's answer: pods that were bound meanwhile are not in it.
    return frozenset(
        uid
        for uid, pod in waiting().items()
        if pod.lacks(resources(), held.get((pod.metadata.namespace, pod.metadata.name), NOBODY))
    )


log = structlog.get_logger()

LOOK_SECONDS = 0.05  # how often pods without devices are looked for
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.2, 1.0  # until a patch that failed is tried again
# A tick of the kubelet that began before the lists had changed has ended then.
SECOND_LOOK_SECONDS = 0.2

Publish = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Shares:
    """How long each step may take at most, in seconds."""

    taint: float
    next_served: float  # until the next pod has its devices: a slow kubelet gets through all of them
    unheld: float  # until all have, where the taint does not stand and more pods may come
    all_served: float  # these together
    emptied: float  # until the lists offer nothing: a container that has half of its devices gets the others
    arrived: float
    patched: float


SWITCH = Shares(
    taint=5.0, next_served=20.0, unheld=2.0, all_served=120.0, emptied=0.0, arrived=10.0, patched=5.0
)
# An agent that stops does not wait for an API server of which it does not know how long it may take.
STOP = Shares(taint=0.05, next_served=3.0, unheld=3.0, all_served=3.0, emptied=2.0, arrived=1.0, patched=3.0)
STOP_SECONDS = 7.5  # all steps together, and the taint gone
LEFT_SECONDS = 1.0  # of these for the taint to go, whatever the steps took


class Withdrawals:
    """An `Announcer` for the switcher, and the end of all that is offered here."""

    def __init__(
        self,
        node: OwnNode,
        offer: Offer,
        capacity: Capacity,
        taint: SchedulingTaint,
        unserved: Callable[[], Awaitable[AbstractSet[str]]],
    ) -> None:
        """`unserved`: pods that are bound here and have not got their devices yet."""
        self._node = node
        self._offer = offer
        self._capacity = capacity
        self._taint = taint
        self._unserved = unserved

    async def withdraw(self, ahead: Assignment, publish: Publish) -> None:
        """Call `publish`, which puts `ahead` in force, once no bound pod lacks its devices; then follow."""
        before, after = self._offer.now(), self._offer.amounts(ahead)
        fewer = sorted(name for name, (_, left) in after.items() if left < before.get(name, (0, 0))[1])
        if not fewer:
            await publish()
            return
        began = anyio.current_time()
        tainted, served = await self._carry_out(SWITCH, publish, self._capacity.less)
        log.info(
            "shrink_announced",
            resources=fewer,
            held=tainted,
            seconds=round(anyio.current_time() - began, 3),
            late=not served or None,
        )

    async def stop(self, publish: Publish) -> None:
        """Offer nothing any more; `publish` makes the lists say so. Takes STOP_SECONDS at most."""
        began = anyio.current_time()
        end, tainted, served = began + STOP_SECONDS, False, False
        try:
            with self._capacity.standing_still(), anyio.CancelScope(deadline=end):
                async with anyio.create_task_group() as group:
                    # The agent's own such task may have been cancelled already.
                    group.start_soon(self._taint.run)
                    with anyio.CancelScope(deadline=end - LEFT_SECONDS):
                        # No taint is begun that could not be taken back in the time left.
                        until = end - 2 * WRITE_SECONDS
                        tainted, served = await self._carry_out(STOP, publish, self._offered, until)
                    self._taint.drop_all()  # a switch may be under way
                    await self._taint.gone()
                    with anyio.move_on_after(SECOND_LOOK_SECONDS):
                        while True:
                            seen = self._node.changes.version
                            await self._patch(self._offered)
                            await self._node.changes.wait_change(seen)
                    group.cancel_scope.cancel()
        finally:
            await publish()  # whatever failed; again is nothing
        log.info(
            "all_withdrawn",
            held=tainted,
            late=not served or None,
            tainted=self._taint.stands(),
            still_offered=sorted(self._offered()) or None,
            seconds=round(anyio.current_time() - began, 3),
        )

    async def _carry_out(
        self, shares: Shares, publish: Publish, left: Callable[[], Amounts], until: float = math.inf
    ) -> tuple[bool, bool]:
        """All steps; whether the taint stood, and whether all pods that were bound have got their devices.

        `left`: amounts that node.status comes down to. `until`: when the taint may be set at the latest.
        """
        with self._capacity.standing_still(), self._taint.held(until) as hold:
            tainted = served = False
            with anyio.move_on_after(shares.all_served):
                tainted = await self._taint.effective(shares.taint)
                served = await self._all_served(shares.next_served, math.inf if tainted else shares.unheld)
            if not self._taint.stands():
                self._taint.drop(hold)  # it would come too late to help
            await publish()
            with anyio.move_on_after(shares.emptied):
                await self._emptied()
            await self._offer.arrived(shares.arrived)
            with anyio.move_on_after(shares.patched):
                await self._patch(left)
        return tainted, served

    async def _all_served(self, next_one: float, all_of_them: float) -> bool:
        """Wait until no pod is bound here that has not got its devices; whether that was reached in time."""
        began = anyio.current_time()
        end = began + all_of_them
        with anyio.CancelScope(deadline=min(began + next_one, end)) as scope:
            at_work = True
            while at_work:
                at_work, before = False, frozenset[str]()
                asked = anyio.current_time()
                while unserved := frozenset(await self._unserved()):
                    now = anyio.current_time()
                    if before - unserved:
                        scope.deadline = min(now + next_one, end)
                    at_work, before = True, unserved
                    # A kubelet that answers slowly has pods to admit, and every question holds it up.
                    await anyio.sleep(max(LOOK_SECONDS, 2 * (now - asked)))
                    asked = anyio.current_time()
                if at_work:
                    await anyio.sleep(BINDING_SECONDS)  # the scheduler was at work a moment ago
        return not scope.cancelled_caught

    async def _emptied(self) -> None:
        """Wait until no list offers anything: a tick of the kubelet would undo figures of 0 before that."""
        while any(left for _, left in self._offer.now().values()):
            await anyio.sleep(LOOK_SECONDS)

    def _offered(self) -> Amounts:
        """The offered resources, as they have to be patched when nothing is offered."""
        listed = self._offer.now()
        known = self._node.amounts(frozenset(listed))
        return {
            name: (capacity, 0)
            for name, (capacity, _) in listed.items()
            if known is None or known[name][1] > 0
        }

    async def _patch(self, left: Callable[[], Amounts]) -> None:
        pauses = Backoff(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        while (amounts := left()) and not await self._capacity.patch(amounts):
            await anyio.sleep(pauses.next())
