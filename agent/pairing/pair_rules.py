"""Pairing's decisions: pure functions of a state and a call. `agent.pairing.pairing` runs them."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from agent.model.holding import Holder, Ledger, PairHoldings, PairMember, Reservation, Source, UnitPool
from agent.model.modes import PAIRS, SEPARATOR, ResourcePair
from agent.model.placement import (
    Choice,
    NoRoom,
    PlacementPolicy,
    WholeChooser,
    hint_of,
    lowest,
    place,
    policy_of,
)
from agent.model.pod import Demand, Impossible, Pod, Stage, init_group_of
from agent.pairing.resolver import Asker, Cause, PairRefused, PodKey, resource_of

NOTHING: frozenset[str] = frozenset()
PAIRED = frozenset(name for pair in PAIRS.values() for name in (pair.core, pair.memory))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kubelet. `available` None: it asked for no preference."""

    member: PairMember
    size: int
    inherited: frozenset[str]  # IDs of plain init containers before, which come with the container
    available: frozenset[str] | None
    now: float  # seconds
    # Units of each pod that is over, or has no name, which the kubelet may not have freed yet.
    leftover: Collection[frozenset[str]] = ()
    # As with reservations.
    blind: bool = False
    succeeds: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A member that was handed to a container; `ids` are its units, of `gpus` in order of index."""

    pod: Pod
    container: str
    demand: Demand
    gpus: tuple[str, ...]
    ids: frozenset[str]
    complete: bool  # whether the container has both members now

    @property
    def last(self) -> bool:
        """Whether no later container of the pod asks for a share."""
        names = [each.name for each in self.pod.containers if PAIRED & each.limits.keys()]
        return not names or names[-1] == self.container


@dataclass(frozen=True)
class PairState:
    """All that is known of one kind of pair on one node."""

    ledger: Ledger = field(default_factory=Ledger)
    units: Mapping[PairMember, frozenset[str]] = field(default_factory=dict)
    refused: frozenset[str] = NOTHING  # UIDs of pods that were turned away

    def with_pools(self, pools: Collection[UnitPool]) -> "PairState":
        units = {member: NOTHING.union(*(each.id_set(member) for each in pools)) for member in PairMember}
        return replace(
            self, ledger=replace(self.ledger, pools={each.gpu: each for each in pools}), units=units
        )

    def observed(
        self,
        held: PairHoldings,
        listed: Collection[PodKey],
        covers: float,
        pods: Mapping[PodKey, Pod] | None = None,
    ) -> "PairState":
        """With what a record says of the pair, and the pods that it lists.

        `covers`: it was read after reservations were made that expire by then. `pods`: those of the node,
        where they are known.
        """
        known = pods or {}

        def over(reservation: Reservation) -> bool:
            """Whether its pod is gone, has finished, or is another of the same name now."""
            key = reservation.holder.pod_key
            now = known.get(key)
            if now and now.uid == reservation.pod.uid and now.finished:
                return True
            gone = key not in listed or (now is not None and now.uid != reservation.pod.uid)
            return gone and reservation.expires <= covers

        refused = self.refused if pods is None else self.refused & {pod.uid for pod in pods.values()}
        return replace(self, ledger=self.ledger.observed(held, over), refused=refused)

    def without(self, over: Callable[[Reservation], bool]) -> "PairState":
        return replace(self, ledger=self.ledger.without(over))

    def reserved(self, reservation: Reservation) -> "PairState":
        return replace(self, ledger=self.ledger.reserved(reservation))


@dataclass(frozen=True, slots=True)
class PairRules:
    """The rules, which do not change between calls."""

    pair: ResourcePair
    policy: PlacementPolicy = PlacementPolicy.BINPACK
    reservation_seconds: float = 10.0
    whole: WholeChooser = lowest
    node: str = ""

    def outlived(self, reservation: Reservation, kubelet_since: float, held: PairHoldings) -> bool:
        """Whether the kubelet that it was made for ended before it had written anything of it down."""
        made = reservation.expires - self.reservation_seconds
        members = ((reservation.holder, each) for each in PairMember)
        gone = made < kubelet_since and not reservation.blind
        return gone and not any(held.by_place.get(each) for each in members)

    def reserve(
        self, state: PairState, call: Call, asker: Asker, unsettled: frozenset[str] = NOTHING
    ) -> tuple[Reservation, str]:
        """A reservation for the asker, and why the scheduler's choice is not followed. Raises PairRefused.

        `unsettled`: GPUs that are chosen only where no other has room.
        """
        holder, ledger = asker.holder, state.ledger
        existing = ledger.reservation(holder)
        if existing and (existing.pod.uid != asker.pod.uid or not existing.granted):
            existing = None
        expires = call.now + self.reservation_seconds
        if existing and existing.needs(call.member) == call.size:
            return replace(existing, expires=expires, blind=call.blind, succeeds=call.succeeds), ""
        try:
            demand, group = asker.needs(self.pair)
            spread = {each.partition(SEPARATOR)[0] for each in call.inherited}
            if len(spread) > max(1, demand.whole):
                raise Impossible(
                    f"units of {resource_of(self.pair, call.member)} for {holder} lie on {len(spread)} GPUs, "
                    f"and {demand.text()} must lie on {max(1, demand.whole)}; create the pod again"
                )
            had = self._own(state, asker.pod, holder, call.succeeds)
            own = had | call.inherited
            # What the pod's kubelet has lost it may have again, or go elsewhere.
            before = () if call.succeeds else ledger.held.by_pod.get(asker.pod.key, ())
            forgotten = [each for each in before if each.source is Source.FORGOTTEN]
            again = (each.id_set for each in before if each.source is not Source.FORGOTTEN)
            lost = NOTHING.union(*(each.id_set for each in forgotten)).difference(*again)
            sure = own - (lost - call.inherited)
            # Of units that the kubelet has chosen by itself nothing says that the pod had begun with them.
            begun = had - lost if call.available is None else sure
            taken, doubted = self._taken(state, holder, own, call)
            reserved = frozenset(existing.gpus) if existing else NOTHING
            tied = {each.partition(SEPARATOR)[0] for each in sure} | reserved
            hint = hint_of(asker.pod, holder.container, self.node, group.containers if group else ())
            wanted = group.peak if group and not tied else demand
            policy = policy_of(asker.pod, self.policy)
            # Where room for all of a group is looked for, what any of its containers lost counts as room.
            names = group.containers if group and not tied else ()
            group_lost = NOTHING.union(*(each.id_set for each in forgotten if each.container in names))

            def choose(taken: frozenset[str]) -> Choice:
                rooms = ledger.free_gpus(holder, taken - group_lost, own | group_lost, begun)
                settled = {gpu: room for gpu, room in rooms.items() if gpu not in unsettled}
                if not (hint or tied or wanted.whole) and any(room.fits(wanted) for room in settled.values()):
                    rooms = settled
                return place(rooms, wanted, policy, hint, self.whole, tied)

            choice = choose(taken)
            if doubted and not tied and (choice.hint_ignored or not hint):
                with suppress(NoRoom):
                    safe = choose(taken | doubted)
                    if unsettled.isdisjoint(safe.gpus) or not unsettled.isdisjoint(choice.gpus):
                        choice = safe
        except Impossible as problem:
            raise PairRefused(str(problem), Cause.INVALID, asker.pod) from problem
        except NoRoom as problem:
            raise PairRefused(str(problem), Cause.EXHAUSTED, asker.pod) from problem
        # Of the whole GPUs that a later container will need, this one takes only its own.
        gpus = choice.gpus[: max(1, demand.whole)]
        # Members that it holds already, as after a restart of this process between the two.
        known = {} if call.succeeds else ledger.held.by_place
        held = {member: ids for member in PairMember if (ids := known.get((holder, member)))}
        core, memory, granted = held.get(PairMember.CORE), held.get(PairMember.MEMORY), frozenset(held)
        reservation = Reservation(
            holder, asker.pod, demand, gpus, expires, core, memory, granted, call.blind, call.succeeds
        )
        return reservation, choice.hint_ignored

    def pick(self, state: PairState, reservation: Reservation, call: Call) -> tuple[PairState, list[str]]:
        """IDs of a reserved member: inherited ones first, then the lowest free ones. Raises PairRefused."""
        available, known = call.available or NOTHING, reservation.ids(call.member)
        own = self._own(state, reservation.pod, reservation.holder, reservation.succeeds) | call.inherited
        ledger, holder, chosen = state.ledger, reservation.holder, ", ".join(reservation.gpus)
        usable = known is not None and len(known) == call.size and known <= available
        if known and usable and not ledger.taken_of(known, holder, own):
            return state.reserved(reservation), sorted(known)
        picked = dict.fromkeys(sorted(call.inherited))
        strangers = {each.partition(SEPARATOR)[0] for each in picked} - set(reservation.gpus)
        if strangers:
            raise PairRefused(
                f"{reservation.holder} inherits units of GPU {', '.join(sorted(strangers))} from an init "
                f"container, but its other member is on GPU {chosen}; create the pod again",
                Cause.INVALID,
                reservation.pod,
            )
        pools = [ledger.pools[gpu] for gpu in reservation.gpus]
        offered = NOTHING.union(*(pool.id_set(call.member) & available for pool in pools))
        taken = ledger.taken_of(offered, holder, own)
        units = chain.from_iterable(pool.ids(call.member) for pool in pools)
        free = (each for each in units if each in offered and each not in taken and each not in picked)
        picked |= dict.fromkeys(islice(free, max(0, call.size - len(picked))))
        if len(picked) < call.size:
            raise PairRefused(
                f"GPU {chosen} was chosen for {reservation.demand.text()} of {holder}, "
                f"but the kubelet offers only {len(picked)} of {call.size} "
                f"{resource_of(self.pair, call.member)} there; create the pod again",
                Cause.EXHAUSTED,
                reservation.pod,
            )
        return state.reserved(reservation.with_ids(call.member, frozenset(picked))), list(picked)

    def checked(self, state: PairState, member: PairMember, ids: Collection[str]) -> tuple[str, ...]:
        """GPUs of these IDs in order of index. Raises PairRefused for IDs that are not of this member."""
        pools, resource = state.ledger.pools, resource_of(self.pair, member)
        if len(set(ids)) < len(ids):
            raise PairRefused(f"the same unit of {resource} stands twice among those asked for")
        gpus = {each.partition(SEPARATOR)[0] for each in ids}
        if unknown := gpus - pools.keys():
            raise PairRefused(
                f"GPU {min(unknown)} is not known on this node; the kubelet's list is out of date"
            )
        if foreign := set(ids).difference(*(pools[gpu].id_set(member) for gpu in gpus)):
            raise PairRefused(f"{min(foreign)} is not a unit of {resource} on this node")
        return tuple(sorted(gpus, key=lambda gpu: pools[gpu].index))

    def grant(
        self,
        state: PairState,
        reservation: Reservation,
        call: Call,
        ids: frozenset[str],
        gpus: Collection[str],
    ) -> tuple[PairState, Grant]:
        """Hand out a reserved member. Raises PairRefused where `ids`, which lie on `gpus`, cannot be."""
        if not set(gpus) <= set(reservation.gpus):
            raise PairRefused(
                f"the kubelet took units of GPU {', '.join(gpus)}, against the choice of GPU "
                f"{', '.join(reservation.gpus)} for {reservation.holder}; create the pod again",
                Cause.INVALID,
                reservation.pod,
            )
        own = self._own(state, reservation.pod, reservation.holder, reservation.succeeds)
        if held := state.ledger.taken_of(ids, reservation.holder, own):
            unit, resource = min(held), resource_of(self.pair, call.member)
            # Its owner reads this: pods of other namespaces are none of theirs.
            here, held_now = reservation.pod.namespace, state.ledger.held
            holding = [each.holder for each in (*held_now.cores, *held_now.blocks) if unit in each.id_set]
            named = (str(one) if one.namespace == here else "another namespace's pod" for one in holding)
            holders = ", ".join(named)
            raise PairRefused(
                f"{unit} of {resource} is held by {holders or 'a container that is being admitted'}, though "
                "the kubelet offers it; nothing is handed out twice, create the pod again",
                Cause.UNAVAILABLE,
                reservation.pod,
            )
        keeping = {pool.gpu for pool in state.ledger.pools.values() if pool.keeps}
        if gone := set(reservation.gpus) - keeping:
            raise PairRefused(
                f"GPU {min(gone)} is not in mode {self.pair.name} now: it is unhealthy, or changes its mode; "
                "create the pod again",
                Cause.INVALID,
                reservation.pod,
            )
        handed = reservation.with_ids(call.member, ids).with_grant(call.member)
        reservation = replace(handed, expires=call.now + self.reservation_seconds)
        container = reservation.holder.container
        granted = Grant(
            reservation.pod, container, reservation.demand, reservation.gpus, ids, reservation.complete
        )
        return state.reserved(reservation), granted

    def _own(self, state: PairState, pod: Pod, holder: Holder, succeeds: bool) -> frozenset[str]:
        """Units that a container has already, and those that plain init containers of its pod left for it.

        `succeeds`: of the name the record knows an earlier pod.
        What its kubelet has lost is among them, and of other containers' it is neither left nor kept.
        """
        group = init_group_of(self.pair, pod.containers)
        inherits = group is not None and holder.container in group.containers
        early = {each.name for each in pod.containers if each.stage is Stage.INIT}
        held = () if succeeds else state.ledger.held.by_pod.get(pod.key, ())
        mine = NOTHING.union(*(each.id_set for each in held if each.holder == holder))
        entries = [(each.holder, each.id_set) for each in held if each.source is not Source.FORGOTTEN]
        entries += [
            (each.holder, each.ids(member) or NOTHING)
            for each in state.ledger.reservations
            if each.pod.uid == pod.uid
            for member in each.granted
        ]
        mine = mine.union(*(ids for one, ids in entries if one == holder))
        left = NOTHING.union(*(ids for one, ids in entries if inherits and one.container in early))
        others = (ids for one, ids in entries if one != holder and one.container not in early)
        return mine | left.difference(*others)

    def _taken(
        self, state: PairState, holder: Holder, own: frozenset[str], call: Call
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Units that cannot come to a container, and others that the kubelet may keep from it, too."""
        taken, units = state.ledger.taken(holder, own), state.units.get(call.member, NOTHING)
        if call.available is None:
            return taken, NOTHING
        # Of pods that had the other member alone the call says nothing.
        mute = NOTHING.union(*(each for each in call.leftover if units.isdisjoint(each))) - own
        # In this order, since nearly all that the kubelet does not offer is held.
        withheld = units.difference(taken, own, call.available)
        if not withheld:
            return taken, mute
        # A kubelet that keeps units of one member for a pod that is over keeps those of the other, too. What
        # is offered to nobody, as on a GPU that is lost, it does not offer either, and that says nothing.
        pools = state.ledger.pools.values()
        offered = (pool.id_set(call.member) for pool in pools if pool.offerable)
        telling = withheld.intersection(chain.from_iterable(offered))
        # It frees a pod as a whole: of whom it offers anything, another pod has the units that it withholds.
        kept = (
            each for each in call.leftover if each.isdisjoint(call.available) and not each.isdisjoint(telling)
        )
        return (taken | withheld).union(*kept) - own, mute
