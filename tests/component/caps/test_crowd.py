"""More processes than the usage region has slots for."""

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clib import toolchain
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import SLOT_BYTES, SLOTS_AT, Container
from tests.cuda_double.machine import MIB, CudaMachine

USED_SLOTS_AT, TOTAL_AT = 280, 4096 + 128
MEMBERS_AT, MEMBERS = 856064, 8192
SOURCE = Path(__file__).with_name("crowd.c")
SLOTS = 2047  # and one that is shared
HELD = 2045
COUNT = 14


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of many processes."""
    program = tmp_path_factory.mktemp("crowd") / "crowd"
    toolchain.compile_c(
        ["-O1", "-Wno-deprecated-non-prototype", str(SOURCE), "-ldl", "-o", str(program)], program.parent
    )
    return program


@contextmanager
def _running(
    crowd: Path, container: Container, machine: CudaMachine, driver: Path, size: int
) -> Iterator[int]:
    process = subprocess.Popen(
        [str(crowd), str(driver), str(COUNT), str(size)],
        env={**machine.environment, **container.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def _occupy(container: Container, pid: int, count: int = HELD) -> None:
    """Slots of many processes, which have 2 MiB each; a living process stands for all of them."""
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    with container.usage.open("r+b") as file:
        file.seek(USED_SLOTS_AT)
        file.write(struct.pack("<Q", count))
        file.seek(TOTAL_AT)
        file.write(struct.pack("<Q", count * 2 * MIB))
        for number in range(count):
            file.seek(SLOTS_AT + number * SLOT_BYTES)
            file.write(struct.pack("<IIQQQ96xQ", pid, 1, start, namespace, number, 2 * MIB))


@pytest.mark.timeout(120)
def test_more_processes_than_slots_share_the_last(
    crowd: Path, container: MakeContainer, machine: CudaMachine, programs: Programs, driver: Path
) -> None:
    cap = 2 * (HELD + COUNT - 3)
    made = container(cap, context=0)
    machine.state.devices[0].context_bytes = 0
    with subprocess.Popen(["sleep", "300"]) as others:
        _occupy(made, others.pid)
        with _running(crowd, made, machine, driver, 2 * MIB) as given:
            # The last three do not fit, though there is room for them to be counted.
            assert given == COUNT - 3
            assert made.charged() == made.peak() == cap * MIB
            assert machine.used() == given * 2 * MIB
            slots = made.slots()
            assert len(slots) == SLOTS + 1
            assert slots[-1][0] == 0
            assert slots[-1][2] == (given - (SLOTS - HELD)) * 2 * MIB
        others.kill()
    # All are dead: nothing is left of them, in the shared slot neither.
    program = programs(made, "init()")
    assert program("memory()") == [cap * MIB, cap * MIB]
    assert made.charged() == 0
    assert machine.used() == 0


@pytest.mark.timeout(120)
def test_a_process_that_cannot_be_counted_is_refused_with_a_reason(
    container: MakeContainer, machine: CudaMachine, programs: Programs, capfd: pytest.CaptureFixture[str]
) -> None:
    made = container(16384)
    with subprocess.Popen(["sleep", "300"]) as others:
        _occupy(made, others.pid, SLOTS)
        start = int(Path(f"/proc/{others.pid}/stat").read_text().rpartition(")")[2].split()[19])
        namespace = Path(f"/proc/{others.pid}/ns/pid").stat().st_ino
        with made.usage.open("r+b") as file:
            file.seek(SLOTS_AT + SLOTS * SLOT_BYTES)
            file.write(struct.pack("<IIQQ", 0, 2, 0, namespace))
            file.seek(MEMBERS_AT)
            file.write(struct.pack("<IIQ", others.pid, 0, start) * MEMBERS)
        program = programs(made, "check('cuInit', 0)")
        for _ in range(2):
            assert program("call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), 0)") == 2
        program.kill()
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        assert "GPU memory is refused" in said
        assert "more processes use the GPU than can be counted" in said
        others.kill()
    programs(made, "init()")  # of the dead nothing is left
    assert made.charged() == 300 * MIB
