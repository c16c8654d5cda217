"""A cap holds to the byte, whatever takes the memory, and the container sees it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.vgpu import layout
from agent.vgpu.watch import process_of
from clib.build_library import cached
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import SLOTS_AT, make
from tests.cuda_double.machine import MIB, CudaMachine
from tests.pace import scaled

CLASSES = {
    "linear": "[alloc(64) for _ in range(count)]",
    "small": "[alloc(0.5) for _ in range(count * 128)]",
    "pitch": "[out_pitch() for _ in range(count)]",
    "managed": "[out('cuMemAllocManaged', size(64 * MIB), 1) for _ in range(count)]",
    "physical": "[create(64) for _ in range(count)]",
    "pool": "[out('cuMemAllocAsync', size(64 * MIB), u64()) for _ in range(count)]",
    "array": "[array(8192, 8192, 0, form=1) for _ in range(count)]",
}
PITCH = """
def out_pitch():
    address, pitch = u64(), size(0)
    check("cuMemAllocPitch_v2", ctypes.byref(address), ctypes.byref(pitch), size(65536), size(1024), 4)
    return address.value
"""


@pytest.mark.parametrize("context", [138, 418])  # the double's own size is that of the containers here
@pytest.mark.parametrize("kind", CLASSES)
def test_a_cap_holds_to_the_byte(
    kind: str, context: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=context)
    machine.state.devices[0].context_bytes = context * MIB
    program = programs(made, PITCH, "init()", f"count = {(1024 - context) // 64}")
    program(CLASSES[kind])
    assert machine.used() == made.charged()
    assert 1024 * MIB - 64 * MIB < machine.used() <= 1024 * MIB
    # The rest, in the finest steps that there are, and not one more.
    program("rest = memory()[0] // MIB; [alloc(2) for _ in range(rest // 2)]")
    assert machine.used() == made.charged() == 1024 * MIB
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(1))") == 2
    assert machine.peak() == 1024 * MIB


def test_what_is_freed_can_be_had_again(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, PITCH, "init()")
    before = machine.used()
    for _ in range(3):
        program("kept = [alloc(64) for _ in range(5)] + [alloc(0.5) for _ in range(10)] + [out_pitch()]")
        program("[free(address) for address in kept]")
    program("handle = create(64); at = reserve(64); map_at(at, 64, handle)")
    program("check('cuMemRelease', u64(handle))")
    assert made.charged() == machine.used() == before + 64 * MIB  # the mapping holds it
    program("unmap(at, 64)")
    program("made = array(4096, 4096); check('cuArrayDestroy', u64(made))")
    program("at = out('cuMemAllocAsync', size(64 * MIB), u64()); check('cuMemFreeAsync', u64(at), u64())")
    program("check('cuCtxSynchronize')")
    assert made.charged() == machine.used() == before


@pytest.mark.parametrize("cap", [0, 1])
def test_a_cap_of_next_to_nothing_refuses_everything(
    cap: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(cap, context=0)
    machine.state.devices[0].context_bytes = 0
    program = programs(made, "init()")
    assert program("memory()") == [cap * MIB, cap * MIB]
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(2 * MIB))") == 2
    assert machine.used() == 0


def test_a_context_that_the_cap_cannot_hold_is_refused(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    program = programs(container(100), "check('cuInit', 0)")
    assert program("call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), 0)") == 2
    assert program("call('cuCtxCreate_v2', ctypes.byref(u64()), 0, 0)") == 2
    assert machine.used() == 0


def test_a_cap_above_the_gpu_is_the_gpu(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    program = programs(container(1 << 20), "init()")
    assert program("memory()") == [(16384 - 300) * MIB, 16384 * MIB]
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(17 << 30))") == 2


def test_two_containers_have_two_caps(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    one, two = container(1024), container(512)
    first, second = programs(one, "init()"), programs(two, "init()")
    first("alloc(700)")
    second("alloc(200)")
    assert [program("memory()[1] // MIB") for program in (first, second)] == [1024, 512]
    assert second("call('cuMemAlloc_v2', ctypes.byref(u64()), size(20 * MIB))") == 2
    assert machine.used() == one.charged() + two.charged()


def test_processes_of_a_container_share_its_cap(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    first, second = programs(made, "init()"), programs(made, "init()")
    first("alloc(300)")
    assert second("call('cuMemAlloc_v2', ctypes.byref(u64()), size(200 * MIB))") == 2
    assert second("memory()[0]") == 124 * MIB
    first.kill()
    second("alloc(600)")
    assert machine.used() == made.charged() == 900 * MIB


def test_a_resize_is_in_force_at_once(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "alloc(700)")
    made.set_limit(2048)
    assert program("memory()") == [1048 * MIB, 2048 * MIB]
    program("alloc(1000)")
    made.set_limit(1024)
    assert program("memory()") == [0, 1024 * MIB]
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(1))") == 2
    assert machine.used() == 2000 * MIB


def test_a_child_of_fork_has_books_of_its_own(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made)
    child = program("fork('init(); alloc(100); time.sleep(60)')")
    try:
        program("init()", "alloc(200)")
        assert made.charged() <= 900 * MIB
        _until(lambda: made.charged() == 900 * MIB)
        assert {pid for pid, _, _ in made.slots()} == {program.pid, child}
    finally:
        os.kill(child, signal.SIGKILL)
    program("os.waitpid(-1, 0)", "memory()")
    assert made.charged() == 500 * MIB


def test_exec_gives_back_what_the_process_had(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "alloc(700)")
    program.send(
        "print('{\"value\": 0}', flush=True); os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])"
    )
    program.receive()
    program("init()")
    assert program("memory()[0]") == 724 * MIB
    assert made.charged() == machine.used() == 300 * MIB


def test_memory_of_before_exec_is_free_for_others_whatever_the_process_does_then(
    container: MakeContainer, programs: Programs
) -> None:
    made = container(1024)
    first = programs(made, "init()", "alloc(400)")
    second = programs(made, "init()")
    first.send(
        "print('{\"value\": 0}', flush=True); os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])"
    )
    first.receive()
    # The new program answers, has the pid of the old one, and never touches a GPU.
    assert first("os.getpid()") == first.pid
    assert second("memory()[0]") == 24 * MIB  # the driver may be about to free it
    _until(lambda: second("memory()[0]") == 724 * MIB)
    second("alloc(700)")
    assert made.charged() == 1000 * MIB


def test_a_process_with_a_context_is_known_by_its_entry(container: MakeContainer, programs: Programs) -> None:
    made = container(1024, context=0)
    plain, created = programs(made, "init()"), programs(made, "check('cuInit', 0)")
    created("check('cuCtxCreate_v2', ctypes.byref(u64()), 0, 0)")
    content = made.usage.read_bytes()
    entries = layout.read_entries(content[SLOTS_AT : SLOTS_AT + layout.SLOTS * layout.SLOT_BYTES])
    assert entries.whole
    assert entries.processes == {process_of(each.pid, Path("/proc")) for each in (plain, created)}


def test_launches_are_counted(container: MakeContainer, machine: CudaMachine, programs: Programs) -> None:
    made = container(1024)
    program = programs(made, "init()", "kernel = function()")
    program("[launch(kernel) for _ in range(3000)]")
    assert machine.calls("cuLaunchKernel") == 3000
    ((_, launches, _),) = made.slots()
    assert launches == 2048  # in steps of 1,024


def test_nothing_is_written_to_standard_output_or_error(
    container: MakeContainer, machine: CudaMachine, programs: Programs, capfd: pytest.CaptureFixture[str]
) -> None:
    program = programs(container(1024), "init()", "alloc(700)")
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(200 * MIB))") == 2
    program.kill()
    assert capfd.readouterr() == ("", "")


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + scaled(30)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(400)
def test_the_library_is_built_for_both_processors() -> None:
    # e_machine of ELF: 62 is x86-64, 183 AArch64.
    machines = {
        name: int.from_bytes(cached(name).read_bytes()[18:20], "little") for name in ("x86_64", "aarch64")
    }
    assert machines == {"x86_64": 62, "aarch64": 183}


@pytest.mark.timeout(300)
def test_no_behaviour_is_undefined(tmp_path: Path, machine: CudaMachine, programs: Programs) -> None:
    made = make(tmp_path / "traps", cached(sanitizer="undefined"), (2048,))
    program = programs(made, PITCH, "init()", "count = 2", "kernel = function()")
    for command in CLASSES.values():
        program(command)
    program("handle = create(64); at = reserve(64); map_at(at, 64, handle)", "unmap(at, 64)")
    program("[launch(kernel) for _ in range(1100)]", "resolve('cuMemAlloc', 12000)", "memory()")
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size((1 << 64) - 1))") == 2
    assert program("call('cuMemAllocManaged', ctypes.byref(u64()), size((1 << 63) + 1), 1)") == 2
    program("check('cuCtxSynchronize')")
    assert made.charged() == machine.used()


MODULES = """
def load(most):
    made = []
    while len(made) < most:
        module = u64()
        if call("cuModuleLoadData", ctypes.byref(module), b"image"): break
        made.append(module.value)
    return made
