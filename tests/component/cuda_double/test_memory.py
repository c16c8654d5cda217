"""Bytes: what each way of allocating takes from the GPU, and when it comes back."""

import pytest

from tests.component.cuda_double.conftest import Programs
from tests.cuda_double.layout import MemoryKind
from tests.cuda_double.machine import MIB, CudaMachine
from tests.cuda_double.program import Program, ProgramError

CONTEXT = 300 * MIB
START = ("init()", "held = []")


@pytest.fixture
def app(programs: Programs) -> Program:
    return programs(*START)


def of_kind(machine: CudaMachine, app: Program, kind: MemoryKind) -> int:
    return machine.uses()[app.pid][kind] // MIB


def test_a_context_costs_memory_until_it_is_released(machine: CudaMachine, app: Program) -> None:
    assert machine.processes() == {app.pid: CONTEXT}
    app("check('cuDevicePrimaryCtxRelease_v2', 0)")
    assert machine.processes() == {}


def test_the_end_of_a_context_frees_what_was_allocated_in_it(machine: CudaMachine, app: Program) -> None:
    app("alloc(10)", "alloc(0.1)", "check('cuDevicePrimaryCtxReset_v2', 0)")
    assert machine.used() == 0


@pytest.mark.parametrize(("asked", "taken"), [(0.001, 2), (1, 2), (2, 2), (2.1, 4), (64, 64)])
def test_allocations_take_granules_of_2_mib(
    machine: CudaMachine, app: Program, asked: float, taken: int
) -> None:
    app(f"held.append(alloc({asked}))")
    assert of_kind(machine, app, MemoryKind.LINEAR) == taken
    app("free(held.pop())")
    assert of_kind(machine, app, MemoryKind.LINEAR) == 0


def test_small_allocations_share_granules(machine: CudaMachine, app: Program) -> None:
    app("held += [alloc(0.5) for _ in range(9)]")
    assert of_kind(machine, app, MemoryKind.LINEAR) == 6
    app("[free(one) for one in held]")
    assert of_kind(machine, app, MemoryKind.LINEAR) == 0


def test_memory_ends_at_the_size_of_the_gpu(machine: CudaMachine, app: Program) -> None:
    free, total = app("memory()")
    assert total - free == CONTEXT
    app(f"alloc({free // MIB})")
    assert app("memory()[0]") == 0
    with pytest.raises(ProgramError, match="cuMemAlloc_v2: 2"):
        app("alloc(0.001)")
    assert machine.used() == machine.peak() == total


def test_pitch_is_counted_as_returned(machine: CudaMachine, app: Program) -> None:
    app(
        "pitch = ctypes.c_size_t()",
        "out('cuMemAllocPitch_v2', ctypes.byref(pitch), size(1025), size(4096), 4)",
    )
    assert app("pitch.value") == 1536
    assert of_kind(machine, app, MemoryKind.LINEAR) == 6


def test_managed_memory_is_counted_in_full_and_can_be_touched(machine: CudaMachine, app: Program) -> None:
    app("address = out('cuMemAllocManaged', size(4 * MIB), 1)", "ctypes.memset(address, 1, 4 * MIB)")
    assert of_kind(machine, app, MemoryKind.MANAGED) == 4
    app("free(address)")
    assert of_kind(machine, app, MemoryKind.MANAGED) == 0


def test_physical_memory_lives_until_the_last_release_and_unmap(machine: CudaMachine, app: Program) -> None:
    app("handle = create(8)", "place = reserve(8)", "map_at(place, 8, handle)")
    app("again = out('cuMemRetainAllocationHandle', u64(place))")
    for step in ("check('cuMemRelease', u64(handle))", "check('cuMemRelease', u64(again))"):
        app(step)
        assert of_kind(machine, app, MemoryKind.PHYSICAL) == 8
    app("unmap(place, 8)")
    assert of_kind(machine, app, MemoryKind.PHYSICAL) == 0


def test_create_map_release_repeated_adds_up(machine: CudaMachine, app: Program) -> None:
    app("place = reserve(64)")
    for number in range(4):
        app("handle = create(16)", f"map_at(place + {number * 16} * MIB, 16, handle)")
        app("check('cuMemRelease', u64(handle))")
    assert of_kind(machine, app, MemoryKind.PHYSICAL) == 64
    app("unmap(place, 64)")
    assert of_kind(machine, app, MemoryKind.PHYSICAL) == 0


@pytest.mark.parametrize(
    "command",
    [
        "unmap(place, 4)",  # a part of a mapping
        "map_at(place, 8, handle)",  # mapped already
        "map_at(place + 16 * MIB, 8, handle)",  # nothing reserved there
        "check('cuMemRelease', u64(1))",
        "create(3)",  # no whole granule
    ],
)
def test_wrong_use_of_virtual_memory_changes_nothing(
    machine: CudaMachine, app: Program, command: str
) -> None:
    app("handle = create(8)", "place = reserve(8)", "map_at(place, 8, handle)")
    with pytest.raises(ProgramError, match=r": 1$"):
        app(command)
    assert of_kind(machine, app, MemoryKind.PHYSICAL) == 8


def test_physical_memory_of_the_host_is_not_counted(machine: CudaMachine, app: Program) -> None:
    app("create(8, place=2)")
    assert of_kind(machine, app, MemoryKind.PHYSICAL) == 0


