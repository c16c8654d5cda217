"""Choices for members of a gang between filter and bind, and their record for the next leader.

kube-scheduler filters all members of a gang before it binds the first one, and extenders learn of no choice
in between: all could be sent to where one fits. So a member's GPUs are chosen in filter, on one node.

A call of filter is a caller's word. GPUs are kept only for a pod that the watch of unbound pods shows, with
the UID and the demand of the call, and for the gang that the watch names; the pod's end lets go of them.
A new leader keeps what the record says that its predecessor kept, once that watch has shown the pods.
"""

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.extender.fleet import Assumed, Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import Chosen, PodDemand
from agent.extender.settings import BIND_SECONDS
from agent.kit.tasks import Cell

# GPUs that are kept for members of gangs, written where the next leader finds them: a ConfigMap of our own.
#
# A Binding carries its choice; what is kept before lies in one replica's memory alone, and a gang whose other
# members were bound already would be left half bound by a change of leader. Filter answers once it is
# written.

log = structlog.get_logger()

MISSING = 404
# Nothing that a next attempt would change: rights or object are missing, or the object is too large.
FINAL = frozenset({403, MISSING, 413, 422})
MOST_BYTES = 800_000  # of a ConfigMap's 1 MiB; some 8,000 members
TIDY_SECONDS = 2.0
RETRY_SECONDS = 1.0
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


class KeptChoice(msgspec.Struct, frozen=True):
    """A node, and GPUs by index for each slot of the pod's demand; None: on a node without an inventory."""

    node: str
    chosen: Chosen | None = None


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] | None = None


class NotRecorded(Exception):
    """The record could not be written; the text says why."""


class GangRecord:
    """The ConfigMap of one leader. Another may have written it before, none does meanwhile."""

    def __init__(self, api: KubeApi, namespace: str, name: str, holds: Callable[[], bool]) -> None:
        """`holds`: whether nobody else can lead now."""
        self._api = api
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._name = name
        self._holds = holds
        self._written: dict[str, str] = {}  # as the API server has it; empty text: nobody knows
        self._lock = anyio.Lock()
        self._warned = False
        self.problem: str | None = "the record of GPUs that are kept for gangs was not read yet"

    async def read(self) -> Mapping[str, KeptChoice]:
        """The former leader's choices, by UID. Waits until the API server has answered."""
        while True:
            try:
                found = await self._get()
            except (ApiError, msgspec.DecodeError) as error:
                self.problem = f"the record of GPUs that are kept for gangs cannot be read: {error}"
                await anyio.sleep(RETRY_SECONDS)
                continue
            self.problem = None
            self._written = dict(found)
            return {uid: kept for uid, text in found.items() if (kept := _decoded(text))}

    async def write(self, kept: Callable[[], Mapping[str, KeptChoice]]) -> None:
        """Let the record be as `kept` says, or warn where it never can. Raises NotRecorded."""
        async with self._lock:
            changes = self._changes(kept())
            if not changes:
                return
            if not self._holds():
                raise NotRecorded("this extender is not the leader any more")
            # Until the answer is here, and where none comes, it may have been done or not.
            self._written |= dict.fromkeys(changes, "")
            try:
                await self._api.merge_patch(f"{self._folder}/{self._name}", {"data": changes}, BIND_SECONDS)
            except ApiRefused as error:
                if error.status == MISSING and await self._created():
                    self._written.clear()
                    raise NotRecorded("somebody had deleted the record; it was made again") from error
                if error.status not in FINAL:
                    raise NotRecorded(str(error)) from error
                self._warn(str(error))
            except ApiError as error:
                raise NotRecorded(str(error)) from error
            # Written after the lease was given up, the next leader might have read before.
            if not self._holds():
                raise NotRecorded("this extender is not the leader any more")
            for uid, text in changes.items():
                if text is None:
                    self._written.pop(uid, None)
                else:
                    self._written[uid] = text

    async def tidy(self, kept: Callable[[], Mapping[str, KeptChoice]]) -> None:
        """Take out what is kept no longer, until cancelled."""
        while True:
            await anyio.sleep(TIDY_SECONDS)
            try:
                await self.write(kept)
            except NotRecorded as error:
                log.debug("gang_record_not_tidied", problem=str(error))

    def _changes(self, kept: Mapping[str, KeptChoice]) -> dict[str, str | None]:
        wanted: dict[str, str] = {}
        size = 0
        for uid, each in kept.items():
            text = msgspec.json.encode(each).decode()
            size += len(uid) + len(text)
            if size > MOST_BYTES:
                self._warn(f"only {len(wanted)} of {len(kept)} members of gangs have room in it")
                break
            if _KEY.fullmatch(uid):
                wanted[uid] = text
        gone: dict[str, str | None] = dict.fromkeys(self._written.keys() - wanted.keys())
        return gone | {uid: text for uid, text in wanted.items() if self._written.get(uid) != text}

    async def _get(self) -> Mapping[str, str]:
        try:
            raw = await self._api.get(f"{self._folder}/{self._name}", deadline=BIND_SECONDS)
            return msgspec.json.decode(raw, type=_ConfigMap).data or {}
        except ApiRefused as error:
            if error.status == MISSING:
                await self._created()
            elif error.status in FINAL:
                self._warn(str(error))
            else:
                raise
        return {}

    async def _created(self) -> bool:
        """Whether it could be made. The chart makes it; without the chart, the account may have the right."""
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self._name}}
        try:
            await self._api.post(self._folder, body, BIND_SECONDS)
        except ApiRefused as error:
            self._warn(str(error))
            return False
        return True

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("gang_choices_not_recorded", config_map=self._name, problem=problem)


