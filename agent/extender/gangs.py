"""Choices for members of a gang between filter and bind.

kube-scheduler filters all members of a gang before it binds the first one, and extenders learn of no choice
in between: all could be sent to where one fits. So a member's GPUs are chosen in filter, on one node.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import PodDemand

log = structlog.get_logger()

# After a member was refused: time enough for the others to be bound where the gang may start without it.
REFUSED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Kept:
    gang: str
    node: str
    claim: PodClaim
    until: float  # when the ledger lets go of it, on its clock


class Gangs:
    """Choices for members of gangs that wait to be bound; each counts in the ledger until its deadline."""

    def __init__(self, fleet: Fleet, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds`: how long a choice is kept; on `clock`, as the ledger's deadlines are."""
        self._fleet = fleet
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[str, _Kept] = {}  # by pod
        self._refused: dict[str, float] = {}  # gangs, and until when their choices are kept for short

    def release(self, uid: str) -> None:
        """A member is filtered again: its former choice is off."""
        if kept := self._kept.pop(uid, None):
            self._forget(uid, kept)

    def keep(self, uid: str, gang: str, node: str, claim: PodClaim) -> None:
        """A member gets these GPUs, if it is bound in time."""
        self._tidy()
        now = self._clock()
        until = now + (REFUSED_SECONDS if self._refused.get(gang, now) > now else self._seconds)
        self._kept[uid] = _Kept(gang, node, claim, until)
        self._fleet.assume(uid, node, claim, until)
        log.debug("gang_member_kept", gang=gang, pod=claim.name, node=node)

    def refuse(self, gang: str) -> None:
        """A member fits nowhere: what the others have is not kept for long."""
        self._tidy()
        until = self._refused[gang] = self._clock() + REFUSED_SECONDS
        for uid, kept in self._kept.items():
            # Refusals follow each other; one that was made later must not give a choice more time.
            if kept.gang == gang and until < kept.until:
                self._kept[uid] = replace(kept, until=until)
                self._fleet.assume(uid, kept.node, kept.claim, until)

    def take(self, uid: str, node: str, demand: PodDemand) -> PodClaim | None:
        """The choice for a pod that is being bound; None: there is none for this node and demand."""
        kept = self._kept.pop(uid, None)
        if kept is None or not self._holds(uid, kept):
            return None
        if kept.node == node and kept.claim.demand == demand and self._usable(kept):
            return kept.claim
        self._forget(uid, kept)
        return None

    def _usable(self, kept: _Kept) -> bool:
        """Whether the GPUs are still offered as they were when they were chosen."""
        inventory, chosen = self._fleet.inventory(kept.node), kept.claim.chosen
        if inventory is None or chosen is None:
            return inventory is None and chosen is None
        usable = {(gpu.index, gpu.mode) for gpu in inventory.gpus if gpu.usable}
        slots = zip(kept.claim.demand.slots, chosen, strict=True)
        return all((index, slot.mode) in usable for slot, indices in slots for index in indices)

    def _holds(self, uid: str, kept: _Kept) -> bool:
        return self._fleet.assumed(uid) is kept.claim

    def _forget(self, uid: str, kept: _Kept) -> None:
        if self._holds(uid, kept):
            self._fleet.forget(uid)

    def _tidy(self) -> None:
        """Drop what the ledger has let go of."""
        self._kept = {uid: kept for uid, kept in self._kept.items() if self._holds(uid, kept)}
        now = self._clock()
        self._refused = {gang: until for gang, until in self._refused.items() if until > now}
