"""NVIDIA's real libcuda and libcudart for tests: packages of Debian and PyPI, in the user's cache."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from agent.isolation.clib.headers import PACKAGES
from agent.isolation.clib.wheels import unpacked
from tests.mps_binaries import SUITES, MpsBinaryMissing, unpack

PACKAGE = "libcuda1"
NAME = "libcuda.so.1"


def driver_library(major: str) -> Path:
    """Path of `libcuda.so.1` of driver `major` (a key of SUITES), fetched on the first call.

    Raises MpsBinaryMissing.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base) / "gpu-node-agent" / "libcuda"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may want it at once
        final = root / major / NAME
        if not final.exists():
            scratch = Path(tempfile.mkdtemp(prefix=f".{major}-", dir=root))
            try:
                unpacked = unpack(PACKAGE, SUITES[major], "non-free", scratch)
                found = [path for path in unpacked.rglob(f"libcuda.so.{major}.*") if path.is_file()]
                if len(found) != 1:
                    raise MpsBinaryMissing(
                        f"{PACKAGE} of driver {major} holds {len(found)} libraries, not one"
                    )
                (scratch / "made").mkdir()
                shutil.copy2(found[0], scratch / "made" / NAME)
                (scratch / "made").rename(final.parent)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return final


def cudart(release: str) -> Path:
    """Path of NVIDIA's runtime of a release of CUDA (a key of PACKAGES), from its headers' wheel.

    Raises BuildError.
    """
    root = unpacked(
        PACKAGES[release], "manylinux2014_x86_64", lambda name: "/lib/libcudart.so" in name, "runtime"
    )
    (library,) = root.rglob("libcudart.so.*")
    return library
