"""Choices for members of a gang between filter and bind.

kube-scheduler filters all members of a gang before it binds the first one, and extenders learn of no choice
in between: all could be sent to where one fits. So a member's GPUs are chosen in filter, on one node.

A call of filter is a caller's word. GPUs are kept only for a pod that the watch of unbound pods shows, with
the UID and the demand of the call, and for the gang that the watch names; the pod's end lets go of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import anyio
import structlog

from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import PodDemand
from agent.kit.cell import Cell

log = structlog.get_logger()

# After a member was refused: time enough for the others to be bound where the gang may start without it.
REFUSED_SECONDS = 5.0
# How much later than kube-scheduler's watch ours may show a pod.
SHOWN_SECONDS = 0.5
# A pod that left the watch of unbound pods is gone, or bound, which another watch shows at about that time.
LEFT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """A pod of a gang, unbound and not deleted, as the watch shows it."""

    gang: str
    demand: PodDemand


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
        self._shown: dict[str, Member] = {}  # by pod
        self._news = Cell(None)  # published with each pod that is shown
        self._kept: dict[str, _Kept] = {}  # by pod
        self._refused: dict[str, float] = {}  # gangs, and until when their choices are kept for short

    def show(self, uid: str, member: Member) -> None:
        """The watch shows an unbound member."""
        if self._shown.get(uid) != member:
            self._shown[uid] = member
            self._news.publish(None)

    def hide(self, uid: str, *, ended: bool) -> None:
        """The watch shows it no more: it has ended, or nobody knows whether it is bound."""
        self._shown.pop(uid, None)
        if ended:
            self.release(uid)
        else:
            self._let_go(uid, LEFT_SECONDS)

    async def gang(self, uid: str, demand: PodDemand) -> str:
        """The gang of a pod that GPUs may be kept for; empty: the watch shows none of this UID and demand."""
        with anyio.move_on_after(SHOWN_SECONDS):
            while uid not in self._shown:
                await self._news.wait_change(self._news.version)
        member = self._shown.get(uid)
        return member.gang if member and member.demand == demand else ""

    def node(self, uid: str) -> str | None:
        """The node where a member's GPUs are kept."""
        kept = self._kept.get(uid)
        return kept.node if kept and self._holds(uid, kept) else None

    def release(self, uid: str) -> None:
        """A member is filtered again, or is gone: its former choice is off."""
        if kept := self._kept.pop(uid, None):
            self._forget(uid, kept)

    def keep(self, uid: str, gang: str, node: str, claim: PodClaim) -> None:
        """A member gets these GPUs, if it is bound in time, and has not gone while they were looked for."""
        if self._shown.get(uid) != Member(gang, claim.demand):
            return
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
            if kept.gang == gang:
                self._shorten(uid, kept, until)

    def give_up(self, uid: str) -> None:
        """kube-scheduler found no node for a member after all."""
        self._let_go(uid, REFUSED_SECONDS)

    def _let_go(self, uid: str, seconds: float) -> None:
        if (kept := self._kept.get(uid)) and self._holds(uid, kept):
            self._shorten(uid, kept, self._clock() + seconds)

    def _shorten(self, uid: str, kept: _Kept, until: float) -> None:
        # Refusals follow each other; one that was made later must not give a choice more time.
        if until < kept.until:
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
