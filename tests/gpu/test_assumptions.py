"""A driver does what the enforcement library takes for granted and no reference says; without limits.

docs/vgpu.md, "What counts", leans on them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pytest

from agent.vgpu.limits import context_bytes
from tests.cuda_double.program import Program, program
from tests.gpu.filling import HELPERS
from tests.gpu.kernels import WORK
from tests.gpu.limits import MIB
from tests.gpu.rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PIECE = 64  # MiB
STEP = 32  # MiB: pools grow by so much at a time on the GPUs of today
MODULES = 64
RESERVED_BY_GRAPHS, RESERVED_BY_POOL = 2, 5  # CU_GRAPH_MEM_ATTR_, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
USED_OF_POOL = 7  # CU_MEMPOOL_ATTR_USED_MEM_CURRENT
# A kernel of some hundred milliseconds: by its rounds on a GPU, by its name on the double.
ROUNDS, BUSY = 1 << 24, "work_300ms"
ASK = """
def reserved(symbol, of, attribute):
    value = u64()
    check(symbol, of, attribute, ctypes.byref(value))
    return value.value

def runnable(megabytes):
    graph = out("cuGraphCreate", 0)
    wanted = AllocNode(pool=PoolProperties(1, 0, Location(1, 0)), bytes=megabytes * MIB)
    node = u64(out("cuGraphAddMemAllocNode", u64(graph), None, size(0), ctypes.byref(wanted)))
    out("cuGraphAddMemFreeNode", u64(graph), ctypes.byref(node), size(1), u64(wanted.address))
    return out("cuGraphInstantiateWithFlags", u64(graph), u64())
