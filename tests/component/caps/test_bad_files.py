"""Whatever is wrong with limit file or usage region: memory is refused, and the application lives."""

import os
import signal
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.vgpu import layout
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import SLOTS_AT, Container
from tests.cuda_double.machine import MIB, CudaMachine
from tests.pace import scaled

REFUSED = "call('cuMemAlloc_v2', ctypes.byref(u64()), size(2 * MIB))"
RETAIN = "call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), 0)"


def _write(path: Path, at: int, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, at)
    finally:
        os.close(descriptor)


def _other_layout(container: Container) -> None:
    content = bytearray(container.limits.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    struct.pack_into("<I", content, 508, zlib.crc32(content[:508]))
    _write(container.limits, 0, bytes(content))


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _make_folder(container: Container) -> None:
    container.limits.unlink()
    container.limits.mkdir()


def _make_pipe(container: Container) -> None:
    container.limits.unlink()
    os.mkfifo(container.limits)


BAD: dict[str, Callable[[Container], object]] = {
    "limits missing": lambda it: it.limits.unlink(),
    "limits empty": lambda it: os.truncate(it.limits, 0),
    "limits short": lambda it: os.truncate(it.limits, 8191),
    "limits garbage": lambda it: _write(it.limits, 0, os.urandom(8192)),
    "limits header damaged": lambda it: _write(it.limits, 20, b"\x05"),
    "limits of another layout": _other_layout,
    "limits of another owner": lambda it: os.chown(it.limits, 1000, 1000),
    "limits that others may write": lambda it: it.limits.chmod(0o666),
    "limits with both copies damaged": lambda it: _write(it.limits, 512 + 24, b"\xff" * 8),
    "limits of another GPU": lambda it: it.limits.write_bytes(
        layout.limit_file(
            "x",
            [layout.DeviceLimits(gpu="GPU-" + "9" * 8 + "-0000-4000-8000-" + "9" * 12, memory_bytes=1 << 40)],
        )
    ),
    "limits a link": lambda it: _link(it.limits),
    "limits a folder": _make_folder,
    "limits a pipe": _make_pipe,
    "usage missing": lambda it: it.usage.unlink(),
    "usage empty": lambda it: os.truncate(it.usage, 0),
    "usage short": lambda it: os.truncate(it.usage, layout.USAGE_BYTES - 1),
    "usage garbage": lambda it: it.usage.write_bytes(os.urandom(layout.USAGE_BYTES)),
    "usage of another layout": lambda it: _write(it.usage, 8, b"\x09"),
    "usage of fewer GPUs": lambda it: _write(it.usage, 20, b"\x00"),
    "usage a link": lambda it: _link(it.usage),
    "usage with a lock of another kind": lambda it: _write(it.usage, 4096 + 16, b"\x00"),
    "usage with no lock for slots": lambda it: _write(it.usage, 128 + 16, struct.pack("<I", 1)),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_refuses_memory_and_ends_nothing(
    fault: str,
    container: MakeContainer,
    machine: CudaMachine,
    programs: Programs,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = container(1024)
    BAD[fault](made)
    program = programs(made, "check('cuInit', 0)")
    assert program(RETAIN) == 2
    assert program(RETAIN) == 2
    assert program("out('cuDriverGetVersion', kind=ctypes.c_int)") >= 13000
    assert machine.used() == 0
    program.kill()
    told = capfd.readouterr()
    assert told.out == ""
    if fault != "limits of another GPU":  # a GPU that is another's has no cap here, and that is no fault
        name = fault.split(maxsplit=1)[0]
        assert told.err.count("\n") == 1
        assert told.err.startswith(f"gpu-node-agent: GPU memory is refused: {made.folder}/{name}: ")


@pytest.mark.parametrize(
    "fault", [name for name in BAD if name.startswith("usage") and "missing" not in name]
)
def test_a_region_that_turns_bad_refuses_memory_and_ends_nothing(
    fault: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "kept = alloc(100)")
    BAD[fault](made)
    first = program(REFUSED)
    program(
        "free(kept)", "memory()", "[launch(kernel) for kernel in [function()] * 2000]"
    ) if first == 0 else None
    assert program("out('cuDriverGetVersion', kind=ctypes.c_int)") >= 13000
    # Above its cap it gets in no case, and what was truncated or has no lock gives nothing at all.
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(1024 * MIB))") == 2
    if "short" in fault or "empty" in fault or "kind" in fault:
        assert first == 2


def test_figures_that_a_tenant_wrote_do_not_lift_the_cap_of_a_process(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "alloc(600)")
    _write(made.usage, 4096 + 128, bytes(8))  # the total
    _write(made.usage, SLOTS_AT + 128, bytes(16))  # what this process has
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(126 * MIB))") == 2
    program("alloc(124)")
    assert machine.used() == 1024 * MIB


def test_a_stopped_holder_of_the_lock_refuses_and_never_allows(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()")
    holder = programs(
        made,
        f"import mmap; file = open({str(made.usage)!r}, 'r+b'); region = mmap.mmap(file.fileno(), 1 << 20)",
    )
    holder("libc = ctypes.CDLL(None); lock = ctypes.addressof(ctypes.c_char.from_buffer(region, 4096))")
    assert holder("libc.pthread_mutex_lock(ctypes.c_void_p(lock))") == 0
    holder.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert program(REFUSED) == 2
    assert time.monotonic() - began >= 2.9  # it waited for the lock
    assert program("memory()") == [0, 1024 * MIB]
    assert machine.used() == 300 * MIB
    holder.kill()
    program("alloc(2)")  # a process that dies with the lock leaves it to the next
    assert machine.used() == made.charged() == 302 * MIB
    assert layout.read_usage(made.usage.read_bytes())[0].repaired == 1


def test_a_stopped_holder_of_the_lock_holds_up_no_longer_the_more_have_died(
    container: MakeContainer, programs: Programs
) -> None:
    made = container(1024, context=0)
    program = programs(made, "init()")
    dead = programs(made)
    children = [dead("fork('init(); alloc(2); time.sleep(600)')") for _ in range(4)]
    end = time.monotonic() + scaled(30)
    while made.charged() < 8 * MIB:
        assert time.monotonic() < end
        time.sleep(0.02)
    holder = programs(
        made,
        f"import mmap; file = open({str(made.usage)!r}, 'r+b'); region = mmap.mmap(file.fileno(), 1 << 20)",
    )
    holder("libc = ctypes.CDLL(None); lock = ctypes.addressof(ctypes.c_char.from_buffer(region, 128))")
    assert holder("libc.pthread_mutex_lock(ctypes.c_void_p(lock))") == 0
    holder.signal(signal.SIGSTOP)
    for child in children:
        os.kill(child, signal.SIGKILL)
        dead(f"os.waitpid({child}, 0)[0]")
    began = time.monotonic()
    # It does not fit before the dead are swept: one look for them, and two tries to charge.
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(1020 * MIB))") == 2
    assert time.monotonic() - began < scaled(14)
    holder.kill()
    program("alloc(1020)")
    assert made.charged() == 1020 * MIB


def test_a_writer_that_dies_halfway_leaves_the_limits_of_before(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()")
    content = made.limits.read_bytes()
    made.set_limit(4096)
    whole = made.limits.read_bytes()[512 + 112 : 512 + 224]
    for count in range(0, 112, 7):
        _write(made.limits, 512 + 112, content[512 + 112 : 512 + 224])
        _write(made.limits, 512 + 112, whole[:count])
        assert program("memory()[1]") == 1024 * MIB, count
    _write(made.limits, 512 + 112, whole)
    assert program("memory()[1]") == 4096 * MIB


def test_an_application_that_closes_every_descriptor_goes_on(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    machine_file = f"state = os.open({str(machine.path)!r}, os.O_RDWR)"
    program = programs(made, "init()", "keep = {int(n) for n in os.listdir('/proc/self/fd') if n.isdigit()}")
    program(
        f"usage = [n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{{n}}') "
        f"and os.readlink(f'/proc/self/fd/{{n}}') == {str(made.usage)!r}]",
        "[os.close(int(n)) for n in usage]",
        machine_file,
    )
    program("alloc(100)")
    assert made.charged() == machine.used() == 400 * MIB


def in_a_namespace_of_its_own(made: Container, programs: Programs, command: str) -> int:
    """The pid of a process, below a program that waits, once the container has been charged 500 MiB."""
    program = programs(made, "libc = ctypes.CDLL(None)")
    assert program("libc.unshare(0x20000000)") == 0  # CLONE_NEWPID: for its children
    child = int(program(f"fork({command!r})"))
    end = time.monotonic() + scaled(30)
    while made.charged() < 500 * MIB:
        assert time.monotonic() < end
        time.sleep(0.02)
    return child


def test_memory_of_a_container_that_is_started_again_is_free(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    """Its processes were in a PID namespace that is no more, and whose pids say nothing in the new one."""
    made = container(1024)
    child = in_a_namespace_of_its_own(made, programs, "init(); alloc(200); time.sleep(60)")
    os.kill(child, signal.SIGKILL)
    end = time.monotonic() + scaled(30)
    while machine.processes():
        assert time.monotonic() < end
        time.sleep(0.02)
    program = programs(made, "init()")
    program("alloc(700)")
    assert made.charged() == machine.used() == 1000 * MIB


def test_a_process_in_another_pid_namespace_is_not_taken_for_dead(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    child = in_a_namespace_of_its_own(made, programs, "init(); alloc(200); time.sleep(60)")
    try:
        program = programs(made, "init()")
        assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(300 * MIB))") == 2
        assert made.charged() == 800 * MIB
    finally:
        os.kill(child, signal.SIGKILL)
