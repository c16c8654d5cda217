"""The instances that this agent made, over its restarts: one small file in the state folder.

Only an instance of this file is ever destroyed. It is believed for the boot in which it was written, and for
an instance that has the place, the number and the UUID written down. Before an instance is made the intention
is written, so that an agent that is killed in between knows it as its own.
"""

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from agent.inventory.verdicts import BOOT_ID
from agent.kit import files
from agent.kit.files import read_text
from agent.nvml.port import GpuInstance, Partition

log = structlog.get_logger()

NAME = "mig-instances.json"
MOST_BYTES = 1 << 20


class Made(msgspec.Struct, frozen=True):
    """One instance; without a number: it was about to be made."""

    gpu: str
    profile: int
    start: int
    number: int | None = None
    uuid: str = ""

    def at(self, gpu: str, instance: GpuInstance) -> bool:
        """Whether it has the place of an instance."""
        return (self.gpu, self.profile, self.start) == (gpu, instance.profile, instance.start)


class _Document(msgspec.Struct, frozen=True):
    boot_id: str
    made: tuple[Made, ...] = ()
    switched: tuple[str, ...] = ()  # GPUs whose MIG mode this agent turned on
    leaving: dict[str, tuple[str, ...]] = {}  # instances that are offered no more, by GPU


class MadeBook:
    """Only the agent writes the file."""

    def __init__(self, folder: Path, boot_id: Path = BOOT_ID) -> None:
        self._folder = folder
        self._boot_id_file = boot_id
        self._boot_id = ""
        self._made: frozenset[Made] = frozenset()
        self._written = b""
        self.switched: frozenset[str] = frozenset()
        self.leaving: dict[str, tuple[str, ...]] = {}
        # Of each GPU: instances are made and destroyed, and MIG mode is switched, by one at a time.
        self.turns: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._writing = anyio.Lock()

    async def discard(self) -> None:
        """Nobody keeps the file up from now on: of a later agent all instances are others'."""
        with suppress(OSError):
            await anyio.to_thread.run_sync(partial((self._folder / NAME).unlink, missing_ok=True))

    async def load(self) -> None:
        """Take up the file; without one that can be read all instances are others'."""
        self._boot_id = (await anyio.to_thread.run_sync(read_text, self._boot_id_file)).strip()
        try:
            text = await anyio.to_thread.run_sync(read_text, self._folder / NAME, MOST_BYTES)
            found = msgspec.json.decode(text, type=_Document)
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            log.warning(
                "mig_record_unreadable",
                file=str(self._folder / NAME),
                problem=str(error),
                consequence="the instances that are there count as made by others, and stay",
            )
            return
        if found.boot_id == self._boot_id:
            self._made, self.switched = frozenset(found.made), frozenset(found.switched)
            self.leaving = found.leaving

    def is_ours(self, gpu: str, instance: GpuInstance, uuid: str) -> bool:
        """Whether this agent made an instance; `uuid`: of what containers can have of it, if anything."""
        for each in self._made:
            if not each.at(gpu, instance) or each.number not in (None, instance.number):
                continue
            # What somebody has divided an instance of ours into is theirs.
            # One that was found half made is never made whole by this agent.
            known = each.uuid == uuid or (each.number is None and not each.uuid)
            if not instance.computes or (instance.whole and uuid and known):
                return True
        return False

    async def look(self, gpu: str, partition: Partition, awaited: Collection[Made] = ()) -> None:
        """Forget what is neither there nor `awaited`, and learn of what was made. Raises OSError."""
        kept = {each for each in self._made if each.gpu != gpu or each in awaited}
        for instance in partition.instances:
            uuid = partition.uuid_of(instance)
            if self.is_ours(gpu, instance, uuid):
                kept.add(Made(gpu, instance.profile, instance.start, instance.number, uuid))
        self._made = frozenset(kept)
        await self._write()

    async def forget(self, gpu: str) -> None:
        """Nothing is left of a GPU that is not in MIG mode; later ones are others'. Raises OSError."""
        if any(each.gpu == gpu for each in self._made):
            await self.look(gpu, Partition((), (), ()))

    async def note(self, made: Made) -> None:
        """It is about to be made, or destroyed bit by bit. Raises OSError: then it may not be."""
        self._made |= {made}
        await self._write()

    def retract(self, intention: Made) -> None:
        """Nothing of it was made: what is at its place is somebody else's. Written with the next look."""
        self._made -= {intention}

    async def note_switch(self, gpu: str, *, on: bool) -> None:
        self.switched = self.switched | {gpu} if on else self.switched - {gpu}
        await self._write()

    async def note_leaving(self, gpu: str, instances: frozenset[str]) -> None:
        """A drain goes on when the agent is started again. Raises OSError."""
        others = {uuid: names for uuid, names in self.leaving.items() if uuid != gpu}
        self.leaving = others | ({gpu: tuple(sorted(instances))} if instances else {})
        await self._write()

    async def _write(self) -> None:
        async with self._writing:
            in_order = sorted(self._made, key=lambda each: (each.gpu, each.start, each.number or -1))
            document = _Document(self._boot_id, tuple(in_order), tuple(sorted(self.switched)), self.leaving)
            content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
            if content != self._written:
                write = partial(files.write, self._folder, NAME, content, lasting=True)
                await anyio.to_thread.run_sync(write)
                self._written = content
