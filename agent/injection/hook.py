"""NVIDIA's two programs in the image, and the hook on the host: runtimes call it by its path there.

Below the state folder and never below /run, which many nodes mount noexec. The image brings the program; the
copy stays when the agent goes, for containers that are started again.
"""

import filecmp
import os
from pathlib import Path

from agent.injection.specification import CdiError
from agent.kit import files

CTK = "nvidia-ctk"
HOOK = "nvidia-cdi-hook"
FOLDER = "bin"  # of the hook on the host, below host.state


class HookNotInstalled(CdiError):
    """The hook cannot be put on the host, or not be run there."""


def present(folder: Path) -> bool:
    """Whether both programs lie in a folder. Blocks."""
    return all(os.access(folder / name, os.X_OK) for name in (CTK, HOOK))


def install(source: Path, folder: Path) -> Path:
    """Copy the program to `folder` unless it is there already; its path. Blocks. Raises HookNotInstalled."""
    target = folder / HOOK
    try:
        if not _same(source, target):
            # Hooks of containers that start meanwhile run on with the file that they have opened.
            files.write(folder, HOOK, source.read_bytes(), mode=0o755)
        refused = _noexec(folder)
    except OSError as error:
        raise HookNotInstalled(
            f"{target} cannot be written: {error.strerror or error}; make host.state writable for the agent"
        ) from error
    if refused:
        raise HookNotInstalled(_REFUSED.format(folder))
    return target


def obstacle(folder: Path) -> str | None:
    """Why no runtime could run the program there, be it there yet or not; None: nothing is seen. Blocks."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        return _REFUSED.format(folder) if _noexec(there) else None
    except OSError as error:
        return f"{there} cannot be looked at: {error.strerror}"


_REFUSED = (
    f"{{}} is on a file system mounted noexec, so that no runtime can run {HOOK} there; "
    "name another folder in host.state"
)


def _noexec(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def _same(source: Path, target: Path) -> bool:
    return (
        target.is_file()
        and not target.is_symlink()
        and os.access(target, os.X_OK)
        and filecmp.cmp(source, target, shallow=False)
    )
