"""Small C programs of the tests, compiled as the library is."""

import platform
from pathlib import Path
from typing import Final

from clib import toolchain
from clib.headers import include

_FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


def program(folder: Path, name: str, architecture: str = "") -> Path:
    """The CUDA program of the C file beside this one, in `folder`, for a processor or the machine's own."""
    source, made = Path(__file__).with_name(f"{name}.c"), folder / name
    target = toolchain.target(architecture or platform.machine())
    flags = ["-target", target, *_FLAGS, f"-isystem{include('13')}"]
    toolchain.compile_c([*flags, str(source), "-o", str(made), "-ldl"], folder)
    return made


def shared(folder: Path, name: str, source: str) -> Path:
    """A shared object of that name, in `folder`."""
    (folder / f"{name}.c").write_text(source)
    target = toolchain.target(platform.machine())
    arguments = ["-target", target, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"{name}.c", "-ldl"]
    toolchain.compile_c([*arguments, "-o", name], folder)
    return folder / name


def preloaded(folder: Path, source: str, library: Path) -> str:
    """LD_PRELOAD by which the C library's functions are those of `source` first."""
    return f"{shared(folder, 'before.so', source)} {library}"
