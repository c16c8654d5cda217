"""Finding NVIDIA's `nvidia-cuda-mps-control`: in the driver root or on PATH."""

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent.mps.mps_errors import ProgramMissing
from agent.settings import Settings

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
FOLDERS = (
    *("usr/bin", "bin", "usr/local/bin", "opt/bin", "usr/sbin", "run/current-system/sw/bin"),
    # Beside libraries that the system loader does not know.
    *("usr/local/nvidia/bin", "home/kubernetes/bin/nvidia/bin"),
)
LIBRARY = "libcuda.so.1"
_ELF = struct.Struct("<4sB27xQ14xHH")  # magic, class, offset of the program headers, size and count of them
_HEADER = struct.Struct("<I4xQ16xQ")  # type, offset in the file, size there
_INTERPRETER = 3


@dataclass(frozen=True, slots=True)
class Program:
    """The control program and the root in which it must run."""

    path: Path  # as the agent sees it
    root: Path = Path("/")  # the driver root whose libraries it needs; "/" is the agent's own
    # The folder of the driver's libraries, as seen inside `root`; empty: the system loader knows them.
    libraries: str = ""

    @property
    def inner(self) -> str:
        return _inner(self.path, self.root)

    def version(self) -> object:
        """The identity of this program, which changes where a driver update replaces it. Blocks."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return (self.path, found.st_dev, found.st_ino, found.st_mtime_ns)


# Where none is found, what is left of its daemons can still be ended.
NO_PROGRAM = Program(Path("/nonexistent") / CONTROL)


def find(driver_root: Path, explicit: Path | None = None, search: str | None = None) -> Program:
    """The program. Blocks on files. `search` is a PATH, the process's own if None. Raises ProgramMissing."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK):
            raise ProgramMissing(
                f"mps.controlProgram names {explicit}, which is no program; correct the configuration"
            )
        return _program(explicit, Path("/"))
    for folder in FOLDERS:
        candidate = driver_root / folder / CONTROL
        if os.access(candidate, os.X_OK):
            return _program(candidate, driver_root)
    on_path = shutil.which(CONTROL, path=search)
    if on_path:
        return _program(Path(on_path), Path("/"))
    raise ProgramMissing(
        f"{CONTROL} is neither below {driver_root} nor on PATH: install the driver's MPS package "
        "(nvidia-cuda-mps on Debian, nvidia-compute-utils on Ubuntu), mount the driver root and set "
        "driver.root, or set mps.controlProgram"
    )


def finder_of(settings: Settings) -> Callable[[], Program]:
    """`find` as the configuration has it."""
    explicit = settings.mps.control_program
    return partial(find, Path(settings.driver.root), Path(explicit) if explicit else None)


def find_any(finder: Callable[[], Program]) -> Program:
    """The program that `finder` finds, or a missing one: daemons are ended by signals then. Blocks."""
    try:
        return finder()
    except ProgramMissing:
        return NO_PROGRAM


def _program(path: Path, root: Path) -> Program:
    prefix = path.parent.parent
    folder = prefix / "lib64"
    complete = _runs_inside(path, root)
    if (complete and prefix in (root, root / "usr")) or not (folder / LIBRARY).exists():
        return Program(path, root if complete else Path("/"))
    # A root that holds the driver's files and no system, as on COS, is no place to run anything in.
    return Program(path, root, _inner(folder, root)) if complete else Program(path, Path("/"), str(folder))


def _runs_inside(path: Path, root: Path) -> bool:
    """Whether the root has the loader that the program names."""
    return (loader := _loader(path)) is None or (root / loader.lstrip("/")).exists()


def _loader(path: Path) -> str | None:
    """The path of a program's loader; None: it names none, or is no program of 64 bits."""
    try:
        with path.open("rb") as file:
            magic, width, at, size, count = _ELF.unpack(file.read(_ELF.size))
            if magic != b"\x7fELF" or width != 2 or size < _HEADER.size:
                return None
            for number in range(count):
                file.seek(at + number * size)
                kind, offset, length = _HEADER.unpack(file.read(_HEADER.size))
                if kind == _INTERPRETER:
                    file.seek(offset)
                    return file.read(min(length, os.pathconf("/", "PC_PATH_MAX"))).rstrip(b"\0").decode()
    except (OSError, struct.error, UnicodeDecodeError):
        pass
    return None


def _inner(path: Path, root: Path) -> str:
    return str(path) if root == Path("/") else f"/{path.relative_to(root)}"
