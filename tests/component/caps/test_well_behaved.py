"""A program that does nothing wrong is neither held up nor ended, and what it does keeps the cap."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import hold
from tests.component.caps.native import preloaded
from tests.cuda_double.layout import FaultAction
from tests.cuda_double.machine import MIB, CudaMachine
from tests.pace import scaled

IN_A_THREAD = """
import threading
def started(work):
    context = out("cuDevicePrimaryCtxRetain", 0)
    def run():
        check("cuCtxSetCurrent", u64(context))
        work()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
def ends(thread):
    thread.join(30)
    return not thread.is_alive()
"""
EXECUTABLE = """
def executable(megabytes):
    graph = out("cuGraphCreate", 0)
    free_node(graph, alloc_node(graph, megabytes))
    return out("cuGraphInstantiateWithFlags", u64(graph), u64())
"""


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + scaled(30)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_whose_first_thread_has_ended_keeps_its_charge(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    first = programs(made, IN_A_THREAD, "init()", "alloc(300)")
    # Its state in /proc is that of a zombie then, and the other thread goes on.
    leave = "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)"
    first.send(f"other = started(main); {leave}")
    assert first("1 + 1") == 2
    stat = Path(f"/proc/{first.pid}/stat")
    _until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    second = programs(made, "init()")
    for _ in range(3):
        second("time.sleep(0.06)")  # a thorough search is due after 50 ms
        assert second("call('cuMemAlloc_v2', ctypes.byref(u64()), size(200 * MIB))") == 2
    assert machine.used() == made.charged() == 900 * MIB


def test_a_graph_on_a_second_stream_stays_below_the_cap(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, EXECUTABLE, "init()", "ready = executable(400)")
    for _ in range(3):
        program("stream = out('cuStreamCreate', 1); check('cuGraphLaunch', u64(ready), u64(stream))")
        program("check('cuStreamSynchronize', u64(stream))")
    assert machine.peak() <= 1024 * MIB
    assert made.charged() == machine.used()


def test_threads_go_on_while_one_waits_for_the_gpu(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, IN_A_THREAD, EXECUTABLE, "init()", "ready = executable(2)", "alloc(600)")
    machine.inject("cuStreamSynchronize", FaultAction.HANG)
    # More than is left: what the stream still works on is waited for.
    program("waiting = started(lambda: call('cuMemAllocAsync', ctypes.byref(u64()), size(200 * MIB), u64()))")
    _until(lambda: machine.calls("cuStreamSynchronize") == 1)
    assert program("ends(started(lambda: check('cuGraphLaunch', u64(ready), u64())))")
    assert program("ends(started(lambda: out('cuMemAllocAsync', size(2 * MIB), u64())))")
    machine.clear_faults()
    assert program("ends(waiting)")


@pytest.mark.parametrize("passed", [0, 1], ids=["before the launch", "behind it"])
def test_launches_go_on_while_one_waits_for_room_in_its_stream(
    container: MakeContainer, machine: CudaMachine, programs: Programs, passed: int
) -> None:
    """An event waits for room in a full stream, which another thread may have to make."""
    made = container(1024)
    hold(made, 99)
    program = programs(made, IN_A_THREAD, "init()", "kernel = function()")
    machine.inject("cuEventRecord", FaultAction.HANG, after=passed, times=1)
    program("waiting = started(lambda: launch(kernel))")
    _until(lambda: machine.calls("cuEventRecord") == passed + 1)
    assert program("ends(started(lambda: [launch(kernel) for _ in range(100)]))")
    machine.clear_faults()
    assert program("ends(waiting)")


def test_memory_is_freed_in_the_order_of_a_stream_without_a_wait(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, IN_A_THREAD, "init()", "kept = alloc(700)")
    machine.inject("cuStreamSynchronize", FaultAction.HANG)
    assert program("ends(started(lambda: check('cuMemFreeAsync', u64(kept), u64())))")
    machine.clear_faults()
    program("alloc(700)", "check('cuCtxSynchronize')")
    assert made.charged() == machine.used() == 1000 * MIB


def test_what_is_freed_on_a_busy_stream_stays_charged_until_the_stream_gets_there(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "kept = alloc(700)")
    machine.inject("cuEventQuery", FaultAction.FAIL, code=600)  # CUDA_ERROR_NOT_READY
    program("check('cuMemFreeAsync', u64(kept), u64())", "check('cuCtxSynchronize')")
    assert made.charged() == 1000 * MIB
    # To ask for an event would end a capture in another thread, were it not for the mode.
    assert machine.calls("cuThreadExchangeStreamCaptureMode") == 2
    machine.clear_faults()
    program("check('cuCtxSynchronize')")
    assert made.charged() == machine.used() == 300 * MIB


def test_what_was_freed_while_the_lock_was_held_is_given_back_later(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "kept = alloc(100)")
    holder = programs(
        made,
        f"import mmap; file = open({str(made.usage)!r}, 'r+b'); region = mmap.mmap(file.fileno(), 1 << 20)",
    )
    holder("libc = ctypes.CDLL(None); lock = ctypes.addressof(ctypes.c_char.from_buffer(region, 4096))")
    assert holder("libc.pthread_mutex_lock(ctypes.c_void_p(lock))") == 0
    holder.signal(signal.SIGSTOP)
    program("free(kept)")
    assert made.charged() == 400 * MIB
    holder.kill()
    program("alloc(724)")
    assert made.charged() == machine.used() == 1024 * MIB


def test_what_a_process_had_that_has_just_ended_is_free(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    first, second = programs(made, "init()", "alloc(400)"), programs(made, "init()")
    first.kill()
    # Another process searched for dead ones this very moment, and found none.
    searched = "struct.pack('<Q', time.clock_gettime_ns(time.CLOCK_BOOTTIME))"
    second(f"import struct; region = os.open({str(made.usage)!r}, os.O_WRONLY)")
    second(f"[os.pwrite(region, {searched}, at) for at in (288, 256)]; alloc(600)")
    assert made.charged() == machine.used() == 900 * MIB


def test_the_heap_of_device_code_is_charged(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()")
    heap = "call('cuCtxSetLimit', 2, size({} * MIB))"  # CU_LIMIT_MALLOC_HEAP_SIZE
    assert program(heap.format(8)) == 0
    assert made.charged() == 300 * MIB  # so much a context has in any case
    assert program(heap.format(508)) == 0
    assert made.charged() == 800 * MIB
    assert program(heap.format(1024)) == 2
    assert machine.calls("cuCtxSetLimit") == 2
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(300 * MIB))") == 2
    machine.inject("cuCtxSetLimit", FaultAction.FAIL, code=1, times=1)
    assert program(heap.format(608)) == 1
    assert made.charged() == 800 * MIB
    assert program(heap.format(108)) == 0
    assert made.charged() == 400 * MIB
    program("check('cuDevicePrimaryCtxRelease_v2', 0)")
    assert made.charged() == 0


def test_errors_of_the_driver_come_through(container: MakeContainer, programs: Programs) -> None:
    program = programs(container(1024))
    retain = "call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), {})"
    create = "call('cuCtxCreate_v2', ctypes.byref(u64()), 0, {})"
    assert [program(call.format(0)) for call in (retain, create)] == [3, 3]  # NOT_INITIALIZED
    program("check('cuInit', 0)")
    assert [program(call.format(9)) for call in (retain, create)] == [101, 101]  # INVALID_DEVICE


def test_the_region_is_never_a_standard_stream(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "check('cuInit', 0)", "os.close(2)", "init()", "alloc(100)")
    assert not program("os.path.exists('/proc/self/fd/2')")
    assert made.charged() == machine.used() == 400 * MIB


def test_a_complaint_that_nobody_reads_ends_nothing(container: MakeContainer, programs: Programs) -> None:
    made = container(1024)
    made.limits.unlink()
    program = programs(
        made,
        "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        "reads, writes = os.pipe(); os.dup2(writes, 2); os.close(reads); os.close(writes)",
        "check('cuInit', 0)",
    )
    assert program("call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), 0)") == 2
    assert program("signal.SIGPIPE in signal.sigpending()") is False


INTERRUPTED = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>
static int left = 3;
int posix_fallocate(int file, off_t at, off_t bytes) {
    (void)file, (void)at, (void)bytes;
    return left-- > 0 ? EINTR : 0;
}
int fallocate(int file, int mode, off_t at, off_t bytes) {
    if (left-- > 0) {
        errno = EINTR;
        return -1;
    }
    return (int)syscall(SYS_fallocate, file, mode, at, bytes);
}
"""


