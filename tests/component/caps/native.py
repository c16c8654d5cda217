"""Small C programs of the tests, compiled as the library is."""

import platform
from pathlib import Path

from agent.isolation.clib import toolchain


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
