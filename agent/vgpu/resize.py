"""Live resize of containers by an annotation of their pod, `gpu-node-agent.io/resize`.

It holds units of `tencent.com/vcuda-memory` by container, `{"main": 60}`, or these and cores in percent,
`{"main": {"memory": 60, "cores": 20}}`.
A container grows into units of its GPU that are free, which nobody else is offered from that moment on, and
shrinks to the memory that it uses at least. What it has grown by stands in its limit folder: the kubelet,
whose record says who holds what, has no word for it (docs/decisions.md). Who may write the annotation is for
an admission policy to say.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import anyio
import anyio.to_thread
import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agent.kit.tasks import Cell, repeat
from agent.lists.shared_pair import SharedPair
from agent.model.holding import PairMember
from agent.model.placement import RESIZE
from agent.model.pod import VGPU
from agent.pairing.resolver import PairRefused
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import About
from agent.vgpu.isolation_errors import IsolationError
from agent.vgpu.limits import ContainerLimits
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch

LONGEST_TEXT = 16 << 10
RETRY_SECONDS = 5.0  # for units that come free
_Units = Annotated[int, Meta(ge=1, le=1 << 20)]


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a container; None: as it is."""

    memory: _Units | None = None  # units
    cores: Annotated[int, Meta(ge=1, le=100)] | None = None  # percent of a GPU


_Wanted = dict[str, _Units | Sizes]


class NoUnits(IsolationError):
    """A GPU has not as many free units as a container is to grow by."""


class BadResize(IsolationError):
    """An annotation that says nothing that could be done."""


class FreeUnits:
    """Free units of the node's GPUs."""

    def __init__(self, shares: SharedPair) -> None:
        self._shares = shares

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        """Have `keep` write down `count` free units, which nobody else gets meanwhile nor later.

        They leave the pool before another call is served. Raises NoUnits, and what `keep` raises: none is
        taken then.
        """

        async def kept(ids: tuple[str, ...]) -> None:
            try:
                await keep(ids)
            finally:
                self._shares.restock()

        try:
            await self._shares.pairing.set_aside(gpu, member, count, kept)
        except PairRefused as refusal:
            raise NoUnits(str(refusal)) from refusal

    def give_back(self) -> None:
        """Units that stood in a folder are free again."""
        self._shares.restock()


class Resizer:
    """Follows the annotations of pods."""

    def __init__(
        self, isolation: Isolation, units: FreeUnits, events: LimitEvents, watch: LimitWatch
    ) -> None:
        self._isolation = isolation
        self._units = units
        self._events = events
        self._watch = watch
        self._answered: dict[str, str] = {}  # by UID of the pod: what its owner was answered last

    async def run(self, pods: Cell[Any], annotations: Callable[[], Mapping[str, str]]) -> None:
        """Follow `pods`, for ever; `annotations` answers the pods' by UID."""

        async def look() -> float | None:
            return RETRY_SECONDS if await self.look(annotations()) else None

        await repeat(look, pods, self._isolation.containers)

    async def look(self, annotations: Mapping[str, str]) -> bool:
        """Do what the annotations say; whether something of it waits for free units."""
        waits = False
        known = self._isolation.containers.value
        uids = {limits.about.uid for limits in known.values()}
        self._answered = {uid: text for uid, text in self._answered.items() if uid in uids}
        for key, limits in known.items():
            text = annotations.get(limits.about.uid)
            if text is None:
                continue
            try:
                sizes = wanted(text).get(limits.about.container, Sizes())
                if sizes.cores is not None:
                    await self._resize_cores(key, limits.about, sizes.cores)
                if sizes.memory is not None:
                    await self._resize(key, self._isolation.containers.value.get(key, limits), sizes.memory)
            except NoUnits as error:
                waits = True
                self._refuse(limits.about, text, str(error))
            except IsolationError as error:
                self._refuse(limits.about, text, str(error))
        return waits

    async def _resize(self, key: str, limits: ContainerLimits, units: int) -> None:
        about = limits.about
        have = len(about.ids) + len(about.grown)
        target = units * VGPU.block_bytes
        if units > have:

            async def keep(ids: tuple[str, ...]) -> None:
                grown = replace(about, memory_bytes=target, grown=(*about.grown, *ids))
                await self._isolation.resize(key, grown)

            await self._units.take(about.gpu, PairMember.MEMORY, units - have, keep)
        else:
            target = max(target, min(limits.memory_bytes, await self._in_use(key, limits)))
            grown = about.grown[: max(0, target // VGPU.block_bytes - len(about.ids))]
            if (target, grown) == (limits.memory_bytes, about.grown):
                return
            await self._isolation.resize(key, replace(about, memory_bytes=target, grown=grown))
            self._units.give_back()
        self._events.resized(about, target)

    async def _resize_cores(self, key: str, about: About, cores: int) -> None:
        have = about.cores + len(about.grown_cores)
        # With compute switched off since it started it may give cores back, and takes none that nobody keeps.
        if not about.compute or (cores > have and not self._isolation.computes):
            raise BadResize(
                f"container {about.container} is not held to cores: set vgpu.compute, and start its pod again"
            )
        if cores > have:

            async def keep(ids: tuple[str, ...]) -> None:
                grown = (*about.grown_cores, *ids)
                await self._isolation.resize(key, replace(about, cores_cap=cores, grown_cores=grown))

            await self._units.take(about.gpu, PairMember.CORE, cores - have, keep)
        else:
            grown = about.grown_cores[: max(0, cores - about.cores)]
            if (cores, grown) == (about.cores_now, about.grown_cores):
                return
            await self._isolation.resize(key, replace(about, cores_cap=cores, grown_cores=grown))
            if grown != about.grown_cores:
                self._units.give_back()
        self._events.cores_resized(about, cores)

    async def _in_use(self, key: str, limits: ContainerLimits) -> int:
        """The use of a container, in whole units; the library's word counts beside the driver's."""
        folders = self._isolation.folders
        usage = await anyio.to_thread.run_sync(folders.usage, key)
        counted = usage.total_bytes if usage else 0
        used = max(self._watch.seen.value.measured.get(limits.about.place, 0), counted)
        return -(-used // VGPU.block_bytes) * VGPU.block_bytes

    def _refuse(self, about: About, text: str, problem: str) -> None:
        if self._answered.get(about.uid) != text:
            self._answered[about.uid] = text
            self._events.not_resized(about, problem)


def wanted(text: str) -> Mapping[str, Sizes]:
    """Sizes by container. Raises BadResize."""
    if len(text) > LONGEST_TEXT:
        raise BadResize(f"annotation {RESIZE} is longer than {LONGEST_TEXT} bytes")
    try:
        found = msgspec.json.decode(text, type=_Wanted)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise BadResize(
            f'annotation {RESIZE} must be units of {VGPU.memory} by container, as {{"main": 60}}, or '
            f'{{"main": {{"memory": 60, "cores": 20}}}}: {error}'
        ) from error
    return {name: each if isinstance(each, Sizes) else Sizes(each) for name, each in found.items()}
