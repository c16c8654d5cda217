"""GPUs that are offered in no mode: cordoned by a person, or used by somebody whom nothing explains."""

import math
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.cluster.api import now
from agent.cluster.node import OwnNode
from agent.inventory.snapshot import Snapshot
from agent.kit import files
from agent.kit.files import read_text
from agent.kit.tasks import Cell
from agent.model.cgroup import ContainerRef
from agent.model.gpu import Gpu
from agent.model.holding import Holding, Record
from agent.model.modes import PREFIXES, BadDeviceId, GpuMode, Mode, Offering, parse

# Those that are cordoned drain, and stay off until they are let back.
#
# A node annotation names them, by hand or by `gpu-node-agent cordon`: `gpu-node-agent.io/cordon: "3,
# GPU-1b2c...=fan is noisy"`, or JSON with a reason and a time for each.

ANNOTATION: Final = "gpu-node-agent.io/cordon"
LONGEST_REASON: Final = 200
CORDONED: Final = "cordoned"
UUID_PREFIX: Final = "GPU-"


class CordonsUnreadable(Exception):
    """The annotation cannot be read; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """Why a GPU is not offered, and since when (RFC 3339; empty: not known)."""

    reason: str = ""
    since: str = ""

    @property
    def words(self) -> str:
        since = f" since {self.since}" if self.since else ""
        return f"{CORDONED}{since}" + (f": {self.reason}" if self.reason else "")


Cordons = Mapping[str, Cordon]  # by UUID
NO_CORDONS: Final[Cordons] = MappingProxyType({})


def cordoned(
    targets: Mapping[str, GpuMode], gpus: Mapping[str, Gpu], cordons: Cordons
) -> Mapping[str, GpuMode]:
    """The targets, with cordoned GPUs off."""
    return {
        uuid: closed(target, cordons[uuid].words) if uuid in cordons and uuid in gpus else target
        for uuid, target in targets.items()
    }


def decoded(text: str, gpus: Mapping[str, Gpu] | None) -> Cordons:
    """The cordons that an annotation asks for, of GPUs of this node. Raises CordonsUnreadable.

    `gpus` None: whatever it names, by UUID. As JSON, in which the agent writes, it may name GPUs by UUID that
    have left the node: their cordons hold up no other, and count again should they come back.
    """
    named: dict[str, Cordon] = {}
    gone: dict[str, Cordon] = {}
    if text.lstrip().startswith("{"):
        try:
            document = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise CordonsUnreadable(
                f"annotation {ANNOTATION} is no JSON object of objects: {error}"
            ) from error
        for gpu, entry in document.items():
            cordon = Cordon(_line(entry.get("reason")), _line(entry.get("since")))
            away = gpus is not None and gpu not in gpus and gpu.startswith(UUID_PREFIX)
            (gone if away else named)[gpu] = cordon
    else:
        for part in filter(None, (each.strip() for each in text.split(","))):
            gpu, _, reason = part.partition("=")
            named[gpu.strip()] = Cordon(_line(reason))
    if gpus is None:
        return named
    by_name = {str(gpu.index): uuid for uuid, gpu in gpus.items()} | {uuid: uuid for uuid in gpus}
    unknown = sorted(set(named) - set(by_name))
    if unknown:
        known = ", ".join(f"{gpu.index} = {uuid}" for uuid, gpu in gpus.items()) or "none"
        raise CordonsUnreadable(
            f"annotation {ANNOTATION} names {', '.join(unknown)[:LONGEST_REASON]}; this node's GPUs: {known}"
        )
    return {by_name[name]: cordon for name, cordon in named.items()} | gone


def dated(cordons: Cordons, known: Cordons, at: str) -> Cordons:
    """Each with a time: that of `known`, else `at`."""
    return {
        uuid: one if one.since else replace(one, since=known[uuid].since if uuid in known else at)
        for uuid, one in cordons.items()
    }


def encoded(cordons: Cordons) -> str:
    document = {uuid: {"reason": one.reason, "since": one.since} for uuid, one in sorted(cordons.items())}
    return msgspec.json.encode(document).decode()


def _line(text: object) -> str:
    """One line of text, whatever was written there."""
    return " ".join(text.split())[:LONGEST_REASON] if isinstance(text, str) else ""


# GPUs that are offered in no mode because somebody is on them whom the record does not explain: pure.

Withheld = Mapping[str, str]  # why, by UUID


def strangers_by_gpu(pods: Record, gpus: Mapping[int, str]) -> dict[str, tuple[Holding, str]]:
    """A holding, and the device ID in it that no resource of this agent uses, of each GPU that has one.

    Such are the replicas of NVIDIA's plugin (`GPU-...::3`), which this agent did not hand out. `gpus`: the
    UUIDs of the node's GPUs by index, by which that plugin may call whole ones.
    """
    found: dict[str, tuple[Holding, str]] = {}
    known = frozenset(gpus.values())
    for holding in pods.holdings:
        if holding.readable and holding.gpus <= known:
            continue
        ours = holding.resource.startswith("nvidia.com/gpu")
        for text in holding.ids:
            gpu = _gpu_of_stranger(text, gpus) if text.startswith(PREFIXES) or ours else None
            if gpu and gpu not in found:
                found[gpu] = (holding, text)
    return found


def _gpu_of_stranger(text: str, gpus: Mapping[int, str]) -> str | None:
    """The GPU of a device ID that cannot be read; None: it can be, or is of none of these."""
    if text.isascii() and text.isdecimal() and len(text) < 4:
        return gpus.get(int(text))
    named = [uuid for uuid in gpus.values() if text.startswith(uuid) and not text[len(uuid) :][:1].isalnum()]
    try:
        known = parse(text).gpu in gpus.values()
    except BadDeviceId:
        known = False
    return None if known or not named else max(named, key=len)


def held_by_strangers(pods: Record, gpus: Mapping[str, Gpu]) -> Withheld:
    """GPUs of which a pod holds something by a device ID that this agent cannot read."""
    found = strangers_by_gpu(pods, {gpu.index: uuid for uuid, gpu in gpus.items()})
    return {
        uuid: f"{holding.namespace}/{holding.pod} holds it as {text} of {holding.resource}, which is no "
        "device ID of this agent: another device plugin handed it out; it is offered when that pod has ended"
        for uuid, (holding, text) in found.items()
    }


def without(targets: Mapping[str, GpuMode], withheld: Withheld) -> Mapping[str, GpuMode]:
    """The targets, with withheld GPUs off."""
    return {
        uuid: closed(target, withheld[uuid]) if uuid in withheld and target.mode is not Mode.OFF else target
        for uuid, target in targets.items()
    }


def closed(target: GpuMode, reason: str) -> GpuMode:
    """A target that takes nobody any more. A device of DRA stays one: its taint keeps claims away."""
    if target.dra:
        return replace(target, offering=Offering.CLOSED, reason=reason)
    return GpuMode(reason=reason, refused=True)


# Which GPUs are cordoned: read from the node's annotation, kept in a file for when that is away.

log = structlog.get_logger()


class CordonBook:
    """Publishes the cordons in force. With a Node object its annotation has the say, else the file."""

    def __init__(self, file: Path, inventory: Cell[Snapshot], node: OwnNode | None) -> None:
        self._file = file
        self._inventory = inventory
        self._node = node
        self.cell: Cell[Cordons] = Cell(NO_CORDONS)
        self.problem: str | None = None  # why the annotation is not obeyed

    def remarks(self) -> list[str]:
        """Cordons that cannot be read."""
        return [f"{self.problem}; the GPUs cordoned before stay so"] if self.problem else []

    async def restore(self) -> None:
        """Take up what was in force before this process."""
        try:
            text = await anyio.to_thread.run_sync(read_text, self._file)
            # Each GPU by UUID: whether it is on this node shows later.
            self.cell.publish(decoded(text, None))
        except (OSError, UnicodeDecodeError):
            return
        except CordonsUnreadable as error:
            log.warning("cordons_unreadable", file=str(self._file), problem=str(error))

    async def run(self) -> None:
        """Follow annotation and GPUs, keep the file; for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep)
            if self._node:
                group.start_soon(self._on, self._node.changes, self._node)
                group.start_soon(self._on, self._inventory, self._node)

    async def add(self, uuid: str, reason: str) -> None:
        """Cordon a GPU. Raises ApiError, CordonsUnreadable."""
        known = self.cell.value
        await self._write({**known, uuid: Cordon(reason, known[uuid].since if uuid in known else now())})

    async def remove(self, uuid: str) -> None:
        """Let a GPU back. Raises as `add` does."""
        await self._write({one: cordon for one, cordon in self.cell.value.items() if one != uuid})

    async def _write(self, cordons: Cordons) -> None:
        if self._node:
            if self.problem:
                raise CordonsUnreadable(f"{self.problem}; mend or remove it first")
            await self._node.write_metadata({}, {ANNOTATION: encoded(cordons) if cordons else None})
        self._put(cordons)

    async def _on(self, cell: Cell[Any], node: OwnNode) -> None:
        async for _ in cell.values():
            gpus = {state.uuid: state.gpu for state in self._inventory.value.gpus}
            if node.labels() is None or not gpus:
                continue  # neither is known yet: what was in force before stays
            self._read(node.annotations().get(ANNOTATION, ""), gpus)

    def _read(self, text: str, gpus: Mapping[str, Gpu]) -> None:
        try:
            found = dated(decoded(text, gpus), self.cell.value, now())
        except CordonsUnreadable as error:
            if self.problem != str(error):
                log.warning("cordons_unreadable", problem=str(error))
            self.problem = str(error)
            return
        self.problem = None
        self._put(found)

    def _put(self, cordons: Cordons) -> None:
        before = self.cell.value
        if cordons == before:
            return
        for uuid in cordons.keys() - before.keys():
            log.info("gpu_cordoned", gpu=uuid, reason=cordons[uuid].reason or None)
        for uuid in before.keys() - cordons.keys():
            log.info("gpu_uncordoned", gpu=uuid)
        self.cell.publish(MappingProxyType(dict(cordons)))

    async def _keep(self) -> None:
        written = self.cell.value
        async for cordons in self.cell.values():
            if cordons == written:
                continue
            content = encoded(cordons).encode()
            try:
                await anyio.to_thread.run_sync(files.write, self._file.parent, self._file.name, content)
            except OSError as error:
                log.warning("cordons_not_kept", file=str(self._file), problem=str(error))
            else:
                written = cordons


