"""Remains of a killed agent on the node: figures that the kubelet knows nothing of, and its taint.

Its figures stand until the kubelet's next tick. Whatever is bound by them dies at admission, for this agent
may offer something else, or may not be registered yet. So they are patched to 0 first, and only then its
taint goes. A write of that agent that is carried out later still is undone as well: the taint that nobody
holds by `SchedulingTaint`, figures that are not those of the lists by `Capacity`.
"""

import anyio
import structlog

from agent.cluster.own_node import Amounts, OwnNode
from agent.node.capacity import Capacity, KubeletMute, Offer
from agent.node.taint import SchedulingTaint

log = structlog.get_logger()

INHERITED_SECONDS = 10.0  # the kubelet's tick has come by then
LOOK_SECONDS = 0.5


class Inherited:
    """Takes them away, once."""

    def __init__(
        self,
        node: OwnNode,
        offer: Offer,
        capacity: Capacity,
        taint: SchedulingTaint,
        resources: frozenset[str],
    ) -> None:
        """`resources`: all that an agent before this one may have offered."""
        self._node = node
        self._offer = offer
        self._capacity = capacity
        self._taint = taint
        self._resources = resources
        self._until = anyio.current_time() + INHERITED_SECONDS

    async def run(self) -> None:
        """Return when nothing is left of it, or the kubelet's tick has come."""
        with self._taint.left_alone(), anyio.CancelScope(deadline=self._until):
            while not (await self._figures_are_right() and self._offer.now() and not self._capacity.less()):
                with anyio.move_on_after(LOOK_SECONDS):
                    await self._node.changes.wait_change(self._node.changes.version)

    async def _figures_are_right(self) -> bool:
        """Take back offered resources of which the kubelet has no device; whether none is left."""
        # This agent's own lists are `Capacity`'s.
        known = self._node.amounts(self._resources - self._offer.now().keys())
        if known is None:
            return False
        offered = {name: (capacity, 0) for name, (capacity, left) in known.items() if left > 0}
        if not offered:
            return True
        try:
            taken_in = await self._offer.taken_in()
        except KubeletMute:
            return False
        if taken_in is None:
            return True
        # Resources that it knows are another agent's, or it has not heard of that agent's end yet.
        gone: Amounts = {name: amounts for name, amounts in offered.items() if not taken_in.get(name)}
        if gone and await self._capacity.patch(gone):
            log.info("stale_figures_taken_back", resources=sorted(gone))
        return False
