"""Allocators of frameworks ask the driver for memory under a cap, on GPUs that differ in every size.

NVIDIA's runtime comes on the double as far as `test_real_cudart_asks_for_the_drivers_proof` says, so these
are the driver's calls behind it. Each takes what it gets: no more than the cap, and nearly all of it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import Container, make
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import Program

CAP = 2048
KIB = 1 << 10
GPUS = {
    "usual": CudaGpu(),
    "fine": CudaGpu(
        granularity=64 * KIB, module_bytes=96 * KIB, context_bytes=171 * MIB, pool_chunk=64 * KIB
    ),
    "coarse": CudaGpu(
        granularity=2 * MIB, module_bytes=10 * MIB, context_bytes=518 * MIB, pool_chunk=32 * MIB
    ),
}

Site = Callable[..., Program]


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> CudaGpu:
    return GPUS[request.param]


@pytest.fixture
def machine(tmp_path: Path, gpu: CudaGpu) -> CudaMachine:
    return CudaMachine.create(tmp_path / "cuda-state", [gpu])


@pytest.fixture
def made(container: MakeContainer, gpu: CudaGpu) -> Container:
    return container(CAP, context=gpu.context_bytes // MIB)


@pytest.fixture
def room(gpu: CudaGpu) -> int:
    """MiB that a process has beside its context."""
    return CAP - gpu.context_bytes // MIB


# As PyTorch does by default: blocks of 2 MiB for what is small, of 20 MiB below 10 MiB, else of even MiB.
# They are kept, and given back where the driver has no more.
CACHING = """
kept, live = [], []
def block(nbytes):
    return 2 * MIB if nbytes <= MIB else 20 * MIB if nbytes < 10 * MIB else -(-nbytes // (2 * MIB)) * 2 * MIB
def take(nbytes):
    wanted, at = block(nbytes), u64()
    found = next((each for each in kept if each[1] >= wanted), None)
    if found: kept.remove(found)
    elif call('cuMemAlloc_v2', ctypes.byref(at), size(wanted)):
        while kept: free(kept.pop()[0])
        if call('cuMemAlloc_v2', ctypes.byref(at), size(wanted)): return False
    live.append(found or (at.value, wanted))
    return True
def give(count):
    for _ in range(count): kept.append(live.pop(0))
"""


def test_caching_allocator(made: Container, machine: CudaMachine, programs: Programs, room: int) -> None:
    program = programs(made, CACHING, "init()", "sizes = [512, 3 * MIB, 37 * MIB + 5, 150 * MIB] * 40")
    program("for nbytes in sizes:\n    if not take(nbytes): give(3)")
    held = program("sum(each[1] for each in live + kept)")
    assert machine.used() <= made.charged() <= CAP * MIB
    assert held > (room - 152) * MIB
    # What is given back can be had again, in one piece.
    program("give(len(live))")
    assert program(f"take({room // 2 * 2} * MIB)")
    assert machine.peak() <= made.peak() <= CAP * MIB


# A range of addresses for all of the GPU and an eighth, and a piece of physical memory for each 20 MiB of it.
EXPANDABLE = """
SEGMENT = 20 * MIB
class Segment:
    def __init__(self):
        total = memory()[1]
        unit = ctypes.c_size_t()
        check('cuMemGetAllocationGranularity', ctypes.byref(unit), ctypes.byref(properties()), 0)
        assert SEGMENT % unit.value == 0
        count = (total + total // 8) // SEGMENT
        self.start = out('cuMemAddressReserve', size(count * SEGMENT), size(0), u64(), u64())
        self.handles = [None] * count
    def map(self, first, count):
        created = []
        for place in range(first, first + count):
            handle = u64()
            if call('cuMemCreate', ctypes.byref(handle), size(SEGMENT), ctypes.byref(properties()), u64()):
                for each in created: check('cuMemRelease', u64(each))
                return False
            created.append(handle.value)
        access = (ctypes.c_int * 3)(1, 0, 3)
        for place, handle in enumerate(created, first):
            check('cuMemMap', u64(self.start + place * SEGMENT), size(SEGMENT), size(0), u64(handle), u64())
            self.handles[place] = handle
        check('cuMemSetAccess', u64(self.start + first * SEGMENT), size(count * SEGMENT), access, size(1))
        return True
    def unmap(self, first, count):
        check('cuStreamSynchronize', u64())
        for place in range(first, first + count):
            check('cuMemUnmap', u64(self.start + place * SEGMENT), size(SEGMENT))
            check('cuMemRelease', u64(self.handles[place]))
            self.handles[place] = None
"""


def test_expandable_segments(made: Container, machine: CudaMachine, programs: Programs, room: int) -> None:
    program = programs(made, EXPANDABLE, "init()", "segment = Segment()")
    program("grown = 0\nwhile segment.map(grown, 3): grown += 3")
    assert program("grown") == room // 60 * 3
    assert machine.used() == made.charged() <= CAP * MIB
    # A hole in its middle is for somebody else, and comes back.
    program("segment.unmap(3, 6)", "other = alloc(110)")
    assert not program("segment.map(3, 6)")
    program("free(other)")
    assert program("segment.map(3, 6)")
    program("segment.unmap(0, grown)")
    assert machine.used() == made.charged() == CAP * MIB - room * MIB
    assert machine.peak() <= CAP * MIB


# The stream-ordered allocator as the only one: its pool keeps everything, and steps are captured with it.
ASYNC = """
def keep_everything():
    pool = out('cuDeviceGetDefaultMemPool', 0)
    check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(u64(2**64 - 1)))
def step(stream, sizes):
    live, code = [], 0
    for megabytes in sizes:
        at = u64()
        code = code or call('cuMemAllocAsync', ctypes.byref(at), size(megabytes * MIB), u64(stream))
        if at.value: live.append(at.value)
    for at in live: check('cuMemFreeAsync', u64(at), u64(stream))
    return code
def captured(stream, sizes):
    check('cuStreamBeginCapture_v2', u64(stream), 1)
    code, graph = step(stream, sizes), u64()
    check('cuStreamEndCapture', u64(stream), ctypes.byref(graph))
    return out('cuGraphInstantiateWithFlags', graph, u64())
def replay(ready, stream):
    return call('cuGraphLaunch', u64(ready), u64(stream)) or call('cuStreamSynchronize', u64(stream))
"""


def test_async_allocator_with_graphs(
    made: Container, machine: CudaMachine, programs: Programs, room: int
) -> None:
    program = programs(made, ASYNC, "init()", "stream = out('cuStreamCreate', 1)", "keep_everything()")
    half = [room // 8] * 4
    assert program(f"[step(stream, {half}) for _ in range(50)]") == [0] * 50
    # Graphs of several shapes on one stream, as a server has them by size of batch, beside the pool.
    program(f"ready = [captured(stream, [{room // 16}] * count) for count in (1, 2, 4, 6)]")
    assert program("[replay(each, stream) for each in ready * 20]") == [0] * 80
    assert machine.used() <= made.charged() <= CAP * MIB
    # One above the cap is refused, and those before run on; the pool has to give back for them.
    assert program(f"replay(captured(stream, [{room // 4}] * 5), stream)") == 2
    assert program("[replay(each, stream) for each in ready]") == [0] * 4
    assert program(f"step(stream, {half})") == 0
    assert machine.peak() <= CAP * MIB


def test_pool_of_half_of_the_free_memory(
    made: Container, machine: CudaMachine, programs: Programs, room: int
) -> None:
    """As RAPIDS' memory manager begins: a pool of its own, warmed up with half of what is free."""
    program = programs(made, ASYNC, "init()", "free_bytes, total = memory()")
    assert program("[free_bytes, total]") == [room * MIB, CAP * MIB]
    program(
        "pool = out('cuMemPoolCreate', ctypes.byref(PoolProperties(1, 0, Location(1, 0))))",
        "check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(u64(total)))",
        "half = free_bytes // 2 // 256 * 256",
        "def take(nbytes):\n"
        "    at = u64()\n"
        "    code = call('cuMemAllocFromPoolAsync', ctypes.byref(at), size(nbytes), u64(pool), u64())\n"
        "    return code, at.value",
        "at = take(half)[1]; check('cuMemFreeAsync', u64(at), u64())",
    )
    assert machine.used() <= made.charged()
    # What it keeps is there for its own allocations at once, for others when they ask.
    assert program("[take(half // 8)[0] for _ in range(8)]") == [0] * 8
    block = program("out('cuMemAlloc_v2', size(half // 2))")
    assert block
    assert program("take(half)[0]") == 2
    assert machine.used() <= made.charged() <= CAP * MIB
    assert machine.peak() <= CAP * MIB
    # Managed memory that is more than the GPU: the cap counts it wherever it lies.
    assert program("call('cuMemAllocManaged', ctypes.byref(u64()), size(total), 1)") == 2


REGISTERED = """
import mmap
def registered(megabytes):
    area = mmap.mmap(-1, megabytes * MIB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(area))
    check('cuMemHostRegister_v2', ctypes.c_void_p(at), size(megabytes * MIB), 2)
    return area, at, out('cuMemHostGetDevicePointer_v2', ctypes.c_void_p(at), 0)
"""


def test_registered_host_memory_and_shared_buffers(
    made: Container, machine: CudaMachine, programs: Programs, room: int
) -> None:
    """As NCCL has it: proxies' buffers on the host, and the peer's on the GPU by a file descriptor."""
    program = programs(made, REGISTERED, "init()", "areas = [registered(64) for _ in range(100)]")
    program("pinned = out('cuMemHostAlloc', size(8192 * MIB), 3, kind=ctypes.c_void_p)")
    assert machine.used() == made.charged() == (CAP - room) * MIB
    program("handle = create(60); at = reserve(60); map_at(at, 60, handle)")
    program(
        "fd = ctypes.c_int(); check('cuMemExportToShareableHandle', ctypes.byref(fd), u64(handle), 1, u64())"
    )
    # Within one process both ends are one memory; the importer's charge is the safe side.
    program("peer = out('cuMemImportFromShareableHandle', ctypes.c_void_p(fd.value), 1)")
    program("there = reserve(60); map_at(there, 60, peer)")
    assert machine.used() <= made.charged() <= (CAP - room + 120) * MIB
    program("unmap(there, 60); check('cuMemRelease', u64(peer))")
    program("unmap(at, 60); check('cuMemRelease', u64(handle))")
    program("[check('cuMemHostUnregister', ctypes.c_void_p(at)) for _, at, _ in areas]")
    assert machine.used() == made.charged() == (CAP - room) * MIB


TRITON = """
def compiled(number):
    module = u64()
    code = call('cuModuleLoadData', ctypes.byref(module), b'image')
    if code: return code
    kernel = out('cuModuleGetFunction', module, b'kernel_1us')
    modules.append(module.value)
    return call('cuLaunchKernel', u64(kernel), 1, 1, 1, 128, 1, 1, 0, u64(), None, None)
modules = []
"""


def test_thousands_of_modules(
    made: Container, machine: CudaMachine, programs: Programs, gpu: CudaGpu, room: int
) -> None:
    """As Triton loads them, a module for each kernel and shape: none costs more than it takes."""
    program = programs(made, TRITON, "init()")
    fits = min(3000, room * MIB // gpu.module_bytes)
    assert program(f"[compiled(n) for n in range({fits})].count(0)") == fits
    assert machine.used() == made.charged() <= CAP * MIB
    if fits < 3000:
        assert program("compiled(0)") == 2
    program("for each in modules: check('cuModuleUnload', u64(each))")
    assert machine.used() == made.charged() == (CAP - room) * MIB


MIXED = """
import random
def work(seed):
    drawn, pieces, refused, modules = random.Random(seed), [], 0, 0
    stream = out('cuStreamCreate', 1)
    for _ in range(300):
        kind = drawn.choice(['linear', 'small', 'physical', 'pool', 'array', 'module', 'free', 'free'])
        amount, at, code = drawn.randrange(1, 90), u64(), 0
        if kind == 'linear':
            code = call('cuMemAlloc_v2', ctypes.byref(at), size(amount * MIB - drawn.randrange(MIB)))
        elif kind == 'small':
            code = call('cuMemAlloc_v2', ctypes.byref(at), size(drawn.randrange(1, MIB)))
        elif kind == 'physical':
            wanted = ctypes.byref(properties())
            code = call('cuMemCreate', ctypes.byref(at), size(amount * 4 * MIB), wanted, u64())
        elif kind == 'pool':
            code = call('cuMemAllocAsync', ctypes.byref(at), size(amount * MIB + 512), u64(stream))
        elif kind == 'array':
            shape = ArrayShape(amount * 1024, 256, 0, 0x20, 1, 0)
            code = call('cuArray3DCreate_v2', ctypes.byref(at), ctypes.byref(shape))
        elif kind == 'module':
            code = call('cuModuleLoadData', ctypes.byref(at), b'image')
        elif pieces:
            kind, at = pieces.pop(drawn.randrange(len(pieces)))
            if kind == 'pool': check('cuMemFreeAsync', at, u64(stream))
            else:
                check({'physical': 'cuMemRelease', 'array': 'cuArrayDestroy', 'module': 'cuModuleUnload'}.get(
                    kind, 'cuMemFree_v2'), at)
            continue
        else: continue
        assert code in (0, 2), (kind, code)
        refused += code == 2
        if not code: pieces.append((kind, at))
        modules += kind == 'module' and not code
    check('cuStreamSynchronize', u64(stream))
    return refused, modules
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_no_size_of_the_gpu_is_the_librarys_own(
    made: Container, machine: CudaMachine, programs: Programs, gpu: CudaGpu, seed: int
) -> None:
    """A constant of the library that equals one of the double would hide an error where GPUs differ."""
    first, second = programs(made, MIXED, "init()"), programs(made, MIXED, "init()")
    refused, modules = zip(*(each(f"work({seed})") for each in (first, second)), strict=True)
    assert sum(refused) > 0, "the cap was never met"
    # Beside another process a module counts 2 MiB, until the agent has measured it.
    unseen = sum(modules) * max(0, gpu.module_bytes - 2 * MIB)
    assert made.charged() <= CAP * MIB
    assert machine.used() <= made.charged() + unseen
    assert machine.peak() <= CAP * MIB + unseen


def test_padding_of_a_granule_above_two_mib_is_all_that_is_not_charged(
    tmp_path: Path, library: Path, driver: Path
) -> None:
    """No driver with such a granule is known; the agent measures the rest, as it does arrays' padding."""
    gpu = CudaGpu(granularity=4 * MIB, context_bytes=172 * MIB)
    machine = CudaMachine.create(tmp_path / "cuda-state", [gpu])
    made = make(tmp_path / "container", library, (CAP,), context=172)
    programs = Programs(machine, driver)
    with programs.stack:
        program = programs(made, "init()", "got = 0; handle = create(20)")
        program("while call('cuMemAlloc_v2', ctypes.byref(u64()), size(37 * MIB)) == 0: got += 1")
        count = program("got")
        assert made.charged() == (172 + 38 * count + 20) * MIB
        assert machine.used() - made.charged() == 2 * MIB * count
