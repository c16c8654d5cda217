"""Compiles the simulated libnvidia-ml.so.1 against the real nvml.h (PyPI package `nvidia-nvml-dev`).

For tests, benchmarks and the test cluster; the demo runs on the Python face and needs no compiler.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clib.wheels import only_one
from tests.cuda_double.generate import layout_header
from tests.nvml_double.header import header_text

SONAME: Final = "libnvidia-ml.so.1"
STATE_VARIABLE: Final = "GNA_SIM_STATE"
_FLAGS: Final = (
    *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-pthread", "-Wl,-z,defs", f"-Wl,-soname,{SONAME}"),
)
_SOURCES = Path(__file__).parent
CACHE = Path(__file__).parents[2] / "build"
_CUDA = _SOURCES.parent / "cuda_double"


class BuildError(Exception):
    """The library cannot be built here; the text says what is missing or what the compiler said."""


def build(directory: Path = CACHE, without: Sequence[str] = ()) -> Path:
    """The library's path, under `directory`; compiled unless it is there already.

    `without` names functions that the library shall not export, as an older driver's would not.
    Each set of sources and options has a folder of its own, so that a cached library never is stale.
    """
    sources = sorted(_SOURCES.glob("*.c"))
    # Processes and memory come from the CUDA double's file, too, so that both doubles give the same figures.
    made = {"sim_layout.h": header_text(), "cuda_layout.h": layout_header()}
    nvml_h = _nvml_header()
    digest = hashlib.sha256()
    shared = [(_SOURCES / "sim.h").read_text(), (_CUDA / "living.h").read_text()]
    for text in (*_FLAGS, *sorted(without), *made.values(), *shared, nvml_h.read_text()):
        digest.update(text.encode() + b"\0")
    for source in sources:
        digest.update(source.read_bytes() + b"\0")
    folder = directory / f"nvml-sim-{digest.hexdigest()[:16]}"
    library = folder / SONAME
    if library.exists():
        return library
    with only_one(directory, folder.name):
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                draft = _compile(Path(scratch), sources, made, nvml_h.parent, without)
                draft.replace(library)  # whole or not at all
    return library


def _compile(
    scratch: Path, sources: Sequence[Path], made: Mapping[str, str], include: Path, without: Sequence[str]
) -> Path:
    for name, text in made.items():
        (scratch / name).write_text(text)
    # An exact name outranks the pattern.
    hidden = " ".join(f"{name};" for name in without)
    (scratch / "exports").write_text(f"{{ global: nvml*; local: {hidden} *; }};\n")
    draft = scratch / SONAME
    command = [
        os.environ.get("CC", "cc"),
        *_FLAGS,
        f"-I{scratch}",
        f"-I{_SOURCES}",
        f"-I{_CUDA}",
        f"-isystem{include}",
        f"-Wl,--version-script={scratch / 'exports'}",
        *(str(source) for source in sources),
        "-o",
        str(draft),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise BuildError(f"no C compiler {command[0]!r}: install one, or name it in CC") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"the simulated NVML does not compile:\n{error.stderr}") from error
    return draft


def _nvml_header() -> Path:
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate()))
    raise BuildError("nvml.h is not installed: install the development packages (nvidia-nvml-dev)")
