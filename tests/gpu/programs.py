"""The MPS programs for the GPU at hand.

In turn: the driver's own (they fit it for certain), those in the folder that `GPU_TEST_MPS` names (for a
machine without network: `python -m tests.gpu.kit` fills one), those of Debian's package.
"""

import ctypes
import os
import shutil
from pathlib import Path

from agent.mps.binary import CONTROL, SERVER
from agent.nvml import binding as nvml_library
from agent.nvml.binding import NvmlBinding
from tests.mps_binaries import SUITES, MpsBinaryMissing, both_programs

VARIABLE = "GPU_TEST_MPS"
DRIVER_FOLDERS = "/usr/local/nvidia/bin:/run/nvidia/driver/usr/bin:/opt/nvidia/bin"
LIBRARY = "libcuda.so.1"
# Where images keep a driver that their loader knows by a variable only, if at all.
LIBRARY_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib")


def load() -> str:
    """Load the driver's CUDA library; the name or path that did. Blocks. Raises OSError with the remedy."""
    problem = ""
    for name in (LIBRARY, *(f"{folder}/{LIBRARY}" for folder in LIBRARY_FOLDERS)):
        try:
            ctypes.CDLL(name)
        except OSError as error:
            problem = problem or str(error)
        else:
            return name
    raise OSError(
        f"{problem}, nor is it in {', '.join(LIBRARY_FOLDERS)}: the tier needs a GPU with its driver; "
        "name the driver's folder in LD_LIBRARY_PATH where it is elsewhere"
    )


def binding() -> NvmlBinding:
    """NVML as the loader finds it, else as a driver root's; not opened yet."""
    try:
        ctypes.CDLL(nvml_library.SONAME)
    except OSError:
        return NvmlBinding(roots=(Path("/"),))
    return NvmlBinding()


def lay_out(folder: Path, library: Path) -> Path:
    """Put both programs into `folder`; the control program. Raises MpsBinaryMissing.

    The daemon gets a clean environment from the agent, so a server finds a driver library that only
    LD_LIBRARY_PATH leads to by way of a wrapper, whatever its daemon hands on.
    """
    control, server = _found()
    (folder / CONTROL).symlink_to(control)
    wrapper = folder / SERVER
    wrapper.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{library.parent}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        f'exec "{server}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return folder / CONTROL


def _found() -> tuple[Path, Path]:
    search = f"{os.environ.get('PATH', os.defpath)}:{DRIVER_FOLDERS}"
    for path in (search, os.environ.get(VARIABLE, "")):
        control, server = (shutil.which(name, path=path) if path else None for name in (CONTROL, SERVER))
        if control and server:
            return Path(control), Path(server)
    try:
        return both_programs(max(SUITES))
    except MpsBinaryMissing as error:
        raise MpsBinaryMissing(
            f"neither the driver nor {VARIABLE} brings {CONTROL} and {SERVER}, "
            f"and Debian's cannot be had: {error}"
        ) from error


def library_in_use() -> Path:
    """Where the process has the driver's CUDA library from; load it first. Blocks."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.rpartition(" ")[2])
        if path.name.startswith("libcuda.so"):
            return path
    raise FileNotFoundError(f"{LIBRARY} is not loaded")
