"""Fetches the pinned wheels of `wheels.lock` and unpacks what is needed of them into the user's cache.

`pip` does the fetching, so an index, a proxy or a folder of wheels (PIP_FIND_LINKS with PIP_NO_INDEX, as in
the Dockerfile) is whatever the machine is set up with.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK: Final = Path(__file__).with_name("wheels.lock")
PIP_SECONDS: Final = 600


class BuildError(Exception):
    """The library cannot be built here; the text says what is missing or what the tool answered."""


def cache_root() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/gpu-node-agent/clib`, made if absent."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base) / "gpu-node-agent" / "clib"
    root.mkdir(parents=True, exist_ok=True)
    return root


def requirement(package: str) -> str:
    """The lines of `package` in `wheels.lock`: its version and hashes."""
    blocks = LOCK.read_text().replace("\\\n", " ").splitlines()
    (found,) = [line for line in blocks if line.startswith(f"{package}==")]
    return found


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes that make `name` in `folder` waiting; the kernel ends that with this one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpacked(package: str, platform: str, wanted: Callable[[str], bool], part: str = "") -> Path:
    """The folder with the members of the wheel for which `wanted` holds, at their paths in the wheel.

    `platform` is a wheel's platform tag, such as `manylinux2014_x86_64`; `part` names what is wanted of a
    wheel that has several things. Complete or absent: the folder gets its name by rename, under a lock that
    concurrent builds share. Raises BuildError.
    """
    line = requirement(package)
    digest = hashlib.sha256(f"{line} {platform}".encode()).hexdigest()[:12]
    final = cache_root() / f"{package}{part and '-' + part}-{digest}"
    if final.is_dir():
        return final
    with only_one(cache_root(), package):
        if final.is_dir():
            return final
        with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=cache_root()) as name:
            scratch = Path(name)
            _unpack(_download(line, platform, scratch), scratch / "out", wanted)
            shutil.rmtree(final, ignore_errors=True)
            (scratch / "out").rename(final)
    return final


def _download(line: str, platform: str, scratch: Path) -> Path:
    (scratch / "requirement.txt").write_text(line + "\n")
    fixed = ["download", "--quiet", "--require-hashes", "--only-binary=:all:", "--no-deps"]
    place = [f"--platform={platform}", f"--dest={scratch}", f"--requirement={scratch / 'requirement.txt'}"]
    pip = [sys.executable, "-m", "pip", *fixed, *place]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"pip took longer than {PIP_SECONDS} s for {line.split(maxsplit=1)[0]}") from error
    if done.returncode:
        raise BuildError(
            f"pip cannot fetch {line.split(maxsplit=1)[0]} for {platform}:\n{done.stderr.strip()}"
        )
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _unpack(wheel: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.is_dir() and wanted(member.filename):
                path = Path(archive.extract(member, target))
                path.chmod((member.external_attr >> 16) & 0o777 or 0o644)
