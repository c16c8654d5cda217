"""Compiles the CUDA double for one release of cuda.h, against glibc 2.17, so that it runs in any image."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clib import toolchain
from clib.headers import PACKAGES, entry_points, include
from clib.wheels import only_one
from tests.cuda_double import generate

SONAME: Final = "libcuda.so.1"
RELEASES: Final = tuple(PACKAGES)
_SOURCES: Final = Path(__file__).parent
_FLAGS: Final = (
    *(
        "-std=c11",
        "-D_GNU_SOURCE",
        "-O2",
        "-g1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-deprecated-declarations",
    ),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,defs", f"-Wl,-soname,{SONAME}"),
)


def build(directory: Path, release: str = "13", *, architecture: str = "x86_64", sanitizer: str = "") -> Path:
    """The library's path, under `directory`, of the driver of a release ("11.8", "12" or "13").

    Compiled unless it is there already: each set of sources and options has a folder of its own. `sanitizer`
    is one that the compiler knows, such as "thread". Raises BuildError.
    """
    points = entry_points(release)
    sources = {path.name: path.read_text() for path in sorted(_SOURCES.glob("*.[ch]"))}
    modelled = generate.models(sources.values())
    made = {
        "cuda_layout.h": generate.layout_header(),
        "models.h": generate.models_header(points, modelled),
        "gates.c": generate.gates(points, modelled),
    }
    options = [*_FLAGS, "-target", toolchain.target(architecture)]
    if sanitizer:
        options.append(f"-fsanitize={sanitizer}")
    digest = hashlib.sha256(repr((options, sources, made)).encode())
    folder = directory.resolve() / f"cuda-double-{digest.hexdigest()[:16]}"
    library = folder / SONAME
    if library.exists():
        return library
    with only_one(directory, folder.name):
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(folder, made, [file for file in sources if file.endswith(".c")], release, options)
    return library


def _compile(
    folder: Path, made: Mapping[str, str], sources: Sequence[str], release: str, options: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        for file, text in made.items():
            (scratch / file).write_text(text)
        c_files = [str(_SOURCES / file) for file in sources]
        places = [f"-I{scratch}", f"-I{_SOURCES}", f"-isystem{include(release)}"]
        draft = scratch / SONAME
        toolchain.compile_c([*options, *places, *c_files, "gates.c", "-o", str(draft)], scratch)
        draft.replace(folder / SONAME)  # whole or not at all
