"""The cache of built parts: one folder per family and key, complete or absent, shared by concurrent runs."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.build.errors import BuildError

Report = Callable[[str], None]


def cache_root() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/gpu-node-agent/cluster`, made if absent."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base) / "gpu-node-agent" / "cluster"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"cache folder {root} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    return root


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; the kernel drops it when its holder dies."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def is_built(family: str, key: str) -> bool:
    """Whether the cache has this part."""
    return (cache_root() / f"{family}-{key}").is_dir()


def folder(family: str, key: str, fill: Callable[[Path], None], report: Report) -> Path:
    """Return the cached folder of a family; on a miss let `fill` make it in a scratch folder and publish it.

    A half-made folder is never seen: it gets its name by rename, under the family's lock.
    """
    root = cache_root()
    final = root / f"{family}-{key}"
    if final.is_dir():
        return final
    with file_lock(root / f".{family}.lock"):
        if final.is_dir():  # another run built it while this one waited for the lock
            return final
        for stale in root.glob(f".{family}-making-*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{family}-making-", dir=root))
        started = time.monotonic()
        report(f"{family}: building")
        try:
            fill(scratch)
            scratch.chmod(0o755)
            scratch.rename(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        megabytes = sum(f.stat().st_size for f in final.rglob("*") if f.is_file()) / 1e6
        report(f"{family}: built in {time.monotonic() - started:.1f} s, {megabytes:.0f} MB")
    return final