"""


@pytest.mark.parametrize("module_kib", [64, 2048, 5000])
@pytest.mark.parametrize("context", [90, 310])
def test_modules_cost_what_they_cost(
    module_kib: int, context: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=context)
    device = machine.state.devices[0]
    device.module_bytes, device.context_bytes = module_kib << 10, context * MIB
    program = programs(made, MODULES, "init()", "modules = load(400)")
    fits = ((1024 - context) << 10) // module_kib
    assert program("len(modules)") == min(400, fits)
    # Where it does not fit the module is unloaded, and what it had is free again.
    assert machine.used() == made.charged()
    assert machine.used() - context * MIB == min(400, fits) * module_kib << 10
    program("for module in modules: check('cuModuleUnload', u64(module))")
    assert machine.used() == made.charged() == context * MIB
    # A library is loaded later, and nobody knows what it will take.
    program("library = out('cuLibraryLoadData', b'image', None, None, 0, None, None, 0)")
    assert made.charged() == (context + 2) * MIB


def test_context_that_the_runtime_retained_counts(
    machine: CudaMachine, container: MakeContainer, programs: Programs
) -> None:
    """NVIDIA's runtime retains the primary context by a private table, past every hook."""
    held = container(1024, context=300)
    app = programs(held, "check('cuInit', 0)", "check('cuCtxSetCurrent', u64(runtime_context()))")
    assert held.charged() == 0, "no call has needed it yet"
    assert app("memory()") == [724 * MIB, 1024 * MIB]
    app("alloc(100)")
    assert held.charged() == machine.used() == 400 * MIB
    assert app("call('cuMemAlloc_v2', ctypes.byref(u64()), size(700 * MIB))") == 2
    # A library that retains it by its name and gives it back changes nothing.
    app("out('cuDevicePrimaryCtxRetain', 0)", "check('cuDevicePrimaryCtxRelease_v2', 0)", "alloc(1)")
    assert held.charged() == machine.used() == 402 * MIB


def test_context_of_the_runtime_above_the_cap_is_told_and_refuses_what_follows(
    container: MakeContainer, programs: Programs
) -> None:
    held = container(200, context=300)
    app = programs(held, "check('cuInit', 0)", "check('cuCtxSetCurrent', u64(runtime_context()))")
    assert app("memory()") == [0, 200 * MIB]
    assert held.charged() == 300 * MIB
    assert app("call('cuMemAlloc_v2', ctypes.byref(u64()), size(MIB))") == 2


def test_context_retained_by_name_and_by_table_is_charged_once(
    machine: CudaMachine, container: MakeContainer, programs: Programs
) -> None:
    held = container(1024, context=300)
    app = programs(held, "init()", "runtime_context()", "alloc(64)")
    assert held.charged() == machine.used() == 364 * MIB
    # Given back by its name, it is still the runtime's: charged again by what comes next.
    app("check('cuDevicePrimaryCtxRelease_v2', 0)", "alloc(64)")
    assert machine.used() == 428 * MIB
    assert held.charged() >= 364 * MIB
