"""The one record of who holds what: PodResources, joined with the kubelet's checkpoint. Pure.

PodResources never shows what plain init containers hold, and a kubelet that has just started lists no pods
before it has heard of them. The checkpoint shows both, but not whose its entries are, and it keeps those of
pods that have ended. Whether a pod has ended is judged here, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.kubelet.checkpoint import Entries
from agent.kubelet.podresources import Holding, PodList

PodKey = tuple[str, str]  # namespace, name
NO_NAMESPACE = ""  # of a pod that is known by its UID alone
NOTHING = PodList((), ())
OURS = "GPU-"  # begins every device ID of this agent


@dataclass(frozen=True, slots=True)
class KnownPod:
    """A pod as the API server tells it."""

    key: PodKey
    finished: bool = False
    ending: bool = False  # deletion was asked for: a namesake may have followed
    hides: bool = False  # its plain init containers ask for devices, which only the checkpoint shows


@dataclass(frozen=True)
class View:
    """The pods of the node as the API server tells them, by the UID that the kubelet has for them."""

    pods: Mapping[str, KnownPod] = field(default_factory=dict)
    complete: bool = False  # the watch is up: a pod that is not among them is gone, or very new
    contested: frozenset[str] = frozenset()  # UIDs that several pods claim: nobody knows whose they are

    def ended(self, uid: str) -> bool:
        """Whether a pod is gone or has finished, as far as is known; one of now may not be told of yet."""
        if known := self.pods.get(uid):
            return known.finished
        # One that is not there may have come while the watch was interrupted.
        return self.complete and uid not in self.contested


@dataclass(frozen=True, slots=True)
class PodRecord:
    """All that is remembered of one pod that holds devices; it is dropped as a whole."""

    key: PodKey | None  # None: nobody has named it yet
    watched: bool  # the API server has told of it
    holdings: Mapping[tuple[str, str], Holding]  # by container and resource


Pods = Mapping[str, PodRecord]  # by UID


@dataclass(frozen=True, slots=True)
class Record:
    """Who holds what, and what has to be remembered for the next look."""

    pods: Pods = field(default_factory=dict)
    listed: PodList = NOTHING  # as the kubelet answered last
    joined: PodList = NOTHING

    @property
    def all_listed(self) -> bool:
        """Whether the kubelet lists every pod that holds devices."""
        keys = _keys(self.listed)
        return all(pod.key in keys for pod in self.pods.values())


def entries_of(pods: Pods) -> Entries:
    """What the checkpoint said when it was last read, of pods that have not ended since."""
    return {
        (uid, container, resource): frozenset(holding.ids)
        for uid, pod in pods.items()
        for (container, resource), holding in pod.holdings.items()
    }


def join(
    before: Record, listed: PodList, entries: Entries, view: View, *, believed: bool, fresh: bool
) -> Record:
    """The record as of now.

    `believed`: the kubelet has heard of all its pods, so that one which it does not list has ended. `fresh`:
    it has just answered; if not, what it listed of a pod that the API server calls ended counts no more.
    """
    shown = {(each.container, each.resource, frozenset(each.ids)): each for each in listed.holdings}
    by_pod: dict[str, dict[tuple[str, str], frozenset[str]]] = {}
    named: dict[str, PodKey] = {}
    for (uid, container, resource), ids in entries.items():
        if not any(text.startswith(OURS) for text in ids):
            continue
        by_pod.setdefault(uid, {})[container, resource] = ids
        if match := shown.get((container, resource, ids)):
            named[uid] = (match.namespace, match.pod)
    judge = _Judge(before.pods, view, named, _keys(listed), believed, fresh)
    pods: dict[str, PodRecord] = {}
    ended: set[int] = set()  # listed holdings of pods that are over
    hidden: list[Holding] = []
    for uid, held in by_pod.items():
        matches = {place: shown.get((*place, ids)) for place, ids in held.items()}
        if not judge.lives(uid):
            ended.update(id(match) for match in matches.values() if match)
            continue
        key = judge.key(uid)
        earlier = before.pods[uid].holdings if uid in before.pods else {}
        holdings = {
            place: matches[place] or _unlisted(earlier.get(place), key, uid, place, ids)
            for place, ids in held.items()
        }
        hidden += (holdings[place] for place, match in matches.items() if match is None)
        watched = uid in view.pods or (uid in before.pods and before.pods[uid].watched)
        pods[uid] = PodRecord(key, watched, holdings)
    kept = [each for each in listed.holdings if id(each) not in ended]
    order = sorted(
        [*kept, *hidden], key=lambda each: (each.namespace, each.pod, each.container, each.resource)
    )
    finished = frozenset(uid for uid, pod in view.pods.items() if pod.finished)
    return Record(pods, listed, PodList(tuple(order), tuple(sorted(listed.containers)), finished))


class _Judge:
    """Whether a pod that the checkpoint names has ended."""

    def __init__(
        self,
        before: Pods,
        view: View,
        named: Mapping[str, PodKey],
        listed: frozenset[PodKey],
        believed: bool,
        fresh: bool,
    ) -> None:
        self._before, self._view, self._named = before, view, named
        self._listed, self._believed, self._fresh = listed, believed, fresh
        known = {pod.key for pod in view.pods.values() if not pod.finished and not pod.ending}
        # Listed pods that may be any of those that are known by their UIDs alone.
        self._unnamed = listed - known - set(named.values())

    def key(self, uid: str) -> PodKey | None:
        known, earlier = self._view.pods.get(uid), self._before.get(uid)
        return known.key if known else self._named.get(uid) or (earlier.key if earlier else None)

    def lives(self, uid: str) -> bool:
        known, key = self._view.pods.get(uid), self.key(uid)
        if uid in self._named and self._fresh:
            return True
        watched = known is not None or (uid in self._before and self._before[uid].watched)
        if watched and self._view.ended(uid):
            return False
        if uid in self._view.contested:
            return True  # a pod's devices are not given away because somebody contests its UID
        if not self._believed:
            return key is not None or not self._view.complete
        return key in self._listed if key else bool(self._unnamed)


def _unlisted(
    earlier: Holding | None, key: PodKey | None, uid: str, place: tuple[str, str], ids: frozenset[str]
) -> Holding:
    """A holding that the kubelet does not list; the same object as before where nothing changed."""
    namespace, pod = key or (NO_NAMESPACE, f"pod with UID {uid}")
    if earlier and earlier.namespace == namespace and earlier.pod == pod and frozenset(earlier.ids) == ids:
        return earlier
    container, resource = place
    # That of a container which the kubelet listed before goes on as it was: it will list it again.
    return Holding(namespace, pod, container, resource, tuple(sorted(ids)), listed=False)


def _keys(listed: PodList) -> frozenset[PodKey]:
    return frozenset((namespace, pod) for namespace, pod, _ in listed.containers) | {
        (each.namespace, each.pod) for each in listed.holdings
    }