def _decoded(text: str) -> KeptChoice | None:
    """None: nothing that a leader wrote."""
    try:
        return msgspec.json.decode(text, type=KeptChoice)
    except msgspec.DecodeError:
        return None


# Choices for members of a gang between filter and bind.

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


class Gangs:
    """Choices for members of gangs that wait to be bound; each counts in the ledger until its deadline."""

    def __init__(self, fleet: Fleet, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds`: how long a choice is kept; on `clock`, as the ledger's deadlines are."""
        self._fleet = fleet
        self._seconds = seconds
        self._clock = clock
        self._shown: dict[str, Member] = {}  # by pod
        self._news = Cell(None)  # published with each pod that is shown
        self._kept: set[str] = set()  # pods that may have a choice in the ledger
        self._refused: dict[str, float] = {}  # gangs, and until when their choices are kept for short
        self._former: dict[str, KeptChoice] = {}  # of the former leader, by pod
        self._taken_over: set[str] = set()  # pods whose choices were made by it

    @property
    def shown(self) -> AbstractSet[str]:
        """Members that the watch shows as unbound, by UID."""
        return self._shown.keys()

    def take_over(self, former: Mapping[str, KeptChoice]) -> None:
        """A former leader kept these, by UID; they count from the first list of unbound pods on."""
        self._former = dict(former)

    @property
    def problem(self) -> str:
        """Why GPUs that are kept may be missing in the ledger; empty: none is."""
        return "the GPUs that the former leader kept for gangs are not known yet" if self._former else ""

    def listed(self) -> None:
        """The watch has shown all unbound pods: of those that it has not, nothing is kept."""
        self._former.clear()
        self._taken_over.clear()

    def kept(self) -> Mapping[str, KeptChoice]:
        """Choices that the next leader must know, by UID."""
        waiting = {uid: each for uid in self._kept if (each := self._fleet.assumed(uid))}
        return {uid: KeptChoice(each.node, each.claim.chosen) for uid, each in waiting.items()} | self._former

    def show(self, uid: str, member: Member) -> None:
        """The watch shows an unbound member."""
        if self._shown.get(uid) == member:
            return
        self._shown[uid] = member
        former = self._former.pop(uid, None)
        fits = former and (former.chosen is None or len(former.chosen) == len(member.demand.slots))
        if former and fits and self._fleet.where(uid) is None:  # it may be bound by now
            self._taken_over.add(uid)
            self._keep(uid, member.gang, former.node, PodClaim(member.demand, chosen=former.chosen))
        self._news.publish(None)

    def hide(self, uid: str, *, ended: bool) -> None:
        """The watch has ceased to show a pod: it has ended, or nobody knows whether it is bound."""
        if self._shown.pop(uid, None) is None:
            return
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
        kept = self._choice(uid)
        return kept.node if kept else None

    def release(self, uid: str) -> None:
        """A member is filtered again, or is gone: its former choice is off."""
        if self._choice(uid):
            self._fleet.forget(uid)

    def keep(self, uid: str, gang: str, node: str, claim: PodClaim) -> None:
        """A member gets these GPUs, if it is bound in time, and has not gone while they were looked for."""
        if self._shown.get(uid) != Member(gang, claim.demand):
            return
        self._tidy()
        self._keep(uid, gang, node, claim)

    def _keep(self, uid: str, gang: str, node: str, claim: PodClaim) -> None:
        """Without a look at all that is kept: a new leader takes thousands over at once."""
        now = self._clock()
        until = now + (REFUSED_SECONDS if self._refused.get(gang, now) > now else self._seconds)
        self._kept.add(uid)
        self._fleet.assume(uid, node, claim, until, gang)
        log.debug("gang_member_kept", gang=gang, pod=claim.name, node=node)

    def refuse(self, gang: str) -> None:
        """A member fits nowhere: what the others have is not kept for long."""
        self._tidy()
        self._refused[gang] = self._clock() + REFUSED_SECONDS
        for uid in self._kept:
            if (kept := self._choice(uid)) and kept.gang == gang:
                self._let_go(uid, REFUSED_SECONDS)

    def give_up(self, uid: str) -> None:
        """kube-scheduler found no node for a member after all."""
        # The first list may show what was true before the former leader kept GPUs for the pod.
        if uid not in self._taken_over:
            self._let_go(uid, REFUSED_SECONDS)

    def _let_go(self, uid: str, seconds: float) -> None:
        kept, until = self._choice(uid), self._clock() + seconds
        # Refusals follow each other; one that was made later must not give a choice more time.
        if kept and until < kept.expires:
            self._fleet.assume(uid, kept.node, kept.claim, until, kept.gang)

    def take(self, uid: str, node: str, demand: PodDemand) -> PodClaim | None:
        """The choice for a pod that is being bound; None: there is none for this node and demand."""
        kept = self._choice(uid)
        if kept is None:
            return None
        if kept.node == node and kept.claim.demand == demand and self._usable(kept):
            self._fleet.assume(uid, node, kept.claim, kept.expires)  # it is kept for a gang no longer
            return kept.claim
        self._fleet.forget(uid)
        return None

    def _usable(self, kept: Assumed) -> bool:
        """Whether the GPUs are still offered as they were when they were chosen."""
        inventory, chosen = self._fleet.inventory(kept.node), kept.claim.chosen
        if inventory is None or chosen is None:
            return inventory is None and chosen is None
        usable = {(gpu.index, gpu.mode) for gpu in inventory.gpus if gpu.usable}
        slots = zip(kept.claim.demand.slots, chosen, strict=True)
        return all((index, slot.mode) in usable for slot, indices in slots for index in indices)

    def _choice(self, uid: str) -> Assumed | None:
        """The choice that the ledger keeps for a member; None: there is none, or it is being bound."""
        found = self._fleet.assumed(uid)
        return found if found and found.gang else None

    def _tidy(self) -> None:
        """Drop what the ledger has let go of, or knows to be bound."""
        self._kept = {uid for uid in self._kept if self._fleet.assumed(uid)}
        now = self._clock()
        self._refused = {gang: until for gang, until in self._refused.items() if until > now}
