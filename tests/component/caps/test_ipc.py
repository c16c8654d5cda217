"""Memory that processes of one container hand to each other by handles: charged once, while anyone has it."""

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import Container
from tests.cuda_double.machine import MIB, CudaMachine
from tests.cuda_double.program import Program

EXPORT = "handle = IpcHandle(); check('cuIpcGetMemHandle', ctypes.byref(handle), u64(at))"
SEARCHED = "time.sleep(0.06); memory()"  # a thorough search for dead processes is due after 50 ms


def _import(taker: Program, giver: Program) -> None:
    taker(f"handle = IpcHandle((ctypes.c_ubyte * 64)(*{giver('list(handle.bytes)')}))")
    taker("at = out('cuIpcOpenMemHandle_v2', handle, 1)")


def _refused(program: Program, megabytes: int) -> bool:
    return bool(program(f"call('cuMemAlloc_v2', ctypes.byref(u64()), size({megabytes} * MIB))") == 2)


def _exporter(made: Container, programs: Programs) -> Program:
    return programs(made, "init()", "alloc(200); at = alloc(400)", EXPORT, EXPORT)


def test_memory_that_is_open_outlives_the_process_that_made_it(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker, third = _exporter(made, programs), programs(made, "init()"), programs(made, "init()")
    _import(taker, giver)
    assert made.charged() == machine.used() == 1500 * MIB
    giver.kill()
    # What it had beside is free at once; what is still open counts for the container, not for nobody.
    third(SEARCHED)
    assert made.charged() == machine.used() == 1000 * MIB
    assert third("memory()") == [1048 * MIB, 2048 * MIB]
    assert _refused(third, 1050)
    third("kept = alloc(1048)")
    assert machine.peak() <= 2048 * MIB
    third("free(kept)")
    taker("check('cuIpcCloseMemHandle', u64(at))")
    third(SEARCHED)
    assert made.charged() == machine.used() == 600 * MIB
    # Nothing is left of it: the next process gets its slot.
    slots = len(made.slots())
    programs(made, "init()")
    assert len(made.slots()) <= slots + 1
    assert made.charged() == machine.used() == 900 * MIB


def test_memory_that_was_open_is_free_when_the_last_that_had_it_open_ends(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(3072)
    giver = _exporter(made, programs)
    takers = [programs(made, "init()") for _ in range(2)]
    for taker in takers:
        _import(taker, giver)
    giver.kill()
    last = programs(made, "init()")
    for taker, left in zip(takers, (1000, 300), strict=True):
        last(SEARCHED)
        taker.kill()
        last(SEARCHED)
        assert made.charged() == machine.used() == left * MIB


def test_what_was_exported_and_freed_again_does_not_outlive_its_process(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker = _exporter(made, programs), programs(made, "init()")
    giver("gone = at; at = alloc(100)", EXPORT)
    _import(taker, giver)
    giver("free(gone)")
    giver.kill()
    taker(SEARCHED)
    assert made.charged() == machine.used() == 400 * MIB


def test_a_child_of_the_importer_does_not_keep_it(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker, third = _exporter(made, programs), programs(made, "init()"), programs(made, "init()")
    _import(taker, giver)
    child = taker("fork('time.sleep(600)')")
    giver.kill()
    taker("check('cuIpcCloseMemHandle', u64(at))")
    third(SEARCHED)
    assert made.charged() == machine.used() == 600 * MIB
    third(f"os.kill({child}, 9)")


def test_memory_that_was_opened_twice_is_there_until_it_is_closed_twice(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker, third = _exporter(made, programs), programs(made, "init()"), programs(made, "init()")
    for _ in range(2):
        _import(taker, giver)
    giver.kill()
    taker("check('cuIpcCloseMemHandle', u64(at))")
    third(SEARCHED)
    assert made.charged() == machine.used() == 1000 * MIB
    taker("check('cuIpcCloseMemHandle', u64(at))")
    third(SEARCHED)
    assert made.charged() == machine.used() == 600 * MIB


def test_memory_of_another_container_that_was_opened_twice_is_charged_until_it_is_closed_twice(
    container: MakeContainer, programs: Programs
) -> None:
    made = container(2048)
    giver, taker = _exporter(container(2048), programs), programs(made, "init()")
    for _ in range(2):
        _import(taker, giver)
        assert made.charged() == 700 * MIB
    taker("check('cuIpcCloseMemHandle', u64(at))")
    assert made.charged() == 700 * MIB
    taker("check('cuIpcCloseMemHandle', u64(at))")
    assert made.charged() == 300 * MIB


def test_memory_that_was_open_in_a_context_is_free_when_that_is_gone(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker, third = _exporter(made, programs), programs(made, "init()"), programs(made, "init()")
    _import(taker, giver)
    giver.kill()
    taker("check('cuDevicePrimaryCtxReset_v2', 0)", "init()")
    third(SEARCHED)
    assert made.charged() == machine.used() == 600 * MIB


def test_what_was_exported_in_a_context_that_is_gone_does_not_outlive_its_process(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker = programs(made, "check('cuInit', 0)"), programs(made, "init()")
    giver("context = out('cuCtxCreate_v2', 0, 0)", "at = alloc(200)", EXPORT)
    giver("check('cuCtxDestroy_v2', u64(context))", "init()", "alloc(400)")
    giver("at = alloc(100)", EXPORT)
    _import(taker, giver)
    giver.kill()
    taker(SEARCHED)
    assert made.charged() == machine.used() == 400 * MIB