"""


@contextmanager
def _started(rig: Rig) -> Iterator[Program]:
    with program(Path(rig.library_path()), {**os.environ, "CUDA_VISIBLE_DEVICES": rig.gpu.uuid}) as app:
        app(HELPERS, ASK)
        yield app


def _context_and_its_price(rig: Rig) -> tuple[int, int]:
    """Bytes that a context of a second process takes of the GPU, and those that the table says."""
    with _started(rig) as observer, _started(rig) as other:
        observer("init()", "alloc(1)")
        before: int = observer("memory()[0]")
        other("init()", "alloc(1)")
        taken: int = before - observer("memory()[0]")
    return taken, context_bytes(rig.gpu.product)


async def test_a_context_takes_no_more_than_the_table_says(rig: Rig) -> None:
    taken, price = await anyio.to_thread.run_sync(_context_and_its_price, rig)
    print(f"{rig.gpu.product}: a context takes {taken / MIB} MiB, the table says {price / MIB}")
    assert taken > 0
    if price:
        assert taken <= price + STEP * MIB


def _reserved_by_graphs(rig: Rig) -> list[int]:
    with _started(rig) as app:
        app("init()", "stream = out('cuStreamCreate', 1)", f"graphs = [runnable({PIECE}) for _ in range(2)]")
        found = []
        for number in range(2):
            app(f"check('cuGraphLaunch', u64(graphs[{number}]), u64(stream))")
            asked: int = app(f"reserved('cuDeviceGetGraphMemAttribute', 0, {RESERVED_BY_GRAPHS})")
            found.append(asked)
    return found


async def test_graphs_on_one_stream_share_memory_that_shows_when_a_launch_returns(rig: Rig) -> None:
    first, second = await anyio.to_thread.run_sync(_reserved_by_graphs, rig)
    assert PIECE * MIB <= first < 2 * PIECE * MIB
    assert second == first


def _reserved_by_a_trimmed_pool(rig: Rig) -> tuple[int, int]:
    ask = f"reserved('cuMemPoolGetAttribute', u64(pool), {RESERVED_BY_POOL})"
    with _started(rig) as app:
        app("init()", "pool = out('cuDeviceGetDefaultMemPool', 0)", "keep = u64(1 << 60)")
        app("check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(keep))")
        app(f"held = [out('cuMemAllocAsync', size({PIECE} * MIB), u64()) for _ in range(4)]")
        app("[check('cuMemFreeAsync', u64(one), u64()) for one in held[1:]]", "check('cuCtxSynchronize')")
        before: int = app(ask)
        app("check('cuMemPoolTrimTo', u64(pool), size(0))")
        after: int = app(ask)
    return before, after


async def test_a_trimmed_pool_keeps_what_is_allocated_and_no_more(rig: Rig) -> None:
    before, after = await anyio.to_thread.run_sync(_reserved_by_a_trimmed_pool, rig)
    assert before >= 4 * PIECE * MIB
    assert PIECE * MIB <= after <= (PIECE + STEP) * MIB


def _behind_a_busy_stream(rig: Rig) -> tuple[bool, list[tuple[int, int]]]:
    """Whether a stream was at work all the while; of a pool what is reserved and what is used, in MiB.

    Before memory was freed behind that stream, then, once it was taken and freed there again, and with as
    much for another stream.
    """
    pool = "reserved('cuMemPoolGetAttribute', u64(pool), {})"
    ask = f"[{pool.format(RESERVED_BY_POOL)} / MIB, {pool.format(USED_OF_POOL)} / MIB]"
    take, free = (
        f"at.value = out('cuMemAllocAsync', size({PIECE} * MIB), {{}})",
        "check('cuMemFreeAsync', at, {})",
    )
    seen = []
    with _started(rig) as app:
        app("init()", "pool = out('cuDeviceGetDefaultMemPool', 0)")
        app("stream, other = [u64(out('cuStreamCreate', 1)) for _ in range(2)]")
        app(f"module = u64(out('cuModuleLoadData', {WORK.replace('work', BUSY).encode()!r}))")
        app(f"kernel = out('cuModuleGetFunction', module, {BUSY.encode()!r})")
        app(f"at, words = u64(), ctypes.c_uint32({ROUNDS})", take.format("stream"))
        app("given = (ctypes.c_void_p * 2)(ctypes.addressof(at), ctypes.addressof(words))")
        app("check('cuLaunchKernel', u64(kernel), 1, 1, 1, 32, 1, 1, 0, stream, given, None)")
        seen.append(tuple(app(ask)))
        app(free.format("stream"))
        seen.append(tuple(app(ask)))
        app(take.format("stream"), free.format("stream"))
        seen.append(tuple(app(ask)))
        app(take.format("other"))
        seen.append(tuple(app(ask)))
        busy: bool = app("call('cuStreamQuery', stream) == 600")
        app("check('cuStreamSynchronize', stream)")
    return busy, seen


async def test_memory_freed_behind_a_busy_stream_is_that_streams_and_no_longer_used(rig: Rig) -> None:
    busy, seen = await anyio.to_thread.run_sync(_behind_a_busy_stream, rig)
    print(f"a pool's memory behind a busy stream, reserved and used: {seen}")
    assert busy, "the kernel is too short to look beside it"
    assert seen == [(PIECE, PIECE), (PIECE, 0), (PIECE, 0), (2 * PIECE, PIECE)]


def _free_around_modules(rig: Rig) -> list[int]:
    """Free memory before modules are loaded, when the last load has returned, later, and without them."""
    with _started(rig) as app:
        app("init()", "check('cuCtxSynchronize')")
        before: int = app("memory()[0]")
        app(f"held = [out('cuModuleLoadData', PTX) for _ in range({MODULES})]")
        at_once: int = app("memory()[0]")
        app("check('cuCtxSynchronize')", "time.sleep(0.5)")
        later: int = app("memory()[0]")
        app("[check('cuModuleUnload', u64(one)) for one in held]")
        without: int = app("memory()[0]")
    return [before, at_once, later, without]


async def test_free_memory_shows_modules_when_their_load_returns(rig: Rig) -> None:
    before, at_once, later, without = await anyio.to_thread.run_sync(_free_around_modules, rig)
    print(f"{MODULES} modules with 2 MiB each take {(before - at_once) / MIB} MiB")
    assert before - at_once >= MODULES * 2 * MIB
    assert at_once == later
    assert before - without < 2 * MIB
