"""The one record of who holds what: PodResources, joined with the kubelet's checkpoint.

PodResources never shows what plain init containers hold, and a kubelet that has just started lists no pod
before it has heard of it, one after the other. The checkpoint shows both, but not whose its entries are, and
it keeps those of pods that have ended. Whether a pod has ended is judged here, and nowhere else: by what the
API server says of it, and by a kubelet that has listed it and does so no more. Time ends nothing.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

import msgspec

from agent.model.holding import Holding, Record, Source, nameless
from agent.model.modes import PREFIXES, SEPARATOR
from agent.model.pod import Pod, Stage

# The kubelet's checkpoint of devices: the one record that shows what plain init containers hold.
#
# Layout: kubelet 1.20 to 1.36, `pkg/kubelet/cm/devicemanager/checkpoint`. It is replaced, by a rename, when
# all devices of a container are allocated and with each list of a plugin. The kubelet forgets pods that have
# ended when somebody asks it for devices or for PodResources; it names them until the next writing.

FILE_NAME = "kubelet_internal_checkpoint"

# Device IDs by pod UID, container and resource.
_Place = tuple[str, str, str]
Entries = Mapping[_Place, frozenset[str]]
Stamp = tuple[int, int, int]  # inode, nanoseconds at which it was written, by the wall clock, and size
UNREAD: Stamp = (0, 0, 0)  # of one that could not be read


class CheckpointUnreadable(Exception):
    """There is a checkpoint, and it cannot be read or understood; the text names it and says why."""


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str]] | None = msgspec.field(name="DeviceIDs", default=None)  # by NUMA node


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[msgspec.Raw] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


class Checkpoint:
    """Reads the file when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self.stamp: Stamp | None = None  # of the file that was read last; None: there is none
        self.entries: Entries = {}
        # By their bytes: each admission replaces the file, in which one entry is new.
        self._known: Mapping[bytes, tuple[_Place, frozenset[str]]] = {}

    def read(self) -> Entries:
        """The entries, the same object until they change. Blocks. Raises CheckpointUnreadable."""
        try:
            stat = self._file.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self.stamp:
                content = msgspec.json.decode(self._file.read_bytes(), type=_File)
                raw = map(bytes, content.data.pod_device_entries or ())
                self._known = {each: self._known.get(each) or _entry(each) for each in raw}
                self.entries = dict(self._known.values())
                self.stamp = stamp
        except FileNotFoundError:
            self.stamp, self.entries = None, {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.stamp = UNREAD
            text = f"the kubelet's checkpoint {self._file} is not readable: {error}"
            raise CheckpointUnreadable(text) from error
        return self.entries


def _entry(raw: bytes) -> tuple[_Place, frozenset[str]]:
    each = msgspec.json.decode(raw, type=_Entry)
    ids = frozenset[str]().union(*(each.device_ids or {}).values())
    return (each.pod_uid, each.container_name, each.resource_name), ids


PodKey = tuple[str, str]  # namespace, name
Place = tuple[str, str]  # container, resource
ByPod = Mapping[str, Mapping[Place, frozenset[str]]]
Matches = Mapping[str, Mapping[Place, Holding]]  # listed holdings by UID
IdSets = tuple[frozenset[str], ...]
NOTHING = Record((), ())
# A watch that speaks so long after a reading has shown all pods of which that reading can know.
LAG_SECONDS = 30.0


@dataclass(frozen=True)
class View:
    """The pods of the node by the API server, under the UIDs that the kubelet has for them."""

    pods: Mapping[str, Pod] = field(default_factory=dict)
    complete: bool = False  # the watch is up: a pod that is not among them is gone, or very new
    contested: frozenset[str] = frozenset()  # UIDs that several pods claim: nobody knows whose they are
    heard: float = -math.inf  # when the watch last spoke, by the monotonic clock in seconds
    # UIDs of pods of which the API server, asked for each of them, has said that they are over.
    over: Collection[str] = frozenset()
    away: bool = False  # it is asked, and does not say now

    @property
    def names(self) -> set[PodKey]:
        return {pod.key for pod in self.pods.values()}

    def ended(self, uid: str) -> bool:
        """Whether a pod that was seen before is gone or has finished, as far as is known."""
        if uid in self.over:
            return True
        if known := self.pods.get(uid):
            return known.finished
        # One that is not there may have come while the watch was interrupted.
        return self.complete and uid not in self.contested


@dataclass(frozen=True, slots=True)
class PodEvidence:
    """All that is remembered of one pod that holds devices; it is dropped as a whole."""

    key: PodKey | None = None  # None: its names are not known yet
    watched: bool = False  # the watch has shown it
    holdings: Mapping[Place, Holding] = field(default_factory=dict)


UNKNOWN = PodEvidence()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Who holds what, and what has to be remembered for the next reading."""

    pods: Mapping[str, PodEvidence] = field(default_factory=dict)  # by UID
    # UIDs that the kubelet listed after the API server had called them ended.
    outlived: frozenset[str] = frozenset()
    # UIDs in the checkpoint that the kubelet of now has listed or written down itself: one that it lists no
    # more has ended.
    heard_of: frozenset[str] = frozenset()
    # UIDs in the checkpoint of which nobody knows the names, and when the first reading with them began.
    nameless: Mapping[str, float] = field(default_factory=dict)
    # Names of those in the checkpoint that were known once: it names some that have ended, and are gone.
    names: Mapping[str, PodKey] = field(default_factory=dict)
    # Those of them whose own objects the watch has shown; of static pods it shows mirrors, which come and go.
    shown: frozenset[str] = frozenset()
    # UIDs that may have been in the checkpoint before the kubelet of now wrote it; None: not known.
    inherited: frozenset[str] | None = None
    restarted: bool = False  # the kubelet of now has started since the first reading
    # UIDs that a kubelet has lost before it or the watch had shown whether they are over; their names, and
    # since when.
    lost: Mapping[str, tuple[PodKey | None, float]] = field(default_factory=dict)
    freed: frozenset[str] = frozenset()  # UIDs of static pods whose GPUs the kubelet gives to the next ones
    listed: Record = NOTHING  # the kubelet's last answer, without devices of pods that have ended since
    joined: Record = NOTHING

    @property
    def entries(self) -> Entries:
        """The checkpoint's entries as last read, of pods that have not ended since."""
        return {
            (uid, *place): holding.id_set
            for uid, pod in self.pods.items()
            for place, holding in pod.holdings.items()
        }


def join(
    before: Evidence,
    listed: Record,
    entries: Entries,
    view: View,
    *,
    same_kubelet: bool,
    fresh: bool,
    read: bool = False,
    over: Collection[PodKey] = (),
) -> Evidence:
    """The record as of now.

    `same_kubelet`: the one that listed is the one of the record before. `fresh`: it has just answered; if
    not, what it listed before the API server called a pod ended counts no more. A pod that it listed
    afterwards, as after a deletion by force, holds its devices until it is listed no more. `read`: the
    entries are the checkpoint's as it is now. `over`: names of pods that have just ended. What the kubelet
    listed of them and had not written down yet goes by these, as nothing else says whose it was.
    """
    view = _without_forged(view, before.names)
    keys = listed.pods.union([each.pod_key for each in listed.holdings])
    before_heard = before.heard_of if same_kubelet else frozenset()
    by_pod = _by_pod(before, entries, view, listed, keys, before_heard)
    # All that is not in the first reading of its checkpoint this kubelet has written itself, admitting it.
    inherited = before.inherited if same_kubelet else None
    inherited = frozenset(by_pod) if inherited is None and read else inherited
    restarted = before.restarted or not (same_kubelet or before.listed.began == -math.inf)
    # Who had not ended by the last reading, and of whom a kubelet that has started since may not know yet.
    found_by_it = (by_pod.keys() if inherited is None else inherited) if restarted else frozenset()
    unheard = found_by_it - (before.nameless.keys() - before.pods.keys())
    # Entries of before have what this kubelet has forgotten, too.
    written = entries.keys() if read else entries.keys() - _forgotten(before)
    matches: Matches = _matches(before, listed, by_pod, view, written)
    freed = _freed(before, view, listed, by_pod, matches, written if fresh and read and same_kubelet else ())
    matches = {uid: found for uid, found in matches.items() if uid not in freed}
    named = {uid: match.pod_key for uid, found in matches.items() for match in found.values()}
    alive = {pod.key for pod in view.pods.values() if not pod.finished and not pod.ending}
    # Listed pods that may be any of those that are known by their UIDs alone.
    unnamed = keys - alive - set(named.values())
    absent = keys - view.names
    unseen = unnamed & absent

    def lives(uid: str, pod: PodEvidence) -> bool:
        if uid in named and (fresh or uid in before.outlived or uid in view.over):
            return True  # who was asked after was not listed then, and is by now
        if uid in freed or uid in view.over or (pod.watched and view.ended(uid)):
            return False
        if pod.key in keys or uid in view.contested:
            return True  # a pod's devices are not given away because somebody contests its UID
        if _handed_on(pod, listed, unseen) or (uid not in before.pods and uid in before.names):
            return False  # it has ended before, and its entry stands until the kubelet writes again
        if pod.key is None:
            # The next of a pod's name, which only its predecessor's object has yet, the watch shows soon.
            shown = view.heard > before.nameless.get(uid, math.inf) + LAG_SECONDS
            return bool(unseen) or not view.complete or ((bool(unnamed) or uid in unheard) and not shown)
        return uid not in before_heard

    pods: dict[str, PodEvidence] = {}
    heard_of: set[str] = set()
    outlived: set[str] = set()
    ended: set[int] = set()  # listed holdings of pods that are over
    hidden: list[Holding] = []
    torn = fresh and not read
    for uid, held in by_pod.items():
        earlier, known = before.pods.get(uid, UNKNOWN), view.pods.get(uid)
        key = known.key if known else named.get(uid, earlier.key)
        found = matches.get(uid, {})
        bare, called = key in keys, key or nameless(uid)
        holdings = {
            place: found.get(place)
            or _unlisted(earlier, called, place, ids, known=(uid, *place) in written, bare=bare, torn=torn)
            for place, ids in held.items()
        }
        pod = PodEvidence(key, known is not None or earlier.watched or uid in before.shown, holdings)
        if key in keys or uid in before_heard or (inherited is not None and uid not in inherited):
            heard_of.add(uid)
        if lives(uid, pod):
            pods[uid] = pod
            if uid in named and (uid in view.over or (pod.watched and view.ended(uid))):
                outlived.add(uid)
            hidden += (each for place, each in holdings.items() if place not in found)
        else:
            ended.update(id(match) for match in found.values())
    lasting = {pod.key for pod in pods.values()} | {pod.key for pod in view.pods.values() if not pod.finished}
    gone = frozenset(over) - lasting
    ended.update(id(each) for each in listed.holdings if gone and each.pod_key in gone)
    # Their entries are left out, too: nothing would say later whose these are.
    kept = tuple(each for each in listed.holdings if id(each) not in ended) if ended else listed.holdings
    listed = replace(listed, holdings=kept)
    order = sorted([*listed.holdings, *hidden], key=attrgetter("namespace", "pod", "container", "resource"))
    finished = frozenset(uid for uid, each in view.pods.items() if each.finished)
    # While the API server is away it may have others, and where there is none it never shows any.
    unshown = keys if view.away else absent if view.complete else frozenset[PodKey]()
    lost = _lost(before, by_pod, view, unshown, before_heard, listed.began)
    joined = Record(
        tuple(order),
        tuple(sorted(listed.containers)),
        finished,
        frozenset(uid for uid, each in view.pods.items() if each.devices and not each.finished)
        | ((pods.keys() & named.keys()) | lost.keys()) - finished,
        parents=before.joined.parents,
        newcomers=_newcomers(before, listed, same_kubelet=same_kubelet),
        leftover=_leftover(() if fresh else before.joined.leftover, by_pod, pods),
        began=listed.began,
        written=listed.written,
        hidden=tuple(hidden),
        kubelet_since=(before.joined if same_kubelet else listed).kubelet_since,
        uids=_uids(pods),
        unshown=unshown,
        away=view.away,
    )
    mute = _nameless(before, by_pod.keys() - view.pods.keys() - named.keys(), listed.began, fresh=fresh)
    former = {uid: key for uid, key in before.names.items() if uid in by_pod or not (fresh and read)}
    own = {uid: view.pods[uid].key for uid in by_pod if uid in view.pods and view.pods[uid].uid == uid}
    names = {**named, **former, **own}
    shown = (before.shown & former.keys()) | own.keys()
    heard, late = frozenset(heard_of), frozenset(outlived)
    return Evidence(pods, late, heard, mute, names, shown, inherited, restarted, lost, freed, listed, joined)


def _handed_on(pod: PodEvidence, listed: Record, unseen: Collection[PodKey]) -> bool:
    """Whether the kubelet lists any of its units for another one.

    One of the pods that nobody shows may be this one, and its later containers get what plain init ones had.
    """
    held = frozenset[str]().union(*(each.id_set for each in pod.holdings.values()))
    takers = [each for each in listed.holdings if not held.isdisjoint(each.ids)]
    had = {container for container, _ in pod.holdings}
    return any(pod.key or each.pod_key not in unseen or each.container in had for each in takers)


def _freed(
    before: Evidence, view: View, listed: Record, by_pod: ByPod, matches: Matches, written: Collection[_Place]
) -> frozenset[str]:
    """UIDs of static pods for whose names the kubelet admits the next ones already, before their mirrors go.

    It lists the name without what it listed of theirs, and has `written`; it starts the next when they have
    ended. One without a mirror may be in admission (kubernetes PR 137534). Shares are asked for by a spec.
    """
    if not written:
        return before.freed.difference(matches)
    found = set[str]()
    mirrors = {uid: pod.key for uid in by_pod if (pod := view.pods.get(uid)) and pod.uid != uid}
    for uid in (uid for uid, key in mirrors.items() if key in listed.pods):
        held, known = before.pods.get(uid, UNKNOWN).holdings, matches.get(uid, ())
        bare = [held.get(each) for each in by_pod[uid] if each not in known and (uid, *each) in written]
        whole = not any(SEPARATOR in text for ids in by_pod[uid].values() for text in ids)
        if whole and any(uid in before.freed or each in before.listed.holdings for each in bare):
            found.add(uid)
    return frozenset(found)


def _without_forged(view: View, names: Mapping[str, PodKey]) -> View:
    """Without objects that claim to be the mirror of a pod of another name: that of a UID never changes."""
    forged = {uid for uid, pod in view.pods.items() if pod.uid != uid and names.get(uid, pod.key) != pod.key}
    return replace(view, pods={uid: view.pods[uid] for uid in view.pods.keys() - forged}) if forged else view


def _leftover(earlier: IdSets, by_pod: ByPod, pods: Mapping[str, PodEvidence]) -> IdSets:
    # Those that are over are not among the pods that live, and some of these have no name.
    unheld = (held.values() for uid, held in by_pod.items() if pods.get(uid, UNKNOWN).key is None)
    return tuple(dict.fromkeys([*earlier, *(frozenset[str]().union(*each) for each in unheld)]))


def _nameless(before: Evidence, uids: Collection[str], began: float, *, fresh: bool) -> Mapping[str, float]:
    """Of `uids`, which the API server does not show, those whose names nobody knows. `began`: the reading.

    One whose entries are read once more after its end stays ended.
    """
    found = {uid for uid in uids if before.pods.get(uid, UNKNOWN).key is None}
    since = {uid: before.nameless.get(uid, began) for uid in found}
    return since if fresh else {**before.nameless, **since}


def _by_pod(
    before: Evidence,
    entries: Entries,
    view: View,
    listed: Record,
    keys: Collection[PodKey],
    heard_of: Collection[str],
) -> dict[str, dict[Place, frozenset[str]]]:
    """Our devices by UID, as the checkpoint has them.

    A kubelet that has just started may forget, and no longer write down, a pod of which it has not heard
    yet: one that lives by the API server's word, or may live while that is away, goes on as it was until this
    kubelet has listed it. What no list shows, as with init containers, goes on until the pod's end; so does
    what a kubelet without its checkpoint has lost of containers that run, until it writes that down again.
    """
    found: dict[str, dict[Place, frozenset[str]]] = {}
    for (uid, container, resource), ids in entries.items():
        if any(text.startswith(PREFIXES) for text in ids):
            found.setdefault(uid, {})[container, resource] = ids
    # Somebody has deleted the file: this kubelet knows all of it still, and the next one nothing.
    shown = set() if entries else {(*each.holder, each.resource, each.id_set) for each in listed.holdings}
    for uid, pod in before.pods.items():
        written = found.get(uid, {})
        if pod.holdings.keys() <= written.keys():
            continue
        known, claimed = view.pods.get(uid), uid in view.pods or uid in view.contested
        if uid in view.over or (known.finished if known else not (view.away or claimed)):
            continue
        # A pod of that name which nobody shows may be the next one.
        unheard = uid not in heard_of and (claimed or pod.key not in keys)
        alone = not written and (known is not None or view.away)
        over = _over(known, written, pod.holdings)
        for place, each in pod.holdings.items():
            lost = each.source is Source.FORGOTTEN and place[0] not in over
            # As of plain init containers, which no list shows.
            hidden = alone and not each.listed
            known_still = claimed and pod.key and (*pod.key, *place, each.id_set) in shown
            if unheard or lost or hidden or known_still:
                found.setdefault(uid, {}).setdefault(place, each.id_set)
    return found


def _over(pod: Pod | None, written: Collection[Place], held: Collection[Place]) -> Collection[str]:
    """Plain init containers that are over, of a pod whose later containers are all written down again."""
    if pod is None or pod.status.phase == "Pending":
        return ()
    early = {each.name for each in pod.containers if each.stage is Stage.INIT}
    late = any(container not in early for container, _ in written)
    return early if late and all(place in written or place[0] in early for place in held) else ()


def _lost(
    before: Evidence,
    by_pod: ByPod,
    view: View,
    listed: Collection[PodKey],
    heard_of: Collection[str],
    now: float,
) -> Mapping[str, tuple[PodKey | None, float]]:
    """Pods in no checkpoint any more, of which neither the watch nor the kubelet of now has ever spoken.

    One that is `listed` goes on by its name, and is over when it is listed no more.
    """
    if not (view.complete or view.away):
        return {}  # nobody will ever say more
    lost = {
        uid: (pod.key, now) for uid, pod in before.pods.items() if not pod.watched and uid not in heard_of
    }
    known = {*by_pod, *view.pods, *view.over}
    return {
        uid: (key, since)
        for uid, (key, since) in {**lost, **before.lost}.items()
        if uid not in known and key not in listed and view.heard <= since + LAG_SECONDS
    }


def _matches(
    before: Evidence, listed: Record, by_pod: ByPod, view: View, written: Collection[_Place]
) -> dict[str, dict[Place, Holding]]:
    """The listed holdings that are those of a UID. `written`: what the checkpoint has.

    The checkpoint may be older than the list, in which another pod has the same units by now.
    """
    shown = {(each.container, each.resource, each.id_set): each for each in listed.holdings}
    # Nor are the units of a pod that is listed by its own name those of a UID that nobody knows any more.
    owners = {pod.key: uid for uid, pod in view.pods.items() if not pod.finished}
    found: dict[str, dict[Place, Holding]] = {}

    def is_another(key: PodKey, uid: str) -> bool:
        """Whether a listed pod lacks what was written down of a UID before: its own it has until it ends."""
        return any(
            (*key, place[0]) in listed.containers
            and (uid, *place) in written
            and ((match := shown.get((*place, ids))) is None or match.pod_key != key)
            for place, ids in by_pod[uid].items()
        )

    for uid, held in by_pod.items():
        called = view.pods[uid].key if uid in view.pods else before.pods.get(uid, UNKNOWN).key
        former = before.names.get(uid)  # rules others out, and takes nothing of a namesake's
        for place, ids in held.items():
            if (match := shown.get((*place, ids))) is None:
                continue
            key = match.pod_key
            may_be = called is None and former in (None, key) and owners.get(key, uid) == uid
            if called == key or (may_be and not is_another(key, uid)):
                found.setdefault(uid, {})[place] = match
    return found


def _forgotten(evidence: Evidence) -> set[tuple[str, str, str]]:
    """Holdings of living pods that the kubelet neither lists nor has in its checkpoint."""
    return {
        (uid, *place)
        for uid, pod in evidence.pods.items()
        for place, holding in pod.holdings.items()
        if holding.source is Source.FORGOTTEN
    }


def _unlisted(
    pod: PodEvidence, names: PodKey, place: Place, ids: frozenset[str], *, known: bool, bare: bool, torn: bool
) -> Holding:
    """A holding that the kubelet does not list; the same object as before where nothing changed.

    `known`: its checkpoint has it. `bare`: it lists the pod. `torn`: its checkpoint cannot be read now, so
    that it may have lost what it listed before.
    """
    earlier = pod.holdings.get(place)
    was_listed = earlier is not None and earlier.listed
    known = known and not (bare and torn and was_listed)
    source = Source.CHECKPOINT if known else Source.FORGOTTEN
    same = earlier and (earlier.namespace, earlier.pod) == names and earlier.id_set == ids
    # One that the kubelet listed before goes on as it was: it will list it again, with its pod.
    stays = was_listed and (known or not bare)
    if earlier and same and (stays or earlier.source is source):
        return earlier
    return Holding(*names, *place, tuple(sorted(ids)), source=source)


def _uids(pods: Mapping[str, PodEvidence]) -> Mapping[PodKey, str]:
    """Of two pods of one name it is not known whose a holding is."""
    names = Counter(pod.key for pod in pods.values())
    return {pod.key: uid for uid, pod in pods.items() if pod.key and names[pod.key] == 1}


def _newcomers(before: Evidence, listed: Record, *, same_kubelet: bool) -> frozenset[PodKey]:
    """The pods that are listed later than all others; those of before, where no more have come since."""
    if not same_kubelet or listed.began < before.listed.began:
        return listed.pods
    return (listed.pods - before.listed.pods) or (listed.pods & before.joined.newcomers)
