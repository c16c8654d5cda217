"""Images of all kinds, with the mounts that a container gets: capped where they can be, and never ended.

A folder stands for an image: nothing is in it but what the case needs, and the library and /etc/ld.so.preload
are mounted into it as a container runtime does it.
"""

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from clib.build_library import HEADERS, NAME
from clib.headers import include
from tests.cluster.build import cache, debian
from tests.component.caps.conftest import MakeContainer
from tests.component.caps.container import CHEAP_MIB, Container
from tests.component.caps.native import program, shared
from tests.component.caps.sanitized import NEEDS
from tests.cuda_double.machine import MIB, OUT_OF_MEMORY, CudaMachine

CAP: Final = 256
FULL: Final = f"{(CAP - CHEAP_MIB) // 2} {OUT_OF_MEMORY} 0 {CAP * MIB}\n"
LIBRARY: Final = "usr/lib/gpu-node-agent"
OWN: Final = (
    "#include <unistd.h>\n"
    '__attribute__((constructor)) static void begin(void) { if (write(2, "own", 3) < 0) { _exit(9); } }\n'
)


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system in a folder."""

    root: Path

    def add(self, file: Path, at: str = "") -> None:
        """A file, at its own path by default, with all libraries that it is linked with."""
        place = self.root / (at or str(file)).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copy(file, place)

    def add_linked(self, file: Path, at: str) -> None:
        """A program or library of this machine, with its loader and libraries."""
        self.add(file, at)
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
        for found in re.findall(r"(/\S+) \(0x", listed):
            self.add(Path(found))

    def run(
        self, container: Container | None, machine: CudaMachine, *command: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of the image, in a container or without."""
        (self.root / "gpu").touch()
        (self.root / "proc").mkdir(exist_ok=True)
        mounts = [f"mount --bind {machine.path} {self.root}/gpu", f"mount --bind /proc {self.root}/proc"]
        if container:
            # The runtime makes what a mount needs, in an image without /etc as well.
            places = [self.root / LIBRARY, self.root / "etc" / "ld.so.preload"]
            places[0].mkdir(parents=True)
            places[1].parent.mkdir(exist_ok=True)
            places[1].touch()
            preload = container.folder / "ld.so.preload"
            preload.write_text(f"/{LIBRARY}/{NAME}\n")
            mounts += [f"mount --bind {container.folder} {places[0]}", f"mount --bind {preload} {places[1]}"]
        shell = " && ".join([*mounts, f'exec chroot {self.root} "$@"'])
        return subprocess.run(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", shell, "sh", *command],
            env={
                **machine.environment,
                next(iter(machine.environment)): "/gpu",
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An image with nothing in it."""
    (tmp_path / "root").mkdir()
    return Image(tmp_path / "root")


@pytest.fixture
def filling(image: Image, tmp_path: Path, driver: Path) -> Image:
    """One with a CUDA program, its loader and its libraries alone: no shell, no /etc."""
    image.add_linked(program(tmp_path, "fill"), "/fill")
    image.add_linked(driver, "/libcuda.so.1")
    return image


@pytest.fixture
def made(container: MakeContainer) -> Container:
    """The mounts."""
    made: Container = container(CAP, context=CHEAP_MIB)
    return made


def test_an_image_without_etc_and_without_a_shell_is_capped(
    filling: Image, made: Container, gpu: CudaMachine
) -> None:
    assert not (filling.root / "etc").exists()
    done = filling.run(made, gpu, "/fill", "/libcuda.so.1")
    assert (done.returncode, done.stdout, done.stderr) == (0, FULL, "")
    assert gpu.peak() == CAP * MIB


def test_an_image_with_a_preload_file_of_its_own_is_capped_and_loses_that_file(
    filling: Image, made: Container, gpu: CudaMachine, tmp_path: Path
) -> None:
    filling.add(shared(tmp_path, "own.so", OWN), "/own.so")
    (filling.root / "etc").mkdir()
    (filling.root / "etc" / "ld.so.preload").write_text("/own.so\n")
    free = filling.run(None, gpu, "/fill", "/libcuda.so.1")
    assert (free.returncode, free.stdout.split()[-1]) == (0, str(16384 * MIB))
    assert "own" in free.stderr, "the image's own file is in force"
    done = filling.run(made, gpu, "/fill", "/libcuda.so.1")
    assert (done.returncode, done.stdout, done.stderr) == (0, FULL, "")


def _gcc(folder: Path, source: Path, *arguments: str) -> Path:
    debian.ensure(NEEDS, print)
    made = folder / source.stem
    command = [
        "gcc",
        "-D_GNU_SOURCE",
        f"-isystem{include(HEADERS)}",
        str(source),
        *arguments,
        "-o",
        str(made),
    ]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return made


def _written(folder: Path, text: str) -> Path:
    source = folder / "greets.c"
    source.write_text(text)
    return source


def _static(image: Image, folder: Path) -> None:
    main = '#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n'
    image.add(_gcc(folder, _written(folder, main), "-static"), "/greets")


def _musl(image: Image, folder: Path) -> None:
    """Debian's musl, whose loader reads no preload file; it is the C library, too."""
    unpacked = cache.folder("musl", "1", lambda into: debian.unpack("musl", into / "root", print), print)
    loader = f"/lib/ld-musl-{platform.machine()}.so.1"
    (libc,) = (unpacked / "root").rglob("libc.so")
    image.add(libc, loader)
    # The start of a program as this machine's compiler has it is that of another C library.
    start = "__attribute__((force_align_arg_pointer)) " if platform.machine() == "x86_64" else ""
    declared = "int puts(const char *text);\nvoid exit(int code);\n"
    main = f'{declared}{start}void _start(void) {{ puts("hello"); exit(0); }}\n'
    flags = ["-nostdlib", "-nostartfiles", f"-Wl,--dynamic-linker={loader}", f"-L{libc.parent}", "-l:libc.so"]
    image.add(_gcc(folder, _written(folder, main), *flags), "/greets")


OTHERS: Final[dict[str, Callable[[Image, Path], None]]] = {"static": _static, "musl": _musl}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_program_that_takes_no_preload_runs_as_ever(
    kind: str, image: Image, made: Container, gpu: CudaMachine, tmp_path: Path
) -> None:
    OTHERS[kind](image, tmp_path)
    done = image.run(made, gpu, "/greets")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", ""), done


SANITIZED: Final = {
    # Its library wants to be the first: such a build says that it need not.
    "address": (["-fsanitize=address"], {"ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}),
    "address, static": (["-fsanitize=address", "-static-libasan"], {"ASAN_OPTIONS": "detect_leaks=0"}),
    "thread": (["-fsanitize=thread"], {}),
    "thread, static": (["-fsanitize=thread", "-static-libtsan"], {}),
    "undefined": (["-fsanitize=undefined"], {}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SANITIZED)
def test_a_program_built_with_a_sanitizer_is_capped_and_not_ended(
    kind: str, made: Container, gpu: CudaMachine, driver: Path, tmp_path: Path
) -> None:
    flags, environment = SANITIZED[kind]
    _gcc(tmp_path, Path(__file__).with_name("fill.c"), *flags, "-ldl")
    done = subprocess.run(
        ["setarch", "--addr-no-randomize", str(tmp_path / "fill"), str(driver)],
        env={**gpu.environment, **made.environment, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, FULL, "")
    assert gpu.peak() == CAP * MIB
