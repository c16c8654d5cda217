"""Copies of what limit folders stand for, below the state folder: `<state>/limits/<key>.json`.

Limit folders lie in memory, below `/run`, for the library writes there with each launch. A reboot empties
that, and the pods live on: the kubelet starts their containers again with the mounts that it was answered
once, and asks nobody. So an agent that finds a copy without its folder makes the folder again. All of it
blocks.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from agent.kit import atomic_file
from agent.kit.small_file import read_text
from agent.vgpu.folders import FOLDER, LONGEST_ABOUT, About, key_of
from agent.vgpu.isolation_errors import FolderUnusable

log = structlog.get_logger()

SUFFIX = ".json"


class Copies:
    """All of them on this node. One that cannot be kept is missed after a reboot, and by nobody before."""

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER

    def keep(self, about: About) -> None:
        """Have the copy be of this; a problem is logged."""
        try:
            atomic_file.write(
                self._folder, f"{key_of(about.ids)}{SUFFIX}", msgspec.json.encode(about), mode=0o600
            )
        except OSError as error:
            log.warning("limits_not_copied", pod=about.pod_key, problem=str(error))

    def follow(self, key: str, about: About) -> None:
        """Have the copy say what the folder says.

        One that an earlier version wrote leaves out what that does not know, as the layout of the files, and
        a reboot leaves nothing but the copy to make them of.
        """
        try:
            agrees = (self._folder / f"{key}{SUFFIX}").read_bytes() == msgspec.json.encode(about)
        except OSError:
            agrees = False
        if not agrees:
            self.keep(about)

    def drop(self, key: str) -> None:
        """Forget a container."""
        with suppress(OSError):
            (self._folder / f"{key}{SUFFIX}").unlink(missing_ok=True)

    def without_folder(self, keys: Collection[str]) -> Iterator[About]:
        """Those whose folder is not among these; one that cannot be read is removed."""
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            if file.stem in keys:
                continue
            try:
                about = msgspec.json.decode(read_text(file, LONGEST_ABOUT), type=About)
                if not about.ids or key_of(about.ids) != file.stem:
                    raise FolderUnusable("it is of other units than its name")
                yield about
            except (OSError, ValueError, FolderUnusable) as error:
                log.warning("limits_copy_unreadable", file=str(file), problem=str(error))
                self.drop(file.stem)
