"""Pools of the host and of managed memory, which the double has not: a driver of a few lines has them."""

from pathlib import Path

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import shared
from tests.cuda_double.machine import MIB

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
    *value = attribute == 5 ? reserved[(char *)pool - pools] : 0;
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
    assert program(f"take({way}(2, 2), 512)") == 2
    assert program(f"take({way}(1, 2), 4096)") == 0