@pytest.mark.timeout(300)
def test_a_signal_refuses_no_memory(
    container: MakeContainer, machine: CudaMachine, programs: Programs, tmp_path: Path
) -> None:
    made = container(1024)
    program = programs(made, LD_PRELOAD=preloaded(tmp_path, INTERRUPTED, made.library))
    program("init()", "alloc(100)")
    assert made.charged() == machine.used() == 400 * MIB


OLD_KERNEL = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
int madvise(void *at, size_t bytes, int advice) {
    if (advice == 18) { /* MADV_WIPEONFORK, which came with Linux 4.14 */
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
"""


@pytest.mark.timeout(300)
def test_an_old_kernel_costs_no_memory_of_the_host(
    container: MakeContainer, machine: CudaMachine, programs: Programs, tmp_path: Path
) -> None:
    made = container(1024)
    program = programs(made, LD_PRELOAD=preloaded(tmp_path, OLD_KERNEL, made.library))
    size = "int(next(line for line in open('/proc/self/status') if line.startswith('VmSize')).split()[1])"
    program("init()", "[free(alloc(2)) for _ in range(100)]")
    before = program(size)
    program("[free(alloc(2)) for _ in range(2000)]")
    assert program(size) - before < 4096  # KiB
    assert made.charged() == machine.used() == 300 * MIB
