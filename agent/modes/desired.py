"""Which mode is wanted: of the node, by label, file or configuration, and of GPUs, by claims."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.cluster.node import OwnNode
from agent.kit import files
from agent.kit.files import FolderGone, read_text, watching
from agent.kit.tasks import Cell, repeat
from agent.model.modes import ALIASES, FOREIGN_VALUES, OFFERED_MODES, UNCLAIMED, Assignment, GpuMode, Mode
from agent.model.node_inventory import Entry, everywhere
from agent.settings import Settings

# Requests of claims, the second source beside the label: for GPUs that are devices of DRA, one by one.


@dataclass(frozen=True, slots=True)
class ClaimRequests:
    """The DRA door as the switcher knows it; the door publishes all cells."""

    modes: tuple[Mode, ...] = ()  # in which a GPU can be a device
    # The mode that claims on a GPU are of, by UUID. One without is anybody's.
    wanted: Cell[Mapping[str, Mode]] = field(default_factory=lambda: Cell(MappingProxyType({})))
    # Those of them that no claim is on any more, whose mode is kept for the next one.
    idle: Cell[frozenset[str]] = field(default_factory=lambda: Cell(frozenset()))
    # GPUs that stand as devices in slices, or did when that was seen last: claims may be allocated on them.
    listed: Cell[frozenset[str]] = field(default_factory=lambda: Cell(frozenset()))

    def chosen(self, targets: Mapping[str, GpuMode]) -> Mapping[str, GpuMode]:
        """The targets, with devices of DRA in the modes of their claims.

        A GPU that takes no claims now is not kept in a mode for the next one.
        """
        wanted, idle = self.wanted.value, self.idle.value
        return {
            uuid: replace(target, mode=wanted[uuid])
            if target.dra and uuid in wanted and (target.claimable or uuid not in idle)
            else target
            for uuid, target in targets.items()
        }

    def holds(self, uuid: str, *, leaving: bool) -> bool:
        """Whether a claim is on a GPU; on one that is `leaving` for another door, whether one may be."""
        return uuid in self.wanted.value or (leaving and uuid in self.listed.value)

    def left(self, uuid: str) -> GpuMode | None:
        """How an agent of before left a GPU that is no holder's by other records; None: as no device.

        What its slices list may be allocated by now. Claims of pods that were deleted by force are in the
        door's record alone: what runs for them stays until their containers have ended.
        """
        mode = self.wanted.value.get(uuid, UNCLAIMED)
        return GpuMode(mode, dra=True) if self.holds(uuid, leaving=True) else None


# The requested mode of the node: from its label, a file, or the configuration.

LABEL = "nvidia-device-enable"
# Labels of others by which another agent claims the node's GPUs.
FOREIGN_LABELS = {("gpu", "on"): "another GPU device plugin (label gpu=on)"}
NOTHING = ("disable", "none", "")
LONGEST_WORD = 63  # a label value


@dataclass(frozen=True, slots=True)
class Desired:
    """The wanted layout. A `problem` is reported; without entries, nothing changes then."""

    name: str  # as it was asked for: a mode, a layout, or "none"
    entries: tuple[Entry, ...] = ()
    problem: str | None = None

    @property
    def nothing(self) -> bool:
        """Whether it asks for no GPU at all, and nothing stands in its way."""
        return not self.problem and bool(self.entries) and all(one.mode is Mode.OFF for one in self.entries)

    @property
    def word(self) -> str:
        """The mode in force once this is obeyed; none on a node that another agent claims."""
        return "none" if self.problem else self.name


@dataclass(frozen=True, slots=True)
class ModeCatalog:
    layouts: Mapping[str, tuple[Entry, ...]]
    modes: tuple[Mode, ...]  # those that the configuration allows
    default: str
    when_busy: Literal["drain", "refuse"] = "drain"

    @property
    def values(self) -> list[str]:
        """All values of the label that have a meaning here."""
        return [mode.value for mode in self.modes] + ["disable"] + sorted(self.layouts)

    def named(self, name: str, source: str) -> Desired:
        """The layout that a word stands for; an unknown word is a problem that names the known ones."""
        if name in NOTHING:
            return Desired("none", everywhere(Mode.OFF))
        known = ALIASES.get(name, name)
        for mode in self.modes:
            if known == mode.value:
                return Desired(known, everywhere(mode))
        if name in self.layouts:
            used = {entry.mode for entry in self.layouts[name]} - {Mode.OFF}
            if off := used - set(self.modes):
                names = ", ".join(sorted(mode.value for mode in off))
                return Desired(name, problem=f"layout {name} uses {names}, which the configuration turns off")
            return Desired(name, self.layouts[name])
        return Desired(name, problem=f"{source} {name!r} is unknown; use one of {', '.join(self.values)}")

    def remembered(self, before: Desired | None) -> Desired | None:
        """A request of before this process, as it was meant then; None: it can be obeyed no more."""
        if before is None:
            return None
        if before.entries:
            allowed = {*self.modes, Mode.OFF}
            return before if all(entry.mode in allowed for entry in before.entries) else None
        desired = self.named(before.name, "remembered mode")
        return None if desired.problem else desired

    def of_labels(self, labels: Mapping[str, str]) -> Desired:
        """The request of a node's labels."""
        value = labels.get(LABEL)
        if value in FOREIGN_VALUES:
            return _claimed(value, f"label {LABEL}={value}", FOREIGN_VALUES[value])
        for (key, foreign), owner in FOREIGN_LABELS.items():
            if labels.get(key) == foreign:
                return _claimed(value or "none", f"label {key}={foreign}", owner)
        if value is None:
            return self.named(self.default, "defaultMode")
        return self.named(value, f"label {LABEL}")


