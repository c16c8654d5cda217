"""NVIDIA's real libcuda and libcudart for tests: packages of Debian and PyPI, in the user's cache."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from clib.headers import PACKAGES
from clib.wheels import unpacked
from tests.mps_binaries import SUITES, MpsBinaryMissing, unpack

PACKAGE = "libcuda1"
NAME = "libcuda.so.1"
PINNED = {
    "535": ("535.261.03", "6ed312ee383dc77b0c583813c632d1cc625ee4fb7881ed3e37dcaf3cf7393b25"),
    "550": ("550.163.01", "98b825dd17a2430866fde4ce6211b35b0be5531d29b2ef8f9063cfe067d681ff"),
}
"""Major version -> the driver's version, and the SHA-256 of its library."""


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
                _check(major, found[0])
                (scratch / "made").mkdir()
                shutil.copy2(found[0], scratch / "made" / NAME)
                (scratch / "made").rename(final.parent)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return final


def _check(major: str, library: Path) -> None:
    version, wanted = PINNED[major]
    found = hashlib.sha256(library.read_bytes()).hexdigest()
    if found != wanted:
        raise MpsBinaryMissing(
            f"{library.name} has SHA-256 {found}, not that of {version}: "
            "if Debian has a newer driver, look at it and pin it in tests/cuda_binaries.py"
        )


def cudart(release: str) -> Path:
    """Path of NVIDIA's runtime of a release of CUDA (a key of PACKAGES), from its headers' wheel.

    Raises BuildError.
    """
    root = unpacked(
        PACKAGES[release], "manylinux2014_x86_64", lambda name: "/lib/libcudart.so" in name, "runtime"
    )
    (library,) = root.rglob("libcudart.so.*")
    return library
