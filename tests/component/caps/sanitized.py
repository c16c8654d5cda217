"""The enforcement library linked into a test program, all of it built with a sanitizer of gcc.

A sanitizer's own library wants to be the first that a program loads, and asks for dlsym before it is ready.
So nothing is preloaded here: the program calls the library's dlsym by another name, all else is as ever.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clib import build_library, headers
from clib.rules import SOURCES
from clib.wheels import LOCK, only_one
from tests.cluster.build import debian

SANITIZERS: Final = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}
FOUND: Final = 23
"""Exit code of a process in which the sanitizer found something."""
ENVIRONMENT: Final = {
    # The driver keeps what a process has until the process ends.
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FOUND}",
    # Of the driver the sanitizer sees calls alone, and not by what its threads wait for each other.
    "TSAN_OPTIONS": f"halt_on_error=1:ignore_noninstrumented_modules=1:exitcode={FOUND}",
}
_FLAGS: Final = (
    *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-strict-aliasing"),
    *("-Wno-attributes", "-Wno-ignored-attributes"),  # of another compiler
    *("-pthread", "-Ddlsym=gna_hooked_dlsym", "-Ddlvsym=gna_hooked_dlvsym"),
)
NEEDS: Final = {"gcc": "gcc", "/usr/include/stdio.h": "libc6-dev"}


@dataclass(frozen=True, slots=True)
class Sanitized:
    """A built program. `folder` keeps its sources and what was compiled of them."""

    folder: Path
    sanitizer: str
    program: Path

    @classmethod
    def cached(cls, directory: Path, sanitizer: str, source: Path) -> "Sanitized":
        """A program with the library, below `directory`; compiled unless one of the same sources is there.

        Raises BuildError without gcc, and CalledProcessError.
        """
        debian.ensure(NEEDS, print)
        version = subprocess.run(["gcc", "--version"], capture_output=True, check=True, timeout=30).stdout
        digest = hashlib.sha256(
            repr((version, _FLAGS, SANITIZERS[sanitizer], build_library.HEADERS)).encode()
        )
        made_by = (*build_library.TOOLS.glob("*.py"), LOCK, Path(__file__))
        sources = (*SOURCES.glob("*.[ch]"), *source.parent.glob("*.h"), source)
        for path in sorted({*made_by, *sources}):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        folder = directory / f"sanitized-{sanitizer}-{digest.hexdigest()[:16]}"
        with only_one(directory, folder.name):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=directory) as scratch:
                    cls._build(Path(scratch) / "made", sanitizer, sources, source.stem).folder.rename(folder)
        return cls(folder, sanitizer, folder / source.stem)

    @classmethod
    def _build(cls, folder: Path, sanitizer: str, sources: Iterable[Path], name: str) -> "Sanitized":
        folder.mkdir()
        for path in sources:
            shutil.copy(path, folder)
        build_library.generate(folder)
        for path in folder.glob("*.c"):
            # gcc knows no such attribute, and jumps by itself where it can.
            path.write_text(path.read_text().replace("__attribute__((musttail)) return", "return"))
        made = cls(folder, sanitizer, folder / name)
        made._compile(sorted(path.name for path in folder.glob("*.c")))
        return made

    def with_fault(self, folder: Path, name: str, before: str, after: str) -> "Sanitized":
        """The same with a change in one of the library's files."""
        shutil.copytree(self.folder, folder)
        text = (folder / name).read_text()
        assert text.count(before) == 1, f"{name} has changed: {before}"
        (folder / name).write_text(text.replace(before, after))
        made = Sanitized(folder, self.sanitizer, folder / self.program.name)
        made._compile([name])
        return made

    def _compile(self, sources: Sequence[str]) -> None:
        flags = (
            *_FLAGS,
            *SANITIZERS[self.sanitizer],
            "-I.",
            f"-isystem{headers.include(build_library.HEADERS)}",
        )
        self._gcc(*flags, "-c", *sources)
        self._gcc(
            *flags,
            *sorted(path.name for path in self.folder.glob("*.o")),
            "-ldl",
            "-o",
            str(self.program),
        )

    def _gcc(self, *arguments: str) -> None:
        subprocess.run(["gcc", *arguments], cwd=self.folder, check=True, timeout=240)
