"""Memory that several streams free: no other stream has it before they got there, any one afterwards."""

from pathlib import Path
from typing import Final

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import shared
from tests.cuda_double.machine import MIB, CudaMachine

STREAMS: Final = """
import threading
def take(megabytes, stream, form=""):
    at = u64()
    code = call("cuMemAllocAsync" + form, ctypes.byref(at), size(megabytes * MIB), u64(stream))
    return code, at.value
def give_behind(megabytes, milliseconds, stream, form=""):
    _, at = take(megabytes, stream, form)
    if milliseconds:
        launch(function(b"work_%dms" % milliseconds), stream or (2 if form else 0))
    check("cuMemFreeAsync" + form, u64(at), u64(stream))
def in_thread(work, *arguments):
    found = []
    def run():
        check("cuCtxSetCurrent", u64(context))
        found.append(work(*arguments))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
"""
KEEP: Final = (
    "context = init()",
    "pool = out('cuDeviceGetDefaultMemPool', 0)",
    "check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(u64(1 << 62)))",
    "one, other = out('cuStreamCreate', 1), out('cuStreamCreate', 1)",
)
LONG: Final = 600_000
"""Milliseconds of work that is not over before the test is."""

PIECES: Final = """
#include <string.h>
typedef unsigned long long u64;
static u64 reserved, used, sizes[512], last;
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = &last; return 0; }
int cuDeviceGetUuid_v2(void *uuid, int device) {
    (void)device;
    memcpy(uuid, "\\x8f\\x2b\\x1c\\x3d\\0\\0\\x40\\0\\x80\\0\\0\\0\\0\\0\\0\\1", 16);
    return 0;
}
int cuDeviceGetMemPool(void **pool, int device) { (void)device; *pool = &reserved; return 0; }
int cuStreamGetCtx(void *stream, void **context) { (void)stream; *context = &last; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cuStreamSynchronize(void *stream) { (void)stream; return 0; }
int cuStreamQuery(void *stream) { (void)stream; return ANSWER; }
int cuCtxSynchronize(void) { return 0; }
int cuMemPoolGetAttribute(void *pool, int attribute, u64 *value) {
    (void)pool;
    *value = attribute == 5 ? reserved : attribute == 7 ? used : 1;
    return 0;
}
int cuMemPoolTrimTo(void *pool, size_t least) { (void)pool; (void)least; return 0; }
int cuMemAllocAsync(u64 *address, size_t bytes, void *stream) {
    (void)stream;
    *address = ++last << 21;
    sizes[last] = bytes;
    used += bytes;
    reserved = used > reserved ? (used + 0x1ffffff) / 0x2000000 * 0x2000000 : reserved;
    return 0;
}
int cuMemFreeAsync(u64 address, void *stream) { (void)stream; used -= sizes[address >> 21]; return 0; }
"""

ENDING: Final = PIECES.replace(
    "int cuStreamGetCtx(void *stream, void **context) { (void)stream; *context = &last; return 0; }",
    """
#include <stdlib.h>
#include <time.h>
volatile int ends;
static int end(void) { ends = 1; nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL); return RESULT; }
static int got(void **context) { *context = (void *)0x5000; return 0; }
int cuStreamGetCtx(void *stream, void **context) {
    return stream == (void *)16 ? got(context) : cuCtxGetCurrent(context);
}
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags;
    (void)device;
    return got(context);
}
int cuCtxSynchronize_v2(void *context) { (void)context; return 0; }
int cuCtxDestroy_v2(void *context) { (void)context; return end(); }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; return got(context); }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return end(); }
int cuDevicePrimaryCtxReset_v2(int device) { (void)device; return end(); }
int cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &used; return 0; }
int cuEventRecord(void *event, void *stream) { (void)event; (void)stream; return 0; }
int cuEventQuery(void *event) { (void)event; return 0; }
int cuEventDestroy_v2(void *event) { (void)event; return 0; }
""",
)
"""The context 0x5000, and with it the stream 16, is gone long before the call that ends it is over."""

