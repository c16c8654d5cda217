"""The library is loaded into every process of a container, whatever image it has: it asks little of it."""

from pathlib import Path

import pytest

from clib.build_library import cached
from clib.toolchain import ARCHITECTURES, GLIBC
from tests.component.caps import elf
from tests.component.caps.native import shared


@pytest.mark.timeout(400)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_library_asks_little_of_an_image(architecture: str) -> None:
    found = elf.read(cached(architecture))
    assert {"libc.so.6"} <= found.needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}
    assert set(found.versions) <= found.needed
    asked = {version.removeprefix("GLIBC_") for versions in found.versions.values() for version in versions}
    assert asked
    newest = max(tuple(map(int, version.split("."))) for version in asked)
    assert newest <= tuple(map(int, GLIBC.split(".")))
    # Nothing of it runs before something calls it, and nothing when a process ends.
    assert not {elf.RUNS_CODE[tag] for tag in found.tags & elf.RUNS_CODE.keys()}


@pytest.mark.timeout(300)
def test_the_reader_sees_a_constructor(tmp_path: Path) -> None:
    source = "volatile int begun;\n__attribute__((constructor)) static void begin(void) { begun = 1; }\n"
    found = elf.read(shared(tmp_path, "begins.so", source))
    assert "DT_INIT_ARRAY" in {elf.RUNS_CODE[tag] for tag in found.tags & elf.RUNS_CODE.keys()}
