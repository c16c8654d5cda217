"""Who gets which limits: folders made at admission, found again after a restart, gone with their containers.

The kubelet's record says which containers there are; this room keeps no list of its own beyond the folders.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.kit.tasks import Cell
from agent.kubelet.wire import Allocation, Mount
from agent.model.holding import Growth, Holding, Record
from agent.model.pod import VGPU
from agent.vgpu.folders import LIMITS, USAGE, About, LimitFolders, Place, key_of
from agent.vgpu.isolation_errors import (
    AccessRefused,
    FolderUnusable,
    IsolationError,
    LibraryUnusable,
    OtherLayout,
    Problems,
    short_of_space,
)
from agent.vgpu.layout import CountedUsage
from agent.vgpu.library import IN_CONTAINER, PRELOAD_IN_CONTAINER, Copies, LibraryCopies
from agent.vgpu.limits import ContainerLimits, Contexts, Enforcement, memory_device

log = structlog.get_logger()

LOOK_SECONDS = 5.0
# The kubelet's record shows what was granted within some milliseconds, and is read soon after. Until then a
# container must not lose its folder because the one before it, which had the same units, has gone.
GRACE_SECONDS = 10.0
# Limits that were removed and are remembered, should the record show their container again.
REMOVED = 256


class Isolation:
    """The limits of this node's vGPU containers."""

    def __init__(
        self,
        folders: LimitFolders,
        source: Path,
        state: Path,
        policy: Enforcement,
        record: Cell[Record | None],
        namespaces: Callable[[str], Enforcement | None] = lambda _: None,
        clock: Callable[[], float] = anyio.current_time,
        *,
        read: Callable[[], float] = lambda: math.inf,
        compute: bool = False,
        expected: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`source`: the image's library. `namespaces` answers what a namespace has of its own.

        `compute`: containers that start are held to a share of compute. `expected`: see `Contexts`.
        `read`: when the newest reading began of which `record` shows all.
        """
        self.folders = folders
        self.contexts = Contexts(expected)
        self.libraries = LibraryCopies(source, state)
        self._copies = Copies(state)
        self.containers: Cell[Mapping[str, ContainerLimits]] = Cell(MappingProxyType({}))
        self._policy = policy
        self._record = record
        self._namespaces = namespaces
        self._clock, self._began = clock, read
        self.computes = compute
        # Containers that keep the agent from their files, and how; until the agent has them, if it ever does.
        self.refusing: Mapping[str, str] = MappingProxyType({})
        # By the library's word, some seconds old, whether anybody measures or not.
        self.counted: Mapping[str, CountedUsage] = MappingProxyType({})
        self._unmended: set[str] = set()  # folders of these whose limits may be others than they stand for
        self._outdated = True  # there may be copies of nobody's: an agent before was killed as it made one
        self._born: dict[str, float] = {}  # folders, and since when they are known
        self._unseen: set[str] = set()  # those whose containers no record has shown yet
        self._turn = anyio.Lock()  # no folder is removed while one of the same units is made
        self._keys: dict[int, tuple[Holding, str]] = {}
        self._grown: tuple[Mapping[str, ContainerLimits], Mapping[str, frozenset[str]]] = ({}, {})
        self._unreadable = Problems()
        self._strays: frozenset[str] = frozenset()  # folders that do not say whose they are
        self._removed: dict[str, bytes] = {}  # the oldest first; packed, for each names hundreds of units

    def policy(self, namespace: str) -> Enforcement:
        return self._namespaces(namespace) or self._policy

    def at(self, place: Place) -> ContainerLimits | None:
        """The limits of a container; None: it has none."""
        return next((each for each in self.containers.value.values() if each.about.place == place), None)

    def age(self, key: str) -> float:
        """For how many seconds a folder has been known."""
        return self._clock() - self._born.get(key, self._clock())

    def may_live(self, about: About) -> bool:
        """Whether the kubelet lists a container's pod, or it lives by the API server; or nobody can say."""
        record = self._record.value
        if record is None or record.away:
            return True
        return about.uid in record.unfinished or (about.namespace, about.pod) in record.pods

    async def start(self) -> None:
        """Put the library on the host, and find the folders of containers that run."""
        if self._policy is not Enforcement.OFF:
            try:
                # Cut off, its thread ends by itself, and leaves nothing.
                await anyio.to_thread.run_sync(self.libraries.install, abandon_on_cancel=True)
            except LibraryUnusable as error:
                log.warning("enforcement_library_unusable", problem=str(error))
        found, unread = await anyio.to_thread.run_sync(self._found, abandon_on_cancel=True)
        self._strays = unread.union(self._removed)  # of the latter the copies are kept
        self._born = dict.fromkeys((*found, *unread), self._clock())
        self._unseen = set(found)
        self.containers.publish(MappingProxyType(found))
        self.refusing = await anyio.to_thread.run_sync(self._keep_up, found, abandon_on_cancel=True)
        log.info(
            "limits_in_use", policy=self._policy.value, library=self.libraries.build, containers=len(found)
        )

    def close(self) -> None:
        """Let go of the files of containers."""
        self.folders.held.close()
        self.libraries.close()

    async def admit(self, request: About) -> Allocation:
        """The files that a container gets, all of them or none, and the device by which the driver limits it.

        Raises IsolationError where the policy lets no container start without the files, or where there is no
        space for them: a tenant that fills the node's would be rid of its limits.
        """
        policy = self.policy(request.namespace)
        if policy in (Enforcement.OFF, Enforcement.REPORT):
            return Allocation()
        try:
            return await self._admitted(request, policy, library=True)
        except IsolationError as error:
            if policy is Enforcement.STRICT or short_of_space(error):
                raise
            if self.libraries.build:  # without one the start said so
                log.warning(
                    "library_not_shown", pod=request.pod_key, container=request.container, problem=str(error)
                )
        # The driver needs no library, but a folder that says what the container may have.
        with suppress(FolderUnusable):
            return await self._admitted(request, policy, library=False) if request.driver else Allocation()
        return Allocation()

    @property
    def grown(self) -> Mapping[str, frozenset[str]]:
        """Units that containers have grown by, by GPU, of both resources: nobody else may be offered them."""
        containers = self.containers.value
        if self._grown[0] is not containers:
            found: dict[str, frozenset[str]] = {}
            for about in (each.about for each in containers.values()):
                if ids := (*about.grown, *about.grown_cores):
                    found[about.gpu] = found.get(about.gpu, frozenset()) | frozenset(ids)
            self._grown = (containers, found)
        return self._grown[1]

    def growth(self) -> Mapping[tuple[str, str, str, str], Growth]:
        """The sizes of these units, by container."""
        return {
            about.place: Growth(len(about.grown) * VGPU.block_bytes, len(about.grown_cores))
            for about in (each.about for each in self.containers.value.values())
            if about.grown or about.grown_cores
        }

    async def resize(self, key: str, about: About) -> None:
        """Give a container another cap. Raises FolderUnusable: it has the one that its folder says."""
        async with self._turn:
            known = self.containers.value.get(key)
            if known is None or known.about.uid != about.uid:  # another pod may have its units by now
                raise FolderUnusable(f"container {about.container} of {about.namespace}/{about.pod} is gone")
            await self._keep(key, about)

    async def _keep(self, key: str, about: About) -> None:
        # A call that was cut off in between would leave this process with another count than the folder.
        with anyio.CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(self.folders.resize, key, about)
                await anyio.to_thread.run_sync(self._copies.keep, about)
            except FolderUnusable:
                self._unmended.add(key)
                about = await anyio.to_thread.run_sync(self.folders.about, key)
                raise
            finally:
                found = replace(self.containers.value[key], about=about)
                self._become({**self.containers.value, key: found})

    async def _name(self, record: Record) -> None:
        """Give containers the UID of their pod where a mute watch had shown an earlier one of its name."""
        for holding, key in tuple(self._keys.values()):
            known, uid = self.containers.value.get(key), record.uids.get(holding.holder.pod_key)
            if known is None or uid in (None, known.about.uid) or known.about.place[:3] != holding.holder:
                continue
            async with self._turn:
                if self.containers.value.get(key) is known and known.about.uid not in record.unfinished:
                    with suppress(FolderUnusable):  # again with the next record
                        await self._keep(key, msgspec.structs.replace(known.about, uid=uid))
                        log.info("limits_renamed", pod=known.about.pod_key, uid=uid)

    async def run(self) -> None:
        """Remove folders of containers that are gone, for ever."""
        seen = self._record.version
        while True:
            await self.tidy()
            with anyio.move_on_after(LOOK_SECONDS):
                seen = await self._record.wait_change(seen)

    async def tidy(self) -> None:
        """Remove folders of containers that are gone now; while nobody can say which, all stay.

        One whose pod lives by the API server stays, too, though no record shows it: a kubelet that has just
        started may not have heard of it. So do those newer than the newest reading, and while the API server
        does not say those that no record has shown, or whose name is listed. What is held is made again.
        """
        record = self._record.value
        if record is None:
            await self._remove_unused()
            return
        held, now, began = self._read(record), self._clock(), self._began()
        known = self.containers.value
        names = {key: (limits.about.namespace, limits.about.pod) for key, limits in known.items()}
        # A name that the kubelet lists may be a later pod's, which got its limits while an interrupted watch
        # showed the earlier one, and whose units no reading shows yet.
        ended = {
            key
            for key, limits in known.items()
            if limits.about.uid in record.ended and names[key] not in record.pods
        }
        self._unseen &= self._born.keys() - held
        # A kubelet that lost its checkpoint lists what it runs, and not what that holds.
        lives = held | {
            key
            for key, limits in known.items()
            if limits.about.uid in record.unfinished
            or names[key] in record.unshown
            or (record.away and key in self._unseen)
        }
        gone = [
            key
            for key, born in self._born.items()
            if key not in lives and (key in ended or min(now, began) - born >= GRACE_SECONDS)
        ]
        for key in gone:
            async with self._turn:
                if self.containers.value.get(key) is known.get(key):
                    await self._remove(key)
        await self._name(record)
        await self._put_back(held, record)
        self._outdated |= bool(gone)
        await self._remove_unused()
        # It may wait for a disk, and an agent that stops does not wait with it.
        self.refusing = await anyio.to_thread.run_sync(
            self._keep_up, self.containers.value, abandon_on_cancel=True
        )

    async def _remove_unused(self) -> None:
        """Remove copies of the library that no container has any more: to know them takes no record."""
        if self._outdated:
            async with self._turn:  # a container that is being admitted has a copy, and is not among them yet
                self._outdated = False
                used = {build for each in self.containers.value.values() for build in each.about.builds}
                await anyio.to_thread.run_sync(self.libraries.remove_unused, used, not self._strays)

    async def _put_back(self, held: frozenset[str], record: Record) -> None:
        """Make folders again that containers of living pods have mounted, and need when they start again."""
        packed = {key: zlib.decompress(self._removed[key]) for key in held & self._removed.keys()}
        about_of = {key: msgspec.json.decode(each, type=About) for key, each in packed.items()}
        about_of |= {key: limits.about for key, limits in self.containers.value.items()}
        wanted = {key: each for key in held if (each := about_of.get(key)) and each.uid in record.unfinished}
        missing = await anyio.to_thread.run_sync(self._missing, tuple(wanted))
        for key in missing:
            about = wanted[key]
            async with self._turn:
                now = self.containers.value.get(key)
                if now is not None and now.about is not about:
                    continue  # another container has its units by now
                try:
                    await anyio.to_thread.run_sync(self.folders.create, about)
                except FolderUnusable as error:
                    log.warning("limits_not_written", problem=str(error))
                    continue
                await anyio.to_thread.run_sync(self._copies.keep, about)
                self._removed.pop(key, None)
                self._strays -= {key}
                self._born.setdefault(key, self._clock())
                self._become({**self.containers.value, key: ContainerLimits(about)})
            log.warning("limits_restored", folder=key, pod=about.pod_key)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if not self.folders.path(key, LIMITS).is_file()]

    async def _remove(self, key: str) -> None:
        try:
            await anyio.to_thread.run_sync(self.folders.remove, key)
        except FolderUnusable as error:
            log.warning("limits_not_removed", problem=str(error))
            self._born[key] = self._clock()  # again in a while
            return
        await anyio.to_thread.run_sync(self._copies.drop, key)
        del self._born[key]
        self._strays -= {key}
        log.info("limits_removed", folder=key)
        if limits := self.containers.value.get(key):
            self._removed.pop(key, None)
            self._removed[key] = zlib.compress(msgspec.json.encode(limits.about))
            if len(self._removed) > REMOVED:
                del self._removed[next(iter(self._removed))]
            self._become({k: v for k, v in self.containers.value.items() if k != key})

    def saw(self, key: str, injected: bool) -> None:
        """Processes of a container were looked at: whether all of them have the library."""
        limits = self.containers.value.get(key)
        if limits and limits.injected is not injected:
            self._become({**self.containers.value, key: replace(limits, injected=injected)})

    def asked(self, key: str, limited: bool) -> None:
        """The driver was asked whether it holds a container to its cap."""
        limits = self.containers.value.get(key)
        if limits and limits.limited is not limited:
            self._become({**self.containers.value, key: replace(limits, limited=limited)})

    async def _admitted(self, request: About, policy: Enforcement, *, library: bool) -> Allocation:
        if library and self.libraries.build is None:
            raise LibraryUnusable(self.libraries.problem or "")
        about = msgspec.structs.replace(
            request, policy=policy.value, compute=self.computes and library, layout=self.folders.newest
        )
        key = key_of(about.ids)
        async with self._turn:
            # Before: a call that is cut off leaves a folder that is to go, too.
            self._born[key] = self._clock()
            self._unseen.add(key)
            context = self.contexts.of(about.gpu, about.memory_bytes)
            if before := self.containers.value.get(key):
                self._outdated, about = True, about.with_earlier(before.about)
            try:
                about = await anyio.to_thread.run_sync(self._made, about, context, library)
            except IsolationError as error:
                if not short_of_space(error):
                    raise
                await anyio.to_thread.run_sync(self._make_room)
                about = await anyio.to_thread.run_sync(self._made, about, context, library)
            self._become({**self.containers.value, key: ContainerLimits(about)})
        devices = (memory_device(len(about.ids)),) if about.driver else ()
        return Allocation(mounts=self._mounts(key, about) if about.build else (), cdi_devices=devices)

    def _mounts(self, key: str, about: About) -> tuple[Mount, ...]:
        library = self.libraries.of(about)
        limits, usage = self.folders.path(key, LIMITS), self.folders.path(key, USAGE)
        return (
            Mount(library.in_container, str(library.file)),
            Mount(PRELOAD_IN_CONTAINER, str(library.preload)),
            Mount(f"{IN_CONTAINER}/{LIMITS}", str(limits)),
            Mount(f"{IN_CONTAINER}/{USAGE}", str(usage), read_only=False),
        )

    def _make_room(self) -> None:
        """Take back at once what containers have filled by their usage regions."""
        found: list[str] = []
        for key, limits in self.containers.value.items():
            with suppress(FolderUnusable):
                if self.folders.bound(key):
                    found.append(limits.about.pod_key)
        log.warning("limits_short_of_space", pods_with_longer_regions=found)

    def _made(self, about: About, context_bytes: int, library: bool) -> About:
        """All files of a container, in one visit to a thread: the kubelet waits for the answer.

        Raises FolderUnusable, LibraryUnusable.
        """
        if library:
            given = self.libraries.give()
            about = msgspec.structs.replace(about, build=given.build)
            try:
                self.folders.create(about, context_bytes)
            except BaseException:
                self.libraries.take_back(given)
                raise
        else:
            self.folders.create(about, context_bytes)
        self._copies.keep(about)
        return about

    def _become(self, containers: Mapping[str, ContainerLimits]) -> None:
        self.containers.publish(MappingProxyType(dict(containers)))

    def _found(self) -> tuple[dict[str, ContainerLimits], frozenset[str]]:
        """Containers by folder, and folders that say nothing; what cannot be made now counts as removed."""
        found, unread = dict[str, ContainerLimits](), set[str]()
        try:
            self.folders.prepare()
            keys = self.folders.keys()
        except FolderUnusable as error:
            self.libraries.withhold(str(error))
            return found, frozenset()
        for key in keys:
            try:
                about = self.folders.about(key)
            except FolderUnusable as error:
                log.warning("limits_unreadable", problem=str(error))
                unread.add(key)
                continue
            self._mend(key, about)
            self._copies.follow(key, about)
            found[key] = ContainerLimits(about)
        for about in self._copies.without_folder(found):
            try:
                key = self.folders.create(about)
            except FolderUnusable as error:
                log.warning("limits_not_written", problem=str(error))
                self._removed[key_of(about.ids)] = zlib.compress(msgspec.json.encode(about))
                continue
            found[key] = ContainerLimits(about)
            log.info("limits_restored", folder=key, pod=about.pod_key)
        return found, frozenset(unread - found.keys() - self._removed.keys())

    def _mend(self, key: str, about: About) -> None:
        """Have the limits be those that the folder stands for, whatever happened to the agent before."""
        try:
            try:
                now = self.folders.limits(key)
                if now.memory_bytes != about.memory_bytes or now.forgiven_bytes:
                    self.folders.change(key, memory_bytes=about.memory_bytes, forgiven_bytes=0)
                place = about.gpu, about.namespace
                self.contexts.remembered(key, place, now.context_bytes, about.memory_bytes)
            except AccessRefused:
                self._unmended.add(key)
            except OtherLayout as error:
                log.warning("limits_of_another_layout", problem=str(error))
            except FolderUnusable as error:
                log.warning("limits_written_anew", problem=str(error))
                self.folders.mend(key, about)
        except FolderUnusable as error:
            log.warning("limits_not_written", problem=str(error))

    def _read(self, record: Record) -> frozenset[str]:
        """Keys of all that hold vGPU memory."""
        keys: dict[int, tuple[Holding, str]] = {}
        for each in record.holdings:
            if each.resource == VGPU.memory and each.ids:
                before = self._keys.get(id(each))
                keys[id(each)] = before if before and before[0] is each else (each, key_of(each.ids))
        self._keys = keys
        return frozenset(key for _, key in keys.values())

    def _keep_up(self, containers: Mapping[str, ContainerLimits]) -> Mapping[str, str]:
        """Have the files of containers be as they should, and open; see `agent.vgpu.layout`.

        Usage regions lie in the node's memory: one that its container made longer is cut back. Answers who
        keeps the agent from its files, and how.
        """
        refusing: dict[str, str] = {}
        counted: dict[str, CountedUsage] = {}
        self._unreadable.keep(containers)
        self._unmended.intersection_update(containers)
        for key, about in ((key, each.about) for key, each in containers.items()):
            problems = list(self._kept(key, about))
            if problems:
                self._unreadable.met(key, problems[0])
            else:
                self._unreadable.over(key)
            if texts := [str(each) for each in problems if isinstance(each, AccessRefused)]:
                refusing[key] = texts[0]
            if about.build:
                with suppress(FolderUnusable):
                    if usage := self.folders.usage(key):
                        counted[key] = usage
        self.counted = MappingProxyType(counted)
        return MappingProxyType(refusing)

    def _kept(self, key: str, about: About) -> Iterator[IsolationError]:
        """Whatever one file's problem is, the others are looked after."""
        try:
            self.libraries.keep(about)
        except (FolderUnusable, LibraryUnusable) as error:
            yield error
        try:
            self._keep_folder(key, about)
        except FolderUnusable as error:
            yield error

    def _keep_folder(self, key: str, about: About) -> None:
        """Raises FolderUnusable, AccessRefused among them."""
        self.folders.hold(key)
        self.folders.bound(key)
        if key in self._unmended:
            self._unmended.discard(key)
            self._mend(key, about)
