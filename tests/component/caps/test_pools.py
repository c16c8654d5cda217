"""Memory of pools; those of the host and of managed memory by a driver of a few lines."""

from pathlib import Path

import pytest

from agent.vgpu import layout
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import shared
from tests.cuda_double.machine import MIB, CudaMachine
from tests.cuda_double.program import ProgramError

DRIVER = """
#include <string.h>
typedef unsigned long long u64;
static u64 reserved[4];
static char pools[4];
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetUuid_v2(void *uuid, int device) {
    (void)device;
    memcpy(uuid, "\\x8f\\x2b\\x1c\\x3d\\0\\0\\x40\\0\\x80\\0\\0\\0\\0\\0\\0\\1", 16);
    return 0;
}
int cuMemGetDefaultMemPool(void **pool, const int *location, int type) {
    *pool = pools + (location[0] == 1 ? 0 : type == 2 ? 1 : 2);
    return 0;
}
int cuMemPoolCreate(void **pool, const int *properties) {
    return cuMemGetDefaultMemPool(pool, properties + 2, properties[0]);
}
int cuMemPoolGetAttribute(void *pool, int attribute, u64 *value) {
    *value = attribute == 5 || attribute == 7 ? reserved[(char *)pool - pools] : 0;
    return 0;
}
int cuMemPoolTrimTo(void *pool, size_t least) { (void)pool; (void)least; return 0; }
int cuMemAllocFromPoolAsync(u64 *address, size_t bytes, void *pool, void *stream) {
    (void)stream;
    *address = 1 << 21;
    reserved[(char *)pool - pools] += bytes;
    return 0;
}
"""
POOLS = """
def made(kind, place):
    return out("cuMemPoolCreate", ctypes.byref(PoolProperties(kind, 0, Location(place, 0))))
def default(kind, place):
    return out("cuMemGetDefaultMemPool", ctypes.byref(Location(place, 0)), kind)
def take(pool, megabytes):
    return call("cuMemAllocFromPoolAsync", ctypes.byref(u64()), size(megabytes * MIB), u64(pool), u64())
"""


