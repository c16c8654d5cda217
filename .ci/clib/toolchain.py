"""The compiler: `zig cc` of the pinned wheel `ziglang`, which links against any glibc for any processor."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from clib.wheels import BuildError, cache_root, unpacked

ARCHITECTURES: Final = ("x86_64", "aarch64")
GLIBC: Final = "2.17"
"""The oldest glibc that the library runs on: that of manylinux2014, so of every image with Python wheels."""
_PLATFORMS: Final = {"x86_64": "manylinux2010_x86_64", "aarch64": "manylinux2014_aarch64"}
_COMPILE_SECONDS: Final = 300


def target(architecture: str) -> str:
    """The target's name in zig: `x86_64-linux-gnu.2.17`."""
    return f"{architecture}-linux-gnu.{GLIBC}"


def zig() -> Path:
    """The program, fetched on the first call (100 MB). Raises BuildError."""
    machine = platform.machine()
    if machine not in _PLATFORMS:
        raise BuildError(f"no compiler is pinned for {machine}: build on {' or '.join(_PLATFORMS)}")
    program = (
        unpacked("ziglang", _PLATFORMS[machine], lambda name: name.startswith("ziglang/")) / "ziglang" / "zig"
    )
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    return program


def compile_c(arguments: Sequence[str], folder: Path) -> str:
    """Run `zig cc` in `folder` and return its standard output. Raises BuildError with its messages."""
    caches = {f"ZIG_{kind}_CACHE_DIR": str(cache_root() / "zig") for kind in ("GLOBAL", "LOCAL")}
    try:
        done = subprocess.run(
            [str(zig()), "cc", *arguments],
            cwd=folder,
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"zig cc took longer than {_COMPILE_SECONDS} s") from error
    if done.returncode:
        raise BuildError(f"zig cc {' '.join(arguments)} failed:\n{done.stderr.strip()[-8000:]}")
    return done.stdout
