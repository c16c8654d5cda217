"""Pairing without specs, when the API server cannot be asked: the order of calls, pure.

The kubelet finishes a container before it turns to the next. So a call for the other resource belongs to
the half that is open, provided that no other container can be asking; else nothing is guessed.
"""

from dataclasses import dataclass, replace

from agent.model.demand import CORES, Demand, Impossible, Kind
from agent.model.ids import SEPARATOR
from agent.model.ledger import Half, Holder, Ledger, Reservation
from agent.model.placement import Policy, WholeChooser, place
from agent.pairing.facts import Facts
from agent.pairing.requester import resource_of


class Unclear(Exception):
    """More than one container may be asking; the text names them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kubelet, as far as it says anything."""

    kind: Kind
    half: Half
    size: int
    inherited: frozenset[str]
    busy: frozenset[str]  # IDs that cannot be had though no listed container holds them


@dataclass(frozen=True, slots=True)
class Ordered:
    """A promise, and the promise to the same container that it replaces, if there was one."""

    promise: Reservation
    instead_of: tuple[Holder, ...] = ()

    @property
    def holder(self) -> Holder:
        """To whom."""
        return self.promise.holder


def by_order(call: Call, ledger: Ledger, facts: Facts, expires: float, whole: WholeChooser) -> Ordered:
    """A promise to whoever asks. Raises Unclear, Impossible, NoRoom."""
    records, other = facts.records, call.half.other
    assert records is not None
    waiting = [each for key in sorted(facts.unknown) for each in records.lacking(key, call.half)]
    opened = [
        (promise, holder)
        for promise in ledger.reservations
        if not promise.demand_known and other in promise.granted and (first := promise.ids(other))
        for holder in waiting
        if records.ids(holder, other) >= first
    ]
    if opened and len(waiting) > 1:
        raise Unclear(
            f"{call.size} of {resource_of(call.kind, call.half)} may be asked for by any of "
            f"{'; '.join(map(str, waiting))}, whose specs cannot be read: nothing is guessed; "
            "restore the connection to the API server and create the pod anew"
        )
    if opened:
        promise, holder = opened[0]
        return _second(call, ledger, expires, promise, holder)
    return _first(call, ledger, facts, expires, waiting, whole)


def _second(call: Call, ledger: Ledger, expires: float, promise: Reservation, holder: Holder) -> Ordered:
    other = call.half.other
    mine = promise.ids(other) or frozenset()
    demand = _demand(call, promise.demand)
    rooms = ledger.rooms(promise.holder, mine | call.inherited, call.busy)
    choice = place(rooms, demand, tied=promise.gpus)
    kept = Reservation(holder, demand, choice.gpus, expires, granted=promise.granted)
    return Ordered(kept.with_ids(other, mine), (promise.holder,))


def _first(
    call: Call, ledger: Ledger, facts: Facts, expires: float, waiting: list[Holder], whole: WholeChooser
) -> Ordered:
    assert facts.records is not None
    fresh = [each for each in waiting if (each, call.half.other) not in facts.records.holders]
    nameless = Holder("", "unknown", f"{call.half.value} {len(ledger.reservations)}")
    holder = fresh[0] if len(fresh) == 1 else nameless
    demand = _demand(call, Demand(0, 0))
    rooms = ledger.rooms(holder, call.inherited, call.busy)
    tied = {each.partition(SEPARATOR)[0] for each in call.inherited}
    # The emptiest GPU: what the other half will ask for is not known.
    choice = place(rooms, demand, Policy.SPREAD, None, whole, tied)
    return Ordered(Reservation(holder, demand, choice.gpus, expires, demand_known=False))


def _demand(call: Call, known: Demand) -> Demand:
    core = call.half is Half.CORE
    demand = Demand(call.size, known.blocks) if core else Demand(known.cores, call.size)
    if demand.cores and demand.cores % CORES == 0 and call.kind.whole_gpus:
        return replace(demand, whole=demand.cores // CORES)
    if demand.cores > CORES:
        raise Impossible(
            f"{demand.cores} of {call.kind.core}: more than {CORES} must be a multiple of {CORES}"
        )
    return demand
