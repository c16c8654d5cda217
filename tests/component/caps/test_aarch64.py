"""The library for the other processor that it is built for, run by qemu-user where this machine is none."""

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from clib.build_library import cached
from tests.cluster.build import cache, debian
from tests.component.caps.container import CHEAP_MIB, Container, make
from tests.component.caps.native import program
from tests.cuda_double.build import build
from tests.cuda_double.fixtures import CACHE
from tests.cuda_double.machine import MIB, OUT_OF_MEMORY, CudaMachine

ARCHITECTURE: Final = "aarch64"
CAP: Final = 256
_QEMU: Final = f"/usr/bin/qemu-{ARCHITECTURE}-static"
_LIBC: Final = "libc6-arm64-cross"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def capped(tmp_path: Path) -> Container:
    """A container with the library for the processor."""
    return make(tmp_path / "container", cached(ARCHITECTURE), (CAP,), context=CHEAP_MIB)


@pytest.fixture
def run(tmp_path: Path, gpu: CudaMachine) -> Run:
    """Runs a program of the processor, with a library preloaded or none."""
    starter: list[str] = []
    if platform.machine() != ARCHITECTURE:
        debian.ensure({_QEMU: "qemu-user-static"}, print)
        root = cache.folder(_LIBC, "1", lambda into: debian.unpack(_LIBC, into / "root", print), print)
        starter = [_QEMU, "-L", str(root / "root" / "usr" / f"{ARCHITECTURE}-linux-gnu")]
    double = build(CACHE, architecture=ARCHITECTURE)

    def start(
        name: str, *arguments: int | str, container: Container | None = None
    ) -> subprocess.CompletedProcess[str]:
        preload = container.environment if container else {}
        variables = [f"{name}={value}" for name, value in preload.items()]
        # The emulator itself must not load what is meant for its program.
        given = [part for variable in variables for part in ("-E", variable)] if starter else []
        command = [*starter, *given, program(tmp_path, name, ARCHITECTURE), double, *arguments]
        return subprocess.run(
            [str(part) for part in command],
            env={**gpu.environment, **({} if starter else preload)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return start


@pytest.mark.timeout(400)
def test_library_runs_on_aarch64(run: Run, capped: Container, gpu: CudaMachine) -> None:
    """To the cap and not a byte more, and the cap is what the program sees."""
    done = run("fill", container=capped)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{(CAP - CHEAP_MIB) // 2} {OUT_OF_MEMORY} 0 {CAP * MIB}\n"
    assert gpu.peak() == capped.charged() == CAP * MIB
    free = run("fill")
    assert free.stdout.split()[-1] == str(16384 * MIB), "the trial itself is without a cap"


@pytest.mark.timeout(400)
def test_threads_race_for_memory_on_aarch64(run: Run, capped: Container, gpu: CudaMachine) -> None:
    """In one process: what each of several reads of itself in /proc is made up by qemu-user.

    Without forks: children of a process with threads hang under qemu-user now and then.
    """
    done = run("race", 1, 8, 200, 5, "without-forks", container=capped)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (CAP - 64) * MIB < gpu.peak() <= CAP * MIB
    assert gpu.used() == capped.charged() == 0