OWN_POOL = """
def own_pool(megabytes):
    pool = out("cuMemPoolCreate", ctypes.byref(PoolProperties(1, 0, Location(1, 0))))
    at = u64()
    code = call("cuMemAllocFromPoolAsync", ctypes.byref(at), size(megabytes * MIB), u64(pool), u64())
    return pool, at.value, code
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["made", "default"])
def test_pools_of_the_host_are_free_and_those_of_managed_memory_are_not(
    way: str, container: MakeContainer, programs: Programs, tmp_path: Path
) -> None:
    made = container(1024)
    program = programs(made, POOLS, driver=shared(tmp_path, "libcuda.so.1", DRIVER))
    # Kind 1 is pinned, 2 managed; place 1 is the GPU, 2 the host.
    assert program(f"take({way}(1, 2), 4096)") == 0
    assert made.charged() == 0
    assert program(f"take({way}(1, 1), 512)") == 0
    assert made.charged() == 512 * MIB
    assert program(f"take({way}(2, 2), 256)") == 0
    assert made.charged() == 768 * MIB
    # What of such a pool lies where no call says: nothing of the container's charge is forgiven.
    slots = made.usage.read_bytes()[layout.SLOTS_AT :][: layout.SLOT_BYTES]
    assert layout.movable_bytes(slots) > 1 << 40
    assert program(f"take({way}(2, 2), 512)") == 2
    assert program(f"take({way}(1, 2), 4096)") == 0


def test_memory_that_may_come_back_from_the_host_is_told_apart(
    container: MakeContainer, programs: Programs
) -> None:
    """The agent forgives nothing of it."""
    made = container(1024)

    def movable() -> int:
        return layout.movable_bytes(made.usage.read_bytes()[layout.SLOTS_AT :][: 8 * layout.SLOT_BYTES])

    program = programs(made, "init()", "alloc(100)", "at = out('cuMemAllocManaged', size(65 * MIB), 1)")
    assert movable() == 66 * MIB
    program("small = out('cuMemAllocManaged', size(1000), 1)")
    assert movable() == 66 * MIB + 1024
    assert program("call('cuMemAllocManaged', ctypes.byref(u64()), size(2048 * MIB), 1)") == 2
    program("free(at)", "fork('init()')", "os.wait()")
    assert movable() == 1024
    program("free(small)")
    assert movable() == 0


def test_destroyed_pool_stays_charged(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, OWN_POOL, "init()", "pool, first, code = own_pool(800)")
    program("check('cuDeviceSetMemPool', 0, u64(pool))", "check('cuMemPoolDestroy', u64(pool))")
    assert program("code") == 0
    assert program("call('cuMemPoolDestroy', u64(pool))") == 1
    assert program("call('cuMemAllocFromPoolAsync', ctypes.byref(u64()), size(1), u64(pool), u64())") == 1
    for _ in range(5):
        assert program("own_pool(800)[2]") == 2
        assert machine.used() == made.charged() == 900 * MIB
    # Another pool is the device's now, and what is freed can be had again.
    program("at = out('cuMemAllocAsync', size(100 * MIB), u64())")
    program("check('cuMemFreeAsync', u64(first), u64()); check('cuCtxSynchronize')")
    assert machine.used() == made.charged() == 200 * MIB
    assert machine.calls("cuMemPoolDestroy") == 1
    assert program("own_pool(800)[2]") == 0
    assert machine.peak() <= 1024 * MIB


@pytest.mark.parametrize("end", ["Reset_v2", "Release_v2"])
def test_stale_handles_reach_nobody(
    end: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    program = programs(made, OWN_POOL, "init()", "used, destroyed = own_pool(100), own_pool(200)")
    program("at = out('cuMemAllocAsync', size(300 * MIB), u64()); check('cuMemFreeAsync', u64(at), u64())")
    program("check('cuMemPoolDestroy', u64(destroyed[0]))", f"check('cuDevicePrimaryCtx{end}', 0)")
    program("other = init()", "for _ in range(3): check('cuCtxSynchronize')")
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(3 << 30))") == 2
    program("at = out('cuMemAllocAsync', size(64 * MIB), u64())")
    assert machine.used() == made.charged() == 364 * MIB
    # The double ends a program that uses a handle of what is gone; so the library passed none.
    with pytest.raises(ProgramError, match="ended with -6"):
        program("call('cuMemPoolTrimTo', u64(used[0]), size(0))")


@pytest.mark.parametrize("megabytes", [1000, 3000, 6000, 9000])
def test_pools_are_not_trimmed_at_every_allocation(
    megabytes: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(10240)
    program = programs(made, "init()", "pool = out('cuDeviceGetDefaultMemPool', 0)")
    program("keep = u64(1 << 62); check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(keep))")
    program(
        "for _ in range(20):\n"
        f"    at = out('cuMemAllocAsync', size({megabytes} * MIB), u64())\n"
        "    check('cuMemFreeAsync', u64(at), u64())\n"
    )
    assert machine.calls("cuMemPoolTrimTo") == machine.calls("cuStreamSynchronize") == 0
    assert machine.used() == made.charged() == (megabytes + 300) * MIB
    # What the pool keeps is given back for others, and its use is no way past the cap.
    assert program(f"call('cuMemAlloc_v2', ctypes.byref(u64()), size({9940 - megabytes + 500} * MIB))") == 0
    assert program(f"call('cuMemAllocAsync', ctypes.byref(u64()), size({megabytes} * MIB), u64())") == 2
    assert machine.peak() <= 10240 * MIB


BEHIND = """
def behind(megabytes, milliseconds):
    stream = out("cuStreamCreate", 1)
    at = out("cuMemAllocAsync", size(megabytes * MIB), u64(stream))
    launch(function(b"work_%dms" % milliseconds), stream)
    check("cuMemFreeAsync", u64(at), u64(stream))
    return stream
def take(megabytes, stream):
    return call("cuMemAllocAsync", ctypes.byref(u64()), size(megabytes * MIB), u64(stream))
"""


def test_memory_freed_behind_a_busy_stream_is_no_other_streams(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    """The driver says at once that nobody uses it, and takes more from the GPU for all other streams."""
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, BEHIND, "init()", "other = out('cuStreamCreate', 1)")
    program("busy = behind(500, 600000)")
    assert program("take(500, other)") == 2
    assert program("take(300, other)") == 0
    assert machine.peak() <= 1024 * MIB
    # Of its own stream it is: nothing waits, and nothing is given back for it.
    before = machine.calls("cuMemPoolTrimTo"), machine.calls("cuStreamSynchronize")
    program("at = out('cuMemAllocAsync', size(500 * MIB), u64(busy))")
    assert (machine.calls("cuMemPoolTrimTo"), machine.calls("cuStreamSynchronize")) == before
    assert machine.used() <= made.charged() <= 1024 * MIB


def test_memory_freed_behind_a_stream_that_is_done_is_anybodys(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, BEHIND, "init()", "busy, other = behind(500, 1), out('cuStreamCreate', 1)")
    program("time.sleep(0.1)")
    assert program("take(500, other)") == 0
    assert program("take(300, busy)") == 0
    assert machine.peak() <= 1024 * MIB
