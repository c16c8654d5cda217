"""Where the request for a mode comes from: the node's label, a file, or the configuration alone."""

from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.cluster.own_node import OwnNode
from agent.kit.cell import Cell
from agent.kit.inotify import FolderGone, watching
from agent.kit.small_file import read_text
from agent.modes.desired import LONGEST_WORD, Desired, ModeCatalog

log = structlog.get_logger()

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
