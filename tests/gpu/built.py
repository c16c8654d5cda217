"""The C programs of the tier: those of a kit, or compiled here by the compiler of the enforcement library.

They are compiled with the headers of CUDA 11.8, whose entry points every driver since has.
"""

import hashlib
import os
import platform
import tempfile
from pathlib import Path

from tests.gpu import kernels

VARIABLE = "GPU_TEST_PROGRAMS"  # the folder of those that are built already: there is no compiler offline
RELEASE = "11.8"
SHARING, STORM, GREEDY = "sharing", "storm", "greedy"
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {
    SHARING: _ROOT / "tests" / "gpu" / "sharing.c",
    GREEDY: _ROOT / "tests" / "gpu" / "greedy.c",
    STORM: _ROOT / "tests" / "component" / "caps" / "storm.c",
}
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


def program(name: str) -> Path:
    """One of them, with the kernels beside it. Blocks; compiles it unless VARIABLE names a folder.

    Raises BuildError, FileNotFoundError.
    """
    if given := os.environ.get(VARIABLE):
        found = Path(given) / name
        if not found.is_file():
            raise FileNotFoundError(f"{found} is missing: make the kit again with python -m tests.gpu.kit")
        return found
    return _folder() / name


def _folder() -> Path:
    from clib import toolchain
    from clib.headers import include

    headers = {file for source in _SOURCES.values() for file in source.parent.glob("*.h")}
    contents = {str(file): file.read_text() for file in sorted({*_SOURCES.values(), *headers})}
    digest = hashlib.sha256(repr((_FLAGS, contents, kernels.sharing())).encode()).hexdigest()[:16]
    folder = _ROOT / "build" / f"gpu-programs-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            target = toolchain.target(platform.machine())
            for name, source in _SOURCES.items():
                places = [f"-isystem{include(RELEASE)}", str(source), "-ldl", "-o", name]
                toolchain.compile_c([*_FLAGS, "-target", target, *places], made)
            for name, text in kernels.sharing().items():
                (made / f"{name}.ptx").write_text(text)
            try:
                made.rename(folder)  # whole or not at all: others may build the same beside us
            except OSError:
                if not folder.is_dir():
                    raise
    return folder
