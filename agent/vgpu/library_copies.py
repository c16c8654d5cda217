"""Containers' copies of the enforcement library: given, kept open and whole, removed."""

from collections.abc import Collection
from pathlib import Path

import structlog

from agent.vgpu import library as libraries
from agent.vgpu.folders import About
from agent.vgpu.held import REFUSALS, HeldFiles
from agent.vgpu.isolation_errors import AccessRefused, LibraryUnusable
from agent.vgpu.library import Library, Original

log = structlog.get_logger()


class LibraryCopies:
    """All of it blocks."""

    def __init__(self, source: Path, state: Path) -> None:
        """`source`: the image's library. `state`: the agent's state folder on the host."""
        self._source = source
        self._state = state
        self._original: Original | None = None
        self._held = HeldFiles()  # by build
        self._unsettled: set[str] = set()  # builds that are not on disk yet
        # Why containers get none; None: they do.
        self.problem: str | None = "the enforcement library has not been put on the host yet"

    @property
    def build(self) -> str | None:
        """The digest of what containers get now; None: nothing."""
        return self._original.build if self._original else None

    def install(self) -> None:
        """Have the image's library on the host. Raises LibraryUnusable, as `problem` says from then on."""
        try:
            self._original = libraries.install(self._source, self._state)
        except LibraryUnusable as error:
            self.problem = str(error)
            raise
        self.problem = None

    def withhold(self, problem: str) -> None:
        """Give containers none, since they could not have the files of their limits."""
        self.problem = problem
        self._original = None

    def of(self, about: About) -> Library:
        """The copy that a container was given."""
        return Library(self._state / libraries.FOLDER, about.build)

    def give(self) -> Library:
        """A new copy for a container, open here before the container has it. Raises LibraryUnusable."""
        if self._original is None:
            raise LibraryUnusable(self.problem or "")
        library = self._original.copy()
        try:
            libraries.hold(self._held, library)
        except BaseException as error:
            self.take_back(library)
            if isinstance(error, OSError):
                raise LibraryUnusable(f"{library.file} cannot be opened: {error.strerror}") from error
            raise
        self._unsettled.add(library.build)
        return library

    def take_back(self, library: Library) -> None:
        """Remove a copy whose container was not admitted."""
        self._held.drop(library.build)
        self._unsettled.discard(library.build)
        libraries.remove(library)

    def keep(self, about: About) -> None:
        """Have a container's copy whole, open and on disk. Raises LibraryUnusable, AccessRefused."""
        if not about.build:
            return
        library = self.of(about)
        if self._original and self._original.mend(about.build):
            self._held.drop(about.build)
            log.info("library_restored", pod=about.pod_key, file=str(library.file))
        try:
            if about.build in self._unsettled:
                libraries.settle(self._held, library)
                self._unsettled.discard(about.build)
            else:
                libraries.hold(self._held, library)
        except OSError as error:
            text = f"{library.file} is kept from the agent: {error.strerror or error}"
            # Who keeps a file of many from the agent is not to be known.
            refused = library.own and error.errno in REFUSALS
            raise (AccessRefused if refused else LibraryUnusable)(text) from error

    def remove_unused(self, used: Collection[str]) -> None:
        """Remove all but these builds; a problem is logged."""
        for build in self._held.keys() - set(used):
            self._held.drop(build)
        self._unsettled.intersection_update(used)
        try:
            libraries.remove_unused(self._state, used)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("libraries_not_removed", problem=str(error))

    def close(self) -> None:
        """Let go of the files."""
        self._held.close()