# Processes that outlive their pod's end on a GPU.

# Processes that outlive their pod's end on a GPU: it is withheld until they have gone.
#
# After a deletion by force a pod holds nothing by any record, and a process of it that hangs in the driver
# has its memory on the GPU still. Whose it was, its cgroup says. Of processes of others nothing follows here.
#
# Who ended while no agent ran is found once, when a GPU is seen first: a process on it, of a pod that neither
# the API server nor the kubelet knows.

LOOK_SECONDS = 2.0  # between looks at processes that have stayed
IDLE_SECONDS = 30.0  # a namesake that holds the same changes the record, and nothing is published
# Of pods that no record has shown, for a GPU whose processes cannot be read: closed, it takes no others.
MOST_LEFT = 10_000
UNREAD: Final = (
    "a pod on it has, or may have, ended, and the driver does not say which processes are on the GPU; it is "
    "offered when that can be read again and none has stayed"
)

Processes = Callable[[Collection[str]], Awaitable[Mapping[str, Collection[int]]]]
Owners = Callable[[Iterable[int]], Mapping[int, ContainerRef | None]]


@dataclass(frozen=True, slots=True)
class Departed:
    """Finds pods that ended before this process, or any record, knew what they held."""

    gpus: Callable[[], Collection[str]]  # all of the node
    pods: Callable[[Iterable[int]], Mapping[int, str]]  # UIDs of processes' pods; it blocks
    # UIDs of all pods that the API server or the kubelet knows; None: these are not known now.
    known: Callable[[], Collection[str] | None]
    # UIDs of pods that have gone, and of which no record said what they held; each is handed out once.
    vanished: Callable[[], Collection[str]] = tuple
    # The pods whose UIDs nobody says, one of which may have one that is not known. One that ended and came
    # again is another; one that a kubelet that has just started lists again is not.
    may_live: Callable[[str], Collection[Hashable]] = lambda _: ()
    appeared: Cell[Any] | None = None  # published when `gpus` change


