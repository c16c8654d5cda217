"""Processes that have the enforcement library, by their real memory maps."""

import sys
from pathlib import Path

import pytest

from agent.vgpu.watch import loads
from clib.build_library import cached
from tests.cuda_double.program import Program, commanded

READY = "print('null', flush=True); sys.stdin.read()"
MAPPED = (
    "import mmap; file = open(sys.argv[1], 'rb'); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
)


@pytest.mark.timeout(300)
def test_a_process_that_only_maps_the_library_has_not_loaded_it() -> None:
    library = cached()

    def found(way: str, *, preload: bool) -> bool | None:
        argv = [sys.executable, "-I", "-S", "-c", f"import sys; {way}{READY}", str(library)]
        with commanded(argv, {"LD_PRELOAD": str(library)} if preload else {}) as process:
            ready(process)
            return loads(process.pid, library, Path("/proc"))

    assert found(MAPPED, preload=False) is False
    assert found("", preload=False) is False
    assert found("", preload=True) is True


def ready(process: Program) -> None:
    assert process._process.stdout is not None
    assert process._process.stdout.readline() == "null\n"
