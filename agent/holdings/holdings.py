"""Keeps the record of who holds what at hand for reports on pods; decisions read it again."""

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic, time_ns
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.holdings.record import (
    LAG_SECONDS,
    UNREAD,
    Checkpoint,
    CheckpointUnreadable,
    Entries,
    Evidence,
    PodEvidence,
    PodKey,
    Stamp,
    View,
    join,
)
from agent.kit.tasks import Backoff, Cell
from agent.kubelet.podresources import (
    LIST_SECONDS,
    PATIENCE_SECONDS,
    Identity,
    KubeletSocket,
    PodResources,
    PodResourcesUnavailable,
)
from agent.model.cgroup import STATIC_UID
from agent.model.holding import Holding, Record
from agent.model.modes import SEPARATOR
from agent.model.pod import Pod

log = structlog.get_logger()

REFRESH_SECONDS = 5.0
# While it cannot be read the agent is not ready, and a kubelet that restarts is back within a second or two.
RETRY_SECONDS = 0.5
# After an Allocate: the kubelet records it some milliseconds later, and pods seldom come alone. It is also
# the shortest time between two reads, for the socket's rate limit is everybody's on the node.
SOON_SECONDS = 0.5
BURST_SECONDS = 3.0
# Between lists that are sent for the checkpoint's sake.
REWRITE_SECONDS, REWRITE_LONGEST_SECONDS = 30.0, 1800.0
# A reading in whose middle the kubelet restarts is made again: of whom an answer is would not be known.
READINGS = 3
# The time at which a file was written may lie so much behind the wall clock: the kernel counts in ticks.
TICK_SECONDS = 0.01


