"""Paths of a root file system that is mounted somewhere: symbolic links in it count from there."""

from pathlib import Path

MOST_LINKS = 40  # as the kernel has it


def inside(root: Path, path: str | Path) -> Path:
    """The path here of what a program with that root knows as `path`. Blocks.

    As chroot would resolve it: no link and no `..` leads out of `root`. What does not exist is resolved as
    far as it does. Raises OSError for a loop of links.
    """
    todo = list(reversed(Path(path).parts))
    at: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in ("/", "."):
            continue
        if part == "..":
            del at[-1:]
            continue
        here = root.joinpath(*at, part)
        if not here.is_symlink():
            at.append(part)
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(f"{here}: a loop of symbolic links")
        target = here.readlink()
        if target.is_absolute():
            at.clear()
        todo.extend(reversed(target.parts))
    return root.joinpath(*at)