def _claimed(name: str, by: str, owner: str) -> Desired:
    return Desired(
        name,
        everywhere(Mode.OFF),
        problem=f"{by} gives this node to {owner}; two agents cannot offer the same GPUs: remove one of them",
    )


def catalog_of(settings: Settings) -> ModeCatalog:
    """The modes that may be requested under a configuration."""
    allowed = settings.modes
    modes = [mode for mode in OFFERED_MODES if getattr(allowed, mode.value)]
    modes += [UNCLAIMED] if settings.dra.enabled else []
    layouts = {
        name: tuple(entry.resolved() for entry in entries) for name, entries in settings.layouts.items()
    }
    return ModeCatalog(layouts, tuple(modes), settings.default_mode, settings.when_busy)


# The last request that could be obeyed, kept over restarts of the agent in a small file.
#
# With the word stands what it meant: a layout that was renamed since, or taken out of the configuration, is
# still what the node offers until something else can be obeyed. So do modes of instances that drain still:
# that their holders are this agent's nothing else says.

log = structlog.get_logger()


class LastRequest:
    """One request in `file`, as JSON; earlier agents wrote the word alone. Only the agent writes it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.draining: Collection[Mode] = ()  # as it was read

    async def read(self) -> Desired | None:
        """The request; without entries where only its word is known. None: there is none."""
        try:
            text = (await anyio.to_thread.run_sync(read_text, self._file)).strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not text.startswith("{"):
            return Desired(text[:LONGEST_WORD]) if text else None
        try:
            found = msgspec.json.decode(text, type=_Remembered)
        except msgspec.DecodeError as error:
            log.warning("mode_memory_unreadable", file=str(self._file), problem=str(error))
            return None
        self.draining = found.draining
        return Desired(found.word[:LONGEST_WORD], found.entries)

    async def follow(self, accepted: Cell[Desired | None], assignment: Cell[Assignment]) -> None:
        """Write down each request that is obeyed, for ever."""
        before = await self.read()
        written = _Remembered(before.name, before.entries, tuple(self.draining)) if before else None

        async def look() -> None:
            nonlocal written
            if (desired := accepted.value) is None or not assignment.value.gpus:
                return
            modes = {each.mode for each in assignment.value.gpus.values() if each.mode.row.partitioned}
            draining = tuple(modes - {entry.mode for entry in desired.entries})
            kept = _Remembered(desired.word, desired.entries, draining)
            if kept == written:
                return
            content = msgspec.json.encode(kept)
            try:
                await anyio.to_thread.run_sync(files.write, self._file.parent, self._file.name, content)
            except OSError as error:
                log.warning("mode_not_remembered", file=str(self._file), problem=str(error))
            else:
                written = kept

        await repeat(look, accepted, assignment)


class _Remembered(msgspec.Struct, omit_defaults=True):
    word: str
    entries: tuple[Entry, ...] = ()
    draining: tuple[Mode, ...] = ()


# Where the request for a mode comes from: the node's label, a file, or the configuration alone.

# A single change is taken at once. A second one within this time is taken once it has held as long: a label
# that is flapped moves no GPU and writes nothing until it settles.
SPACING_SECONDS = 1.0
LONGEST_SETTLING_SECONDS = 30.0
FILE_LOOK_SECONDS = 10.0


class DesiredSource:
    """Publishes the wanted modes. The last reading stays in force while a source is away."""

    def __init__(self, catalog: ModeCatalog) -> None:
        self.catalog = catalog  # the modes that may be requested
        self._last: float | None = None
        self._request: Callable[[ModeCatalog], Desired] = lambda words: words.of_labels({})
        self.cell: Cell[Desired] = Cell(catalog.named("none", ""))
        self.known = anyio.Event()  # set with the first request

    def use(self, catalog: ModeCatalog) -> None:
        """Read the last request, and all later ones, by a new configuration."""
        self.catalog = catalog
        if self.known.is_set():
            self._publish(self._request)

    def from_default(self) -> None:
        """No label and no file: the configuration's default mode."""
        self._publish(lambda words: words.of_labels({}))

    def from_memory(self, before: Desired | None) -> None:
        """Take up the request of before this process, unless a newer one is known."""
        if before and not self.known.is_set():
            word = before.name
            log.warning("mode_remembered", desired=word, reason="the API server has not answered yet")
            self._publish(lambda words: words.named(word, "remembered mode"))

    async def follow_node(self, node: OwnNode) -> None:
        """Follow the node's labels for ever."""
        async for _ in node.changes.values():
            labels = node.labels()
            if labels is None:
                continue
            if not self.known.is_set() or self.catalog.of_labels(labels) != self.cell.value:
                newest = await self._settled(node, labels)
                self._publish(lambda words, newest=newest: words.of_labels(newest))  # type: ignore[misc]

    async def follow_file(self, file: Path) -> None:
        """Follow a file that holds one word, for ever. An absent or empty file means the default mode."""
        while True:
            if not self.known.is_set() or (await self._read(file))(self.catalog) != self.cell.value:
                await self._spaced()
                self._publish(await self._read(file))
            try:
                with anyio.move_on_after(FILE_LOOK_SECONDS):
                    async with watching(file.parent) as folder:
                        if (await self._read(file))(self.catalog) != self.cell.value:
                            continue
                        async for change in folder.changes():
                            if change.name in ("", file.name):
                                break
            except (FolderGone, OSError):
                await anyio.sleep(SPACING_SECONDS)

    async def _read(self, file: Path) -> Callable[[ModeCatalog], Desired]:
        try:
            word = (await anyio.to_thread.run_sync(read_text, file)).strip()
        except FileNotFoundError:
            word = ""
        except (OSError, UnicodeDecodeError) as error:
            unreadable = Desired("?", problem=f"mode file {file} cannot be read: {error}")
            return lambda _: unreadable
        if not word:
            return lambda words: words.of_labels({})
        return lambda words: words.named(word[:LONGEST_WORD], f"mode file {file}: value")

    async def _settled(self, node: OwnNode, labels: Mapping[str, str]) -> Mapping[str, str]:
        """The labels, once they ask for the same for a while if they have just asked for something else."""
        if self._last is None or anyio.current_time() - self._last >= SPACING_SECONDS:
            return labels
        with anyio.move_on_after(LONGEST_SETTLING_SECONDS):
            while True:
                asked, version = self.catalog.of_labels(labels), node.changes.version
                with anyio.move_on_after(SPACING_SECONDS):
                    while self.catalog.of_labels(labels) == asked:
                        version = await node.changes.wait_change(version)
                        labels = node.labels() or labels
                    continue
                break
        return labels

    async def _spaced(self) -> None:
        if self._last is not None:
            await anyio.sleep_until(self._last + SPACING_SECONDS)

    def _publish(self, request: Callable[[ModeCatalog], Desired]) -> None:
        self._request = request
        desired = request(self.catalog)
        if desired != self.cell.value:
            self._last = anyio.current_time()
            log.info("mode_wanted", desired=desired.name, problem=desired.problem)
            self.cell.publish(desired)
        self.known.set()