class HoldingsWatch:
    """The record, read again for decisions, soon after each Allocate, at a pod's end, and on a timer."""

    def __init__(self, client: PodResources, checkpoints: Path | None = None) -> None:
        """`checkpoints`: the folder of the kubelet's checkpoint; None: PodResources count alone."""
        self.client = client
        self._checkpoint = Checkpoint(checkpoints) if checkpoints else None
        self._socket: Identity | None = None  # of the kubelet, as seen last
        self._answered_by: Identity | None = None  # whose answer the record is
        self._record = Evidence()
        # Pods whose objects are gone, until the kubelet says whether their containers are, too.
        self._doubted: Mapping[str, PodEvidence] = {}
        self._vanished: set[str] = set()
        # The GPUs that pods had, or may have got, when they left the record, by UID: until somebody looks for
        # their processes there.
        self.left_behind: dict[str, frozenset[str]] = {}
        # UUIDs of those that the node has, as far as is known.
        self.gpus: Callable[[], Collection[str]] | None = None
        # Pods that the kubelet lists and the API server does not show, and when the first such reading began;
        # with those of the kubelet before that the one of now has not listed yet.
        self._unshown: Mapping[PodKey, float] = {}
        self._differs = False  # whether a call has read something else than what was published last
        # The pods of this node by the API server, and the cell that is published when they change.
        self.view: Callable[[], View] = View
        self.pod_changes: Cell[Any] = Cell(None)
        # The GPU of each instance, both by UUID, as the inventory knows them.
        self.instances: Callable[[], Mapping[str, str]] = dict
        # Asks the API server for pods, by UID, beside the watch: the view shows what it answered. Of names
        # that the kubelet lists one without an object may be the one that runs.
        self.ask_after: Callable[[Mapping[str, PodKey], Collection[PodKey]], Awaitable[None]] | None = None
        # Has the kubelet write its checkpoint, by another list: without what it has freed since.
        self.rewrite: Callable[[], None] | None = None
        # Of each resource: device IDs that are being handed out, or were and are in no reading yet.
        self.grants: list[Callable[[], frozenset[str]]] = []
        self.given: list[Callable[[], frozenset[str]]] = []  # those of them that were
        self._rewrites = Backoff(REWRITE_SECONDS, REWRITE_LONGEST_SECONDS, jitter=0.0)
        self._doubtful: frozenset[str] = frozenset()  # UIDs for which it is to be written
        self._rewrite_at = math.inf
        self._checkpoint_known = False  # whether this process has read it at least once
        self._unreadable: str | None = None  # the checkpoint, and why
        # Its file as seen last, and when that reading began, by the monotonic clock and that of the wall.
        self._seen: tuple[Stamp | None, float, int] = (None, -math.inf, 0)
        self._written = -math.inf  # a moment after which that file was written
        self.cell: Cell[Record | None] = Cell(None)  # None: never read, or not readable now
        # Published when somebody holds something else, also while the kubelet does not answer: `gpus_by_pod`.
        self.holders: Cell[int] = Cell(0)
        self.problem: str | None = "PodResources has not been read yet"
        self._patience = LIST_SECONDS  # of `refresh`
        self._allocations: Cell[int] = Cell(0)

    @property
    def began(self) -> float:
        """When the newest reading began, by the monotonic clock in seconds."""
        return self._record.listed.began

    @property
    def newest(self) -> Record:
        """The record by that reading, whether `cell` shows it or not."""
        return self._record.joined

    @property
    def published(self) -> float:
        """The same of the newest reading of which `cell` shows all, also where it brought nothing new."""
        return -math.inf if self._differs else self.began

    def gpus_by_pod(self) -> dict[str, frozenset[str]]:
        """The GPUs that each pod holds something of, by the pod's UID, or held until its object went."""
        found = {
            uid: self._whole(frozenset[str]().union(*(each.gpus for each in pod.holdings.values())))
            for uid, pod in {**self._doubted, **self._record.pods}.items()
        }
        for uid, gpus in self._gpus_by_claims().items():
            found[uid] = found.get(uid, frozenset()) | gpus
        return found

    def _gpus_by_claims(self) -> Mapping[str, frozenset[str]]:
        """The same of claims' devices, whose holders have no entry in the kubelet's checkpoint of plugins."""
        claims = [each for each in self._record.joined.holdings if each.share]
        uids = {pod.key: uid for uid, pod in self.view().pods.items()} if claims else {}
        found: dict[str, frozenset[str]] = {}
        for each in claims:
            if uid := uids.get((each.namespace, each.pod)):
                found[uid] = found.get(uid, frozenset()) | each.gpus
        return found

    def take_vanished(self) -> Collection[str]:
        """UIDs of pods that asked for devices and went before any record had shown what they held; once."""
        vanished, self._vanished = self._vanished, set()
        return vanished

    def _note_gone(self, before: Collection[str], after: Collection[str], new: Record) -> bool:
        """Whether pods, by UID, leave the record by a change to a `new` one; called before that is kept.

        One may have got what was handed out after the reading that showed it, and nobody has by this one.
        """
        gone = frozenset(before).difference(after)
        if gone:
            held = self.gpus_by_pod()
            ids = frozenset[str]().union(*(each() for each in self.given))
            ids = ids.difference(*(each.ids for each in new.holdings)) if ids else ids
            given = self._whole(frozenset(text.partition(SEPARATOR)[0] for text in ids))
            if self.gpus:
                given &= frozenset(self.gpus())  # a kubelet may ask for IDs of a plugin before this one
            for uid in gone:
                self.left_behind[uid] = given.union(held.get(uid, ()), self.left_behind.get(uid, ()))
        return bool(gone)

    def known_pods(self) -> frozenset[str] | None:
        """UIDs of all pods that the API server or the kubelet knows; None: that cannot be said now.

        Those of static pods that have no mirror and hold nothing are not among them: `may_be_static`.
        """
        view = self.view()
        unnamed = self._unnamed(view)
        # Of a pod that the kubelet alone knows it says no UID; the watch may show it yet.
        late = any(view.heard <= self._unshown.get(key, math.inf) + LAG_SECONDS for key in unnamed)
        if self.problem or not view.complete or late:
            return None
        return frozenset(view.pods.keys() | view.contested | self.gpus_by_pod().keys())

    def may_be_static(self, uid: str) -> frozenset[tuple[PodKey, float]]:
        """The pods that the kubelet lists, whose UIDs nobody says, and which may have this one.

        Each is the same until its UID is known or a kubelet that has listed it does so no more.
        """
        if STATIC_UID.fullmatch(uid) is None:
            return frozenset()
        return frozenset((key, self._unshown.get(key, self.began)) for key in self._unnamed(self.view()))

    def _unnamed(self, view: View) -> frozenset[PodKey]:
        """Pods that the kubelet lists, and neither an object nor the checkpoint says their UIDs."""
        held = {
            pod.key
            for pod in self._record.pods.values()
            if any(each.listed for each in pod.holdings.values())
        }
        return self._record.joined.pods - view.names - held

    def nameless_gpus(self) -> frozenset[str]:
        """GPUs of which something is held by a pod whose UID is not known."""
        named = {id(each) for pod in self._record.pods.values() for each in pod.holdings.values()}
        shown = {pod.key for pod in self.view().pods.values()}
        nameless = (
            each.gpus
            for each in self._record.joined.holdings
            if id(each) not in named and not (each.share and (each.namespace, each.pod) in shown)
        )
        return self._whole(frozenset[str]().union(*nameless))

    def _whole(self, uuids: frozenset[str]) -> frozenset[str]:
        """With the GPUs of instances in their place, also of those that somebody has destroyed since."""
        gpus = {**self._record.joined.parents, **self.instances()}
        return frozenset(gpus.get(uuid, uuid) for uuid in uuids)

    def granted(self) -> frozenset[str]:
        """Device IDs of all resources that are being handed out, or were and are in no reading yet."""
        return frozenset[str]().union(*(each() for each in self.grants))

    def allocated(self) -> None:
        """The kubelet was handed devices: read soon who has got them."""
        self._allocations.publish(self._allocations.value + 1)

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_pods)
            with self.client.keeping_connection():
                seen = self._allocations.version
                # Of a pod that the kubelet goes on listing. Not more often: a List during an Allocate has the
                # kubelet forget what is in flight (kubernetes PR 137534).
                ends = Backoff(RETRY_SECONDS, REFRESH_SECONDS)
                while True:
                    await self.refresh()
                    self._have_it_written()
                    if self.problem:
                        pause = RETRY_SECONDS
                    elif self._record.outlived:
                        pause = ends.next()
                    else:
                        ends.reset()
                        pause = REFRESH_SECONDS
                    with anyio.move_on_after(pause) as waited:
                        seen = await self._allocations.wait_change(seen)
                    # Pods come in bursts, and a read in the middle holds theirs up: wait for the end.
                    with anyio.move_on_after(BURST_SECONDS):
                        while not waited.cancelled_caught:
                            with anyio.move_on_after(SOON_SECONDS) as waited:
                                seen = await self._allocations.wait_change(seen)

    def _have_it_written(self) -> None:
        """Where nobody says whether pods that only the checkpoint names have ended: the kubelet by a new one.

        It frees what they held with each List, and names them until the next writing, maybe days later.
        """
        pods, listed = self._record.pods if self.problem is None else {}, self._record.joined.pods
        view = self.view()
        shown = view.pods.keys() if view.complete else ()
        doubtful = frozenset(uid for uid, pod in pods.items() if pod.key not in listed and uid not in shown)
        now = anyio.current_time()
        if not doubtful <= self._doubtful:
            self._rewrites.reset()
            self._rewrite_at = now + self._rewrites.next()
        self._doubtful = doubtful
        if doubtful and self.rewrite and now >= self._rewrite_at:
            self._rewrite_at = now + self._rewrites.next()
            log.info("checkpoint_to_be_written", pods=sorted(doubtful))
            self.rewrite()

    async def _follow_pods(self) -> None:
        """A pod that has ended by the API server holds nothing from that moment on.

        The next one is bound by the same event, and may be here before the next reading. Whether containers
        of an object that is gone have ended, too, the kubelet says in that reading.
        """
        seen: Mapping[str, Pod] = {}
        async for _ in self.pod_changes.values():
            record, view = self._record, self.view()
            pods = {**seen, **view.pods}
            ended = frozenset(
                uid
                for uid, pod in pods.items()
                if pod.finished or uid not in view.pods.keys() | view.contested
            )
            asked = {uid for uid, pod in seen.items() if pod.devices and not pod.finished}
            seen = view.pods
            gone = any(pod.watched and (uid in ended or uid not in pods) for uid, pod in record.pods.items())
            if not gone and ended <= record.joined.ended:
                continue
            over = {pods[uid].key for uid in ended if view.ended(uid)}
            doubted = (record.joined.unfinished | asked) - view.pods.keys()
            before = {**self._doubted, **record.pods}
            self._vanished |= asked - before.keys() - view.pods.keys() - view.contested
            record = join(
                record, record.listed, record.entries, view, same_kubelet=True, fresh=False, over=over
            )
            left = {uid: before[uid] for uid in doubted & before.keys() - record.pods.keys()}
            self._note_gone(before, left.keys() | record.pods.keys(), record.joined)
            self._doubted = left
            # Units that were granted a moment ago are in no record yet: pairing drops them by the UID.
            unfinished = record.joined.unfinished | doubted
            self._record = replace(record, joined=replace(record.joined, ended=ended, unfinished=unfinished))
            if doubted:
                self.allocated()  # as after an Allocate: the kubelet's word comes next
            self.holders.publish(self.holders.value + 1)
            if self.problem is None:
                self._publish()

    async def refresh(self) -> Record | None:
        """Read again now; None: it is not known who holds what, `problem` says why.

        Within 2 s, or 15 where the kubelet has not answered yet, or was slow when it did so last.
        """
        asked, at = monotonic(), anyio.current_time()
        try:
            await self.look(self._patience)
            slow = anyio.current_time() - at > LIST_SECONDS / 2
            self._patience = PATIENCE_SECONDS if slow else LIST_SECONDS
            problem = self._blind()
        except PodResourcesUnavailable as error:
            if self.began > asked:  # a later question was answered: what has been found since counts
                return self._record.joined if self.problem is None else None
            problem = str(error)
            # An agent takes no GPU over before the first answer, however slow the kubelet is.
            if self.began == -math.inf:
                self._patience = PATIENCE_SECONDS
            if self.cell.value is not None:
                self.cell.publish(None)
        if problem != self.problem:
            if problem:
                log.warning("pod_resources_unavailable", problem=problem)
            else:
                log.info("pod_resources_readable")
            self.problem = problem
        if problem:
            return None
        self._publish()
        return self._record.joined

    async def look(self, deadline: float = LIST_SECONDS) -> Record:
        """Who holds what, by a reading of this moment. Raises PodResourcesUnavailable.

        The checkpoint is read first: a pod that it names and the kubelet does not list afterwards has ended.
        """
        give_up = anyio.current_time() + deadline
        if self._socket is None:
            self._socket = await self._kubelet()
        for _ in range(READINGS):
            # That of the end of the reading before: one look says that nothing has changed since then.
            before, began, wall = self._socket, monotonic(), time_ns()
            entries = await self._entries()
            readable = self._unreadable is None
            written = self._written_after(entries, began, wall)
            # Without a file nothing is known of what this kubelet found.
            read = readable and bool(entries)
            listed = await self.client.list(give_up - anyio.current_time())
            self._socket = after = await self._kubelet()
            if before == after:
                # Not before: what a reading has found that the kubelet did not answer stands nowhere.
                self._checkpoint_known |= readable
                since = began if readable and self._checkpoint and self._checkpoint.stamp else -math.inf
                listed = replace(listed, began=began, written=written, kubelet_since=since)
                return self._joined(listed, entries, after, read=read)
        raise PodResourcesUnavailable(f"the kubelet restarted while it was asked by {self.client.path}")

    async def confirm(self, holdings: Collection[Holding]) -> Record:
        """The record after the API server was asked for holders that the kubelet does not list.

        For when the kubelet offers what they hold: a kubelet that was away may know of an end that neither
        the watch nor the checkpoint shows yet. Only the API server's word ends them, as `confirm_names` says
        of names that are listed. Within some 1 s.
        """
        doubted = {
            uid: pod.key
            for uid, pod in self._unlisted().items()
            if pod.key and any(each in holdings for each in pod.holdings.values())
        }
        if doubted:
            await self._ask_after(doubted, self._record.joined.pods)
        return self._record.joined

    async def confirm_names(self, names: Collection[PodKey]) -> Record | None:
        """The same of all that pods of these listed names hold and no list shows; None: that is nothing.

        As with a pod whose name is another's by now. Of whom the kubelet lists any device, nobody is asked
        after; one whose object is gone, and has no other in its place, runs as long as it is listed.
        """
        doubted = {uid: pod.key for uid, pod in self._unlisted().items() if pod.key and pod.key in names}
        if not doubted:
            return None
        await self._ask_after(doubted, names)
        return self._record.joined

    def _unlisted(self) -> Mapping[str, PodEvidence]:
        """The pods of which the newest reading lists nothing: others run, though deleted by force."""
        listed = {id(each) for each in self._record.listed.holdings}
        return {
            uid: pod
            for uid, pod in self._record.pods.items()
            if listed.isdisjoint(map(id, pod.holdings.values()))
        }

    async def _ask_after(self, pods: Mapping[str, PodKey], listed: Collection[PodKey]) -> None:
        if self.ask_after:
            await self.ask_after(pods, listed)
            before, view = self._record, self.view()
            record = join(before, before.listed, before.entries, view, same_kubelet=True, fresh=False)
            # `_follow_pods` may not have heard of those yet whose objects are gone, and these run.
            dropped = before.pods.keys() - record.pods.keys() - view.pods.keys() - frozenset(view.over)
            if self._note_gone(before.pods, dropped | record.pods.keys(), record.joined):
                self.holders.publish(self.holders.value + 1)
            self._doubted = {**self._doubted, **{uid: before.pods[uid] for uid in dropped}}
            ended = record.joined.ended | before.joined.ended
            unfinished = record.joined.unfinished | (before.joined.unfinished - ended - frozenset(view.over))
            self._record = replace(record, joined=replace(record.joined, ended=ended, unfinished=unfinished))
            if self.problem is None:
                self._publish()

    def _joined(self, listed: Record, entries: Entries, kubelet: Identity | None, *, read: bool) -> Record:
        """The record by this reading; it is kept unless one that began later was answered before."""
        same, view = kubelet == self._answered_by, self.view()
        record = join(self._record, listed, entries, view, same_kubelet=same, fresh=True, read=read)
        # One that somebody has destroyed may still have a holder.
        parents = {**record.joined.parents, **self.instances()}
        record = replace(record, joined=replace(record.joined, parents=parents))
        gone = False
        if listed.began >= self._record.listed.began:
            if not record.outlived <= self._record.outlived:
                self.allocated()  # as after an Allocate: nothing else says when these pods have ended
            gone = self._note_gone({**self._doubted, **self._record.pods}, record.pods, record.joined)
            # Those that a kubelet that has just started has not heard of yet may come again.
            unheard = self._unshown.keys() - (self._record.joined.pods if same else ())
            self._record, self._answered_by, self._doubted = record, kubelet, {}
            unshown = (record.joined.pods | unheard) - view.names
            self._unshown = {key: self._unshown.get(key, listed.began) for key in unshown}
        differs = record.joined != self.cell.value
        # Read by a call: it is published by the next `refresh`, which may fail.
        self._differs |= differs
        if differs or gone:
            self.holders.publish(self.holders.value + 1)
        return record.joined

    async def _entries(self) -> Entries:
        """The checkpoint's entries, as they were when it could be read last."""
        if self._checkpoint is None:
            return {}
        try:
            entries = await anyio.to_thread.run_sync(self._checkpoint.read)
        except CheckpointUnreadable as error:
            if self._unreadable is None:
                log.warning("checkpoint_unreadable", problem=str(error))
            self._unreadable = str(error)
            return self._record.entries
        self._unreadable = None
        return entries

    def _written_after(self, entries: Entries, began: float, wall: int) -> float:
        """A moment after which the kubelet wrote these entries down; `began` where there is no file."""
        file = self._checkpoint
        now = file.stamp if file else None  # once: another reading's thread may set it meanwhile
        if file is None or now is None:
            return began
        if now is UNREAD:
            return self._written  # they are those of before
        if entries is not file.entries:
            return -math.inf  # another reading has found later ones meanwhile
        stamp, before, wall_before = self._seen
        # A kubelet whose disk stalls puts a file in place long after it has written it.
        if stamp != now and now[1] >= wall_before - TICK_SECONDS * 1e9:
            self._written = max(self._written, before)
        self._seen = (now, began, wall)
        return self._written

    async def _kubelet(self) -> Identity | None:
        """Which kubelet it was that answered: each makes its own socket; None: that does not matter."""
        return await KubeletSocket(self.client.path).identity() if self._checkpoint else None

    def _blind(self) -> str | None:
        """Why it is not known who holds what, though the kubelet answers."""
        if self._unreadable is None:
            return None
        view, listed = self.view(), {names[:2] for names in self._record.listed.containers}
        if not (self._checkpoint_known or view.complete):
            return f"which pods the kubelet has not heard of yet is not known: {self._unreadable}"
        # A kubelet that has just started lists nothing of a pod of which it has not heard yet.
        unheard = [pod for pod in view.pods.values() if not self._checkpoint_known and pod.key not in listed]
        shown = [view.pods[uid] for uid in self._record.pods if uid in view.pods]
        hiding = {
            "/".join(pod.key)
            for pod in view.pods.values()  # some have two UIDs
            if (pod.init_devices or (pod in unheard and pod.devices))
            and not pod.finished
            and not any(pod is each for each in shown)
        }
        names = ", ".join(sorted(hiding))
        return f"what containers of {names} hold is not known: {self._unreadable}" if hiding else None

    def _publish(self) -> None:
        if self._differs or self._record.joined != self.cell.value:
            self._differs = False
            self.holders.publish(self.holders.value + 1)
            self.cell.publish(self._record.joined)