def test_a_pool_reserves_keeps_and_trims(machine: CudaMachine, app: Program) -> None:
    app("held += [out('cuMemAllocAsync', size(5 * MIB), u64()) for _ in range(2)]")
    assert of_kind(machine, app, MemoryKind.POOL) == 10
    app("[check('cuMemFreeAsync', u64(one), u64()) for one in held]")
    assert of_kind(machine, app, MemoryKind.POOL) == 10, "kept until a synchronisation"
    app("check('cuStreamSynchronize', u64())")
    assert of_kind(machine, app, MemoryKind.POOL) == 0


def test_a_pool_keeps_its_threshold(machine: CudaMachine, app: Program) -> None:
    app(
        "pool = out('cuDeviceGetDefaultMemPool', 0)",
        "check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(u64(4 * MIB)))",
        "one = out('cuMemAllocAsync', size(8 * MIB), u64())",
        "check('cuMemFreeAsync', u64(one), u64())",
        "check('cuCtxSynchronize')",
    )
    assert of_kind(machine, app, MemoryKind.POOL) == 4
    app("check('cuMemPoolTrimTo', u64(pool), size(0))")
    assert of_kind(machine, app, MemoryKind.POOL) == 0


def test_idle_pools_are_squeezed_before_memory_runs_out(machine: CudaMachine, app: Program) -> None:
    free = app("memory()[0]") // MIB
    app(
        f"one = out('cuMemAllocAsync', size({free} * MIB), u64())", "check('cuMemFreeAsync', u64(one), u64())"
    )
    app(f"alloc({free})")
    assert of_kind(machine, app, MemoryKind.POOL) == 0


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ("1024, 1024", 4),  # floats
        ("1024, 1024, 4, form=0x01, channels=4", 16),
        ("2048, 2048, form=0x91, channels=4", 2),  # BC1: half a byte each
        ("1024, 1024, levels=11", 6),  # a third more for the levels
    ],
)
def test_arrays_are_counted_by_format(machine: CudaMachine, app: Program, shape: str, taken: int) -> None:
    app(f"one = array({shape})")
    assert of_kind(machine, app, MemoryKind.ARRAY) == taken
    destroy = "cuMipmappedArrayDestroy" if "levels" in shape else "cuArrayDestroy"
    app(f"check('{destroy}', u64(one))")
    assert of_kind(machine, app, MemoryKind.ARRAY) == 0


def test_a_graph_takes_memory_at_its_first_launch_and_keeps_it_until_a_trim(
    machine: CudaMachine, app: Program
) -> None:
    app("graph = out('cuGraphCreate', 0)", "one = alloc_node(graph, 6)", "free_node(graph, one)")
    app("exe = out('cuGraphInstantiateWithFlags', u64(graph), u64())")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 0
    app("[check('cuGraphLaunch', u64(exe), u64()) for _ in range(3)]")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 6
    app("check('cuGraphExecDestroy', u64(exe))")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 6
    app("check('cuDeviceGraphMemTrim', 0)")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 0


def test_memory_that_a_graph_leaves_lives_until_it_is_freed(machine: CudaMachine, app: Program) -> None:
    app("graph = out('cuGraphCreate', 0)", "one = alloc_node(graph, 6)")
    app(
        "exe = out('cuGraphInstantiateWithFlags', u64(graph), u64())",
        "check('cuGraphLaunch', u64(exe), u64())",
    )
    assert app("call('cuGraphLaunch', u64(exe), u64())") == 1, "its memory is still allocated"
    app("check('cuGraphExecDestroy', u64(exe))", "check('cuDeviceGraphMemTrim', 0)")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 6
    app("free(one)", "check('cuDeviceGraphMemTrim', 0)")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 0


def test_a_captured_allocation_takes_memory_when_the_graph_runs(machine: CudaMachine, app: Program) -> None:
    app(
        "stream = out('cuStreamCreate', 0)",
        "check('cuStreamBeginCapture_v2', u64(stream), 0)",
        "one = out('cuMemAllocAsync', size(4 * MIB), u64(stream))",
        "check('cuMemFreeAsync', u64(one), u64(stream))",
        "graph = u64()",
        "check('cuStreamEndCapture', u64(stream), ctypes.byref(graph))",
        "exe = out('cuGraphInstantiateWithFlags', graph, u64())",
    )
    assert machine.used() == CONTEXT
    app("check('cuGraphLaunch', u64(exe), u64(stream))")
    assert of_kind(machine, app, MemoryKind.GRAPH) == 4


def test_code_takes_memory_when_it_is_loaded(machine: CudaMachine, app: Program) -> None:
    app("module = out('cuModuleLoadData', b'image')")
    assert of_kind(machine, app, MemoryKind.CODE) == 2
    app("check('cuModuleUnload', u64(module))")
    assert of_kind(machine, app, MemoryKind.CODE) == 0


def test_the_code_of_a_library_takes_memory_at_its_first_launch(machine: CudaMachine, app: Program) -> None:
    app("library = out('cuLibraryLoadData', b'image', None, None, 0, None, None, 0)")
    app("kernel = out('cuLibraryGetKernel', u64(library), b'kernel_1us')")
    assert of_kind(machine, app, MemoryKind.CODE) == 0
    app("launch(kernel)")
    assert of_kind(machine, app, MemoryKind.CODE) == 2


def test_the_first_abi_answers_in_32_bits(app: Program) -> None:
    app("narrow = ctypes.c_uint32()", "check('cuMemAlloc', ctypes.byref(narrow), 4 * MIB)")
    assert app("narrow.value") > 0
    app("check('cuMemFree', narrow)", "free32, total32 = ctypes.c_uint32(), ctypes.c_uint32()")
    app("check('cuMemGetInfo', ctypes.byref(free32), ctypes.byref(total32))")
    assert app("total32.value") == 2**32 - 1
