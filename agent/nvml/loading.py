"""Finding and loading libnvidia-ml.so.1, before the binding asks the system loader for it.

nvidia-ml-py opens the bare soname and takes no path. A library that is loaded already answers for
its soname, so loading it here by full path serves driver roots (driver containers mount the driver
under a directory of their own) and test doubles alike.
"""

import ctypes
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from agent.kit.files import inside
from agent.nvml.nvml_errors import NvmlCode, NvmlLibraryMissing

SONAME = "libnvidia-ml.so.1"

# Where distributions, driver containers and WSL put it, below the root of the driver.
_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
)


def find(roots: Iterable[Path]) -> Path | None:
    """The library under the first driver root that has it."""
    for root in roots:
        for folder in _FOLDERS:
            with suppress(OSError):  # a loop of links
                path = inside(root, f"{folder}/{SONAME}")
                if path.is_file():
                    return path
    return None


def preload(path: Path) -> ctypes.CDLL:
    """Load the library by path. Raises NvmlLibraryMissing when that cannot be."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        hint = "install the NVIDIA driver, or correct the driver root"
        raise NvmlLibraryMissing(
            NvmlCode.LIBRARY_NOT_FOUND, "dlopen", f"cannot load NVML from {path}: {error}; {hint}"
        ) from error