GONE: Final = "(ends && stream == (void *)16 ? abort(), 0 : 0)"
"""As a driver that follows the handle of a stream that went with its context."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("waits", "busy"),
    [
        (("check('cuCtxSynchronize')",), True),
        (("check('cuStreamSynchronize', u64(16))", "check('cuStreamSynchronize', u64(32))"), True),
        ((), False),  # it waited for an event, or looked at a word that the GPU wrote
    ],
)
def test_a_pool_that_cannot_be_trimmed_gives_what_it_has(
    waits: tuple[str, ...], busy: bool, container: MakeContainer, programs: Programs, tmp_path: Path
) -> None:
    made = container(400)
    driver = shared(tmp_path, "libcuda.so.1", PIECES.replace("ANSWER", "600" if busy else "0"))
    program = programs(made, STREAMS, driver=driver)
    program("held = [(take(20, 16), take(12, 16)) for _ in range(12)]")
    program(
        "for n, (large, _) in enumerate(held): check('cuMemFreeAsync', u64(large[1]), u64((16, 32)[n % 2]))"
    )
    assert made.charged() == 384 * MIB
    if waits:
        assert program("take(20, 16)")[0] == 2  # the other stream has not got there
        program(*waits)
    assert program("[take(20, (16, 32)[n % 2])[0] for n in range(12)]") == [0] * 12
    assert program("take(20, 16)")[0] == 2
    assert made.charged() <= 400 * MIB


@pytest.mark.parametrize("wait", ["check('cuCtxSynchronize')", "time.sleep(0.03)"])
def test_several_streams_that_are_done_cost_no_trim(
    wait: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(8192)
    program = programs(made, STREAMS, *KEEP)
    program(f"for n in range(12): give_behind(5000, 1, (one, other, 0)[n % 3]); {wait}")
    assert machine.calls("cuMemPoolTrimTo") == 0
    assert machine.peak() <= 8192 * MIB


@pytest.mark.parametrize("first", ["one", "0"])
def test_what_is_freed_again_after_a_wait_is_not_spare(
    first: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, STREAMS, *KEEP)
    program(f"give_behind(500, 0, {first})", "give_behind(1, 0, other)", "check('cuCtxSynchronize')")
    program(f"give_behind(500, {LONG}, {first})")
    assert program("take(500, other)")[0] == 2
    assert program(f"take(500, {first})")[0] == 0
    assert machine.peak() <= 1024 * MIB


@pytest.mark.parametrize("milliseconds", [LONG, 1])
def test_each_thread_has_a_stream_of_its_own(
    milliseconds: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    """Its thread-local variables lie where those of a thread lay that is gone."""
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, STREAMS, *KEEP)
    program(f"in_thread(give_behind, 600, {milliseconds}, 0, '_ptsz')", "time.sleep(0.05)")
    assert program("in_thread(take, 600, 0, '_ptsz')[0]") == (2 if milliseconds == LONG else 0)
    assert machine.peak() <= 1024 * MIB


def test_the_same_thread_has_what_its_own_stream_freed(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, STREAMS, *KEEP)
    program(f"give_behind(600, {LONG}, 0, '_ptsz')")
    assert program("take(600, 0, '_ptsz')[0]") == 0
    assert machine.calls("cuMemPoolTrimTo") == machine.calls("cuStreamSynchronize") == 0


@pytest.mark.parametrize("milliseconds", [LONG, 1])
def test_a_stream_is_not_the_destroyed_one_whose_handle_it_has(
    milliseconds: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, STREAMS, *KEEP)
    program(f"give_behind(600, {milliseconds}, one)", "check('cuStreamDestroy_v2', u64(one))")
    program("again = [out('cuStreamCreate', 1) for _ in range(50)]", "time.sleep(0.05)")
    assert program("one in again")
    assert program("take(600, one)[0]") == (2 if milliseconds == LONG else 0)
    assert machine.peak() <= 1024 * MIB


def test_streams_that_are_gone_are_forgotten(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, STREAMS, *KEEP)
    program("for _ in range(60): in_thread(give_behind, 10, 1, 0, '_ptsz'); time.sleep(0.002)")
    assert machine.calls("cuEventDestroy_v2") >= 40
    program("check('cuDevicePrimaryCtxReset_v2', 0)", "context = init()")
    assert program("take(900, 0)")[0] == 0


def ended_by(call: str) -> tuple[str, ...]:
    """Another thread begins to end the context."""
    begun = "ctypes.c_int.in_dll(CUDA, 'ends').value"
    started = f"ending = threading.Thread(target=lambda: {call})", "ending.start()"
    return (*started, f"while ending.is_alive() and not {begun}: time.sleep(0.001)")


@pytest.mark.parametrize(
    ("made_by", "call"),
    [
        ("'cuCtxCreate_v2', 0", "call('cuCtxDestroy_v2', u64(ended))"),
        ("'cuDevicePrimaryCtxRetain'", "call('cuDevicePrimaryCtxRelease_v2', 0)"),
        ("'cuDevicePrimaryCtxRetain'", "call('cuDevicePrimaryCtxReset_v2', 0)"),
    ],
)
@pytest.mark.parametrize("result", [0, 700])
def test_the_streams_of_a_context_that_ends_are_not_asked(
    made_by: str, call: str, result: int, container: MakeContainer, programs: Programs, tmp_path: Path
) -> None:
    made = container(1100)
    source = ENDING.replace("ANSWER", GONE).replace("RESULT", str(result))
    program = programs(made, STREAMS, driver=shared(tmp_path, "libcuda.so.1", source))
    program(f"ended = out({made_by}, 0)", "held = take(20, 48)")
    program("give_behind(600, 0, 16)", "check('cuMemFreeAsync', u64(held[1]), u64(48))")
    program(*ended_by(call), "check('cuStreamDestroy_v2', u64(48))", "ending.join()")
    if result:
        assert program("take(600, 32)[0]") == 2  # the context may be there, and the stream not
        program("check('cuCtxSynchronize_v2', u64(ended))")
    assert program("take(600, 32)[0]") == 0


def test_a_context_that_ends_takes_nothing_of_the_next_one_along(
    container: MakeContainer, programs: Programs, tmp_path: Path
) -> None:
    """The next one has its handle, and a stream with a handle of before."""
    made = container(1300)
    source = ENDING.replace("ANSWER", "600").replace("RESULT", "0")
    program = programs(made, STREAMS, driver=shared(tmp_path, "libcuda.so.1", source))
    program("ended = out('cuCtxCreate_v2', 0, 0)", "give_behind(20, 0, 16)")
    program(*ended_by("call('cuCtxDestroy_v2', u64(ended))"), "out('cuCtxCreate_v2', 0, 0)")
    program("give_behind(600, 0, 16)", "ending.join()")
    assert program("take(600, 32)[0]") == 2  # its stream has not got there