class Lingering:
    """Looks at a GPU's processes when a holder of it has ended."""

    def __init__(
        self,
        holders: Callable[[], Mapping[str, frozenset[str]]],
        processes: Processes,
        owners: Owners,
        record: Cell[Any],
        departed: Departed | None = None,
        left_behind: dict[str, frozenset[str]] | None = None,
    ) -> None:
        """`holders`: GPUs by the UIDs of the pods that hold them. `processes` leaves out what cannot be read.

        `left_behind`: those that pods had, or may have got, which have gone since the last look; each look
        takes them out. `owners` blocks. `record` is published when `holders` change. `departed` None: nobody
        is looked for whom this process has not seen.
        """
        self._holders = holders
        self._processes = processes
        self._owners = owners
        self._record = record
        self._departed = departed
        self._left_behind = {} if left_behind is None else left_behind
        self._recalled: set[str] = set()
        self._doubted: dict[str, set[str]] = {}  # GPUs by UIDs of pods that nobody knows, and that may live
        self._may_be: dict[str, set[Hashable]] = {}  # the pods that these may have been, by their UIDs
        self._recalled_on: set[str] = set()  # GPUs that were read for them
        self._unread: frozenset[str] = frozenset()  # GPUs that could not be read for them at the newest look
        self._swept = -math.inf  # when all GPUs were looked at last for pods that no record has shown
        self._before: Mapping[str, frozenset[str]] = {}
        self._left: dict[str, set[str]] = {}  # UIDs of pods that have ended and may have processes, by GPU
        self.looks = Cell(0)  # published after each look that has changed anything
        self.found: Withheld = {}  # GPUs with a process of a pod that held them before

    @property
    def unsettled(self) -> frozenset[str]:
        """GPUs of which a holder has ended, by the record of now, and whose processes may be there still."""
        return frozenset(self._ended()).union(self._left, self._unread, *self._left_behind.values())

    def ended(self, gpu: str) -> frozenset[str]:
        """UIDs of pods that have held a GPU, and may have processes on it still."""
        gone = {uid for uid, gpus in self._left_behind.items() if gpu in gpus}
        return frozenset(self._left.get(gpu, ())) | self._ended().get(gpu, set()) | gone

    async def run(self) -> None:
        """Look at each change of the record, and again while somebody stays; for ever."""
        while True:
            seen, gpus = self._record.version, self._gpus()
            await self.look()
            soon = self._left or self._unsearched() or anyio.current_time() - self._swept < LOOK_SECONDS
            with anyio.move_on_after(LOOK_SECONDS if soon else IDLE_SECONDS):
                await self._changed(seen, gpus)

    async def _changed(self, seen: int, gpus: frozenset[str]) -> None:
        """Wait until the record is published, or there are more GPUs."""
        appeared = self._departed.appeared if self._departed else None
        async with anyio.create_task_group() as group:
            if appeared:

                async def more(cell: Cell[Any]) -> None:
                    await cell.wait_for(lambda _: not self._gpus() <= gpus)
                    group.cancel_scope.cancel()

                group.start_soon(more, appeared)
            await self._record.wait_change(seen)
            group.cancel_scope.cancel()

    def _gpus(self) -> frozenset[str]:
        return frozenset(self._departed.gpus() if self._departed else ())

    def _unsearched(self) -> frozenset[str]:
        """GPUs on which pods that nobody knows were not looked for yet, or could not be."""
        return self._gpus() - self._recalled_on

    async def look(self) -> None:
        """Take in who holds what now, and find whose processes have stayed."""
        before = self.found, self.unsettled
        for gpu, uids in self._ended().items():
            self._left.setdefault(gpu, set()).update(uids)
        for uid, gpus in self._left_behind.items():
            for gpu in gpus:
                self._leave(gpu, {uid})
        self._left_behind.clear()
        self._before = held = self._holders()
        # Anybody may make pods that come and go in a moment: all GPUs are looked at once for many of them.
        rested = anyio.current_time() - self._swept >= LOOK_SECONDS
        if self._departed and rested and (vanished := self._departed.vanished()):
            self._swept = anyio.current_time()
            for gpu in self._departed.gpus():
                self._leave(gpu, vanished)
        if self._departed and (self._recalled or self._doubted or self._unread or self._unsearched()):
            await self._recall(self._departed)
        for gpu in tuple(self._left):  # who holds it again, by the kubelet's word, has not ended
            self._left[gpu] -= {uid for uid in self._left[gpu] if gpu in held.get(uid, ())}
            if not self._left[gpu]:
                del self._left[gpu]
        amid = self.unsettled  # as others may have seen it
        if self._left or self.found or self._unread:
            self.found = {**dict.fromkeys(self._unread, UNREAD), **await self._stayed()}
        if not before == (self.found, amid) == (self.found, self.unsettled):
            self.looks.publish(self.looks.value + 1)

    def _leave(self, gpu: str, uids: Collection[str]) -> None:
        """Pods may have left processes on this GPU."""
        left = self._left.setdefault(gpu, set())
        left.update(uids if len(left) < MOST_LEFT else ())

    async def _recall(self, departed: Departed) -> None:
        """Take in, once, whose processes are on GPUs though nobody knows the pod.

        A pod that is known after all is no longer waited for.
        """
        known = departed.known()
        if known is None:
            if self._unread:  # one that can be read is as those that could be at once
                self._unread -= (await self._processes(self._unread)).keys()
            return
        for uids in self._left.values():  # a watch may show a pod after its first process
            uids.difference_update(self._recalled.intersection(known))
        self._recalled.difference_update(known)
        for uid in tuple(self._recalled):
            if self._may_be.get(uid, set()).isdisjoint(departed.may_live(uid)):
                continue  # a pod that has come since is another
            # A kubelet that had just started did not list the one whose UID this may be.
            self._recalled.discard(uid)
            self._doubted[uid] = {gpu for gpu, uids in self._left.items() if uid in uids}
            for gpu in self._doubted[uid]:
                self._left[gpu].discard(uid)
        gpus = self._unsearched()
        pids = await self._processes(gpus) if gpus else {}
        every = {pid for found in pids.values() for pid in found}
        pods = await anyio.to_thread.run_sync(departed.pods, every) if every else {}
        for gpu, found in pids.items():
            for uid in filter(None, map(pods.get, found)):
                self._doubted.setdefault(uid, set()).add(gpu)
        self._recalled_on.update(pids)
        self._unread = gpus - pids.keys()  # a driver that is slow, or a GPU that hangs, is asked again
        for uid in tuple(self._doubted):
            may_be = departed.may_live(uid)
            if may_be and uid not in known:
                self._may_be.setdefault(uid, set()).update(may_be)
                continue
            for gpu in self._doubted.pop(uid) if uid not in known else ():
                self._left.setdefault(gpu, set()).add(uid)
                self._recalled.add(uid)
        self._recalled.intersection_update(set().union(*self._left.values()))
        waiting = self._recalled | self._doubted.keys()
        self._may_be = {uid: pods for uid, pods in self._may_be.items() if uid in waiting}

    def _ended(self) -> Mapping[str, set[str]]:
        """UIDs of pods that hold GPUs no more, by GPU."""
        now, found = self._holders(), dict[str, set[str]]()
        for uid, gpus in self._before.items():
            for gpu in gpus - now.get(uid, frozenset()):
                found.setdefault(gpu, set()).add(uid)
        return found

    async def _stayed(self) -> Withheld:
        asked = tuple(self._left)
        pids = await self._processes(asked)
        every = {pid for found in pids.values() for pid in found}
        owners = await anyio.to_thread.run_sync(self._owners, every) if every else {}
        reasons: dict[str, str] = {}
        for gpu in asked:
            # Looks may follow one another at once: no number of them says that nobody has stayed.
            if gpu not in pids:
                reasons[gpu] = self.found.get(gpu, UNREAD)
                continue
            stay = {
                pid: owner.pod_uid
                for pid in pids[gpu]
                if (owner := owners.get(pid)) and owner.pod_uid in self._left[gpu]
            }
            self._left[gpu] &= set(stay.values())
            if not stay:
                del self._left[gpu]
                continue
            named = ", ".join(f"{pid} of pod {uid}" for pid, uid in sorted(stay.items()))
            reasons[gpu] = (
                f"the pod has ended, and its process is still on the GPU: {named}; it is offered when that "
                "has ended, or after a reset of the GPU"
            )
        return reasons
