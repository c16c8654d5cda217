"""The node's own file system, as far as it is seen from where the check runs."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.kit.files import inside, read_text
from agent.settings import Settings

LONGEST_FILE = 1 << 20  # configuration files of runtimes and kubelets


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Paths are the node's own. `root` is None where the check sees a container's files only."""

    root: Path | None
    # Whether the folders of the configuration, too, are the node's own paths and not mounted here as such.
    named: bool = False

    def folder(self, path: str | Path) -> Path:
        """A folder of the configuration, as seen from here. Raises OSError for a loop of links."""
        return inside(self.root, path) if self.named and self.root else Path(path)

    def file(self, path: str | Path) -> Path | None:
        """A file of the node as seen from here; None: there is none, or the root is not seen."""
        if self.root is None:
            return None
        try:
            found = inside(self.root, path)
            return found if found.is_file() else None
        except OSError:
            return None

    def text(self, path: str | Path) -> str | None:
        """Its content; None: it cannot be read."""
        found = self.file(path)
        try:
            return read_text(found, LONGEST_FILE) if found else None
        except (OSError, UnicodeDecodeError):
            return None

    def files(self, folder: str, pattern: str) -> Iterator[str]:
        """Paths of the files in a folder that fit a pattern, in the order of their names."""
        if self.root is None:
            return
        try:
            names = sorted(each.name for each in inside(self.root, folder).glob(pattern))
        except (OSError, ValueError, NotImplementedError):
            return
        yield from (f"{folder.rstrip('/')}/{name}" for name in names)

    def flags(self, program: str) -> Mapping[str, str] | None:
        """The options that a program of the node's own runs with; None: it is not seen to run.

        Only children of process 1 count, and those from outside (0) where the node is itself a container:
        processes of containers may have any name and any options.
        """
        for process in self._processes():
            try:
                words = (process / "cmdline").read_bytes().decode().split("\0")
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            except (OSError, UnicodeDecodeError, IndexError):
                continue
            if Path(words[0]).name == program and parent in ("0", "1"):
                return _options(words[1:])
        return None

    def _processes(self) -> Iterator[Path]:
        if self.root is None:
            return
        try:
            yield from (each for each in (self.root / "proc").iterdir() if each.name.isdigit())
        except OSError:
            return


def host_of(settings: Settings, root: Path | None) -> HostFiles:
    """The node's root: as named on the command line, else as far as the configuration shows it. Blocks."""
    if root is not None:
        return HostFiles(root, named=True)
    driver_root = Path(settings.driver.root)
    if driver_root == Path("/"):
        # In a pod that is the container's own root.
        return HostFiles(None if "KUBERNETES_SERVICE_HOST" in os.environ else driver_root)
    # A driver container's root holds the driver alone.
    return HostFiles(driver_root if (driver_root / settings.kubelet.root.strip("/")).is_dir() else None)


def _options(words: list[str]) -> dict[str, str]:
    """As Go's flags are written: `--name=value`, `--name value`, `-name value`."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-"):
            name, given, value = word.lstrip("-").partition("=")
            found[name] = value if given else following
    return found
