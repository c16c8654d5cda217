"""Which claims have devices of this node ready. The kubelet stays the ledger: this is its record, and what
was answered since that was read.

Nobody gets a GPU before those have gone whose claims the scheduler has freed already, as after a deletion by
force: a container may run on for a while, and its claim is unprepared afterwards.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from types import MappingProxyType

import anyio

from agent.kit.tasks import Cell
from agent.model.holding import Holding
from agent.model.modes import SHARES
from agent.model.pod import CORES
from agent.model.resource_claim import AskedDevice, HeldClaim, device_name
from agent.modes.desired import ClaimRequests

# The kubelet writes a claim down before it asks for it, and its devices when the pod's other drivers have
# answered, too. A claim that is not in its record so long after an answer it will not give back.
RECORDED_SECONDS = 10.0
ANSWERED_SECONDS = 60.0  # after which an answer is forgotten where that record is never read


class ClaimCall:
    """A call under way that asks for a claim, which may be given back before it ends."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.given_back = False


class ClaimLedger:
    """Publishes in `requests` the mode of each GPU on which there are claims, or were a moment ago."""

    def __init__(
        self, requests: ClaimRequests, size: Callable[[str], tuple[int, int]], keep_seconds: float = 0.0
    ) -> None:
        """`size`: GiB that shares of a GPU may have together, and how many shares there may be."""
        self._requests = requests
        self._size = size
        self._keep_seconds = keep_seconds
        self._answered: dict[str, float] = {}  # when claims were last asked for or answered, by UID
        self._asking: dict[str, set[ClaimCall]] = {}  # calls under way, by UID
        self._new: set[str] = set()  # claims that nobody was answered yet
        self._warm: dict[str, float] = {}  # until when an idle GPU's daemon stays, by UUID
        self.held: Cell[Mapping[str, HeldClaim]] = Cell(MappingProxyType({}))

    def read(self, recorded: Mapping[str, HeldClaim], began: float) -> None:
        """Take in the kubelet's record, whose reading began at that time of the monotonic clock.

        A claim without devices there is being prepared: it keeps those that it was answered.
        """
        never = -math.inf
        pending = {uid for uid, each in recorded.items() if not each.devices}
        fresh = {
            uid: claim
            for uid, claim in self.held.value.items()
            if uid in self._asking
            or uid in pending
            or self._answered.get(uid, never) > began - RECORDED_SECONDS
        }
        # What was unprepared while it was read, or just before, is not taken back.
        since = began - RECORDED_SECONDS
        gone = {uid for uid in recorded if uid not in fresh and self._answered.get(uid, never) > since}
        ready = {uid: each for uid, each in recorded.items() if uid not in gone | pending}
        self._put({**ready, **fresh})
        self._answered = {uid: at for uid, at in self._answered.items() if at > began - RECORDED_SECONDS}

    def adopt(self, holdings: Iterable[Holding]) -> None:
        """Take in holders by PodResources, which name no UID of a claim: for want of the kubelet's record."""
        found: dict[str, list[AskedDevice]] = {}
        for each in holdings:
            if share := each.share:
                name = f"{each.namespace}/{share.claim}"
                device = AskedDevice("", "", device_name(share.gpu, share.mode), share)
                if device not in found.setdefault(name, []):
                    found[name].append(device)
        claims = {
            name: HeldClaim(name, name.partition("/")[0], name.partition("/")[2], tuple(each))
            for name, each in found.items()
        }
        self._put({**claims, **self.held.value})

    def begin(self, uid: str) -> ClaimCall:
        """A claim is asked for; `end` follows."""
        call = ClaimCall(uid)
        self._asking.setdefault(uid, set()).add(call)
        return call

    def end(self, call: ClaimCall) -> None:
        """Its claim goes where no call is left, and none was answered with devices. May be called again."""
        uid = call.uid
        calls = self._asking.get(uid, set())
        calls.discard(call)
        if calls or self._asking.pop(uid, None) is None or uid not in self._new:
            return
        self._new.discard(uid)
        self._put({other: each for other, each in self.held.value.items() if other != uid})

    async def enter(self, call: ClaimCall, claim: HeldClaim) -> bool:
        """Return once its devices are its own, all of them; bound it with a cancel scope.

        False: it was unprepared meanwhile.
        """
        await self.held.wait_for(
            lambda held: call.given_back or claim.uid in held or not self.obstacle(claim)
        )
        if call.given_back:
            return False
        if claim.uid not in self.held.value:
            others = {uid: each for uid, each in self.held.value.items() if each.key != claim.key}
            if len(others) == len(self.held.value):  # one taken over stays, whatever this call comes to
                self._new.add(claim.uid)
            self._put({**others, claim.uid: claim})
        return True

    def answered(self, call: ClaimCall, claim: HeldClaim) -> bool:
        """A call has been answered with its devices. False: it was unprepared meanwhile."""
        if call.given_back:
            return False
        self._new.discard(claim.uid)
        self._answered[claim.uid] = monotonic()
        return claim.uid in self.held.value

    @property
    def unanswered(self) -> frozenset[str]:
        """UIDs of claims that are being prepared for the first time."""
        return frozenset(self._new)

    def unprepared(self, uid: str, key: tuple[str, str]) -> None:
        """Nobody uses a claim any more. `key`: its namespace and name."""
        self._answered[uid] = monotonic()  # a reading that began before may show it still
        self._new.discard(uid)
        for call in self._asking.pop(uid, ()):  # it may be past cancelling, or still wait for others' devices
            call.given_back = True
        adopted = "/".join(key)
        claim = self.held.value.get(uid) or self.held.value.get(adopted)
        if claim is None:
            return
        if self._keep_seconds:
            until = anyio.current_time() + self._keep_seconds
            self._warm |= {each.share.gpu: until for each in claim.devices if each.share.mode is SHARES}
        self._put({each: other for each, other in self.held.value.items() if each not in (uid, adopted)})

    def obstacle(self, claim: HeldClaim) -> str:
        """Who keeps a claim from its devices, in words; empty: nobody."""
        for device in claim.devices:
            share = device.share
            others = [
                (other, each.share)
                for other in self.held.value.values()
                if other.key != claim.key  # the kubelet takes no namesake before it has given one back
                for each in other.devices
                if each.share.gpu == share.gpu
            ]
            if not others:
                continue
            names = ", ".join(sorted({f"{other.namespace}/{other.name}" for other, _ in others}))
            if share.mode is not SHARES or any(each.mode is not SHARES for _, each in others):
                return f"GPU {share.gpu} is still in use by {names}"
            own = [each.share for each in claim.devices if each.share.gpu == share.gpu]
            memory, clients = self._size(share.gpu)
            together = [*own, *(each for _, each in others)]
            if (
                sum(each.cores for each in together) > CORES
                or sum(each.memory for each in together) > memory
                or len(together) > clients
            ):
                return f"shares of GPU {share.gpu} are still in use by {names}"
        return ""

    def cool(self) -> float | None:
        """Let daemons go whose time is over; how long to wait for the next, in seconds."""
        since, now = monotonic() - ANSWERED_SECONDS, anyio.current_time()
        self._answered = {uid: at for uid, at in self._answered.items() if at >= since}
        if over := [gpu for gpu, until in self._warm.items() if until <= now]:
            for gpu in over:
                del self._warm[gpu]
            self._put(self.held.value)
        return min((until - now for until in self._warm.values()), default=None)

    def _put(self, held: Mapping[str, HeldClaim]) -> None:
        wanted = {each.share.gpu: each.share.mode for claim in held.values() for each in claim.devices}
        for gpu in wanted:
            self._warm.pop(gpu, None)
        wanted |= dict.fromkeys(self._warm, SHARES)
        if held != self.held.value:
            self.held.publish(MappingProxyType(dict(held)))
        requests, idle = self._requests, frozenset(self._warm)
        if idle != requests.idle.value:
            requests.idle.publish(idle)
        if wanted != requests.wanted.value:
            requests.wanted.publish(MappingProxyType(wanted))
