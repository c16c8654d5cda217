"""Injected faults, and work that has a device time."""

import pytest

from tests.component.cuda_double.conftest import Programs
from tests.cuda_double.layout import FaultAction
from tests.cuda_double.machine import MIB, CudaMachine
from tests.cuda_double.program import ProgramError


def test_the_k_th_call_fails(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()")
    machine.inject("cuMemAlloc_v2", FaultAction.FAIL, after=2, times=1)
    assert app("[call('cuMemAlloc_v2', ctypes.byref(u64()), size(2 * MIB)) for _ in range(4)]") == [
        0,
        0,
        2,
        0,
    ]
    assert machine.used() == (300 + 6) * MIB


def test_every_call_fails_until_the_fault_is_cleared(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()")
    machine.inject(None, FaultAction.FAIL, code=999)
    assert app("[call('cuCtxSynchronize'), call('cuMemAlloc_v2', ctypes.byref(u64()), size(1))]") == [
        999,
        999,
    ]
    machine.clear_faults()
    assert app("call('cuCtxSynchronize')") == 0


def test_a_call_hangs_until_the_fault_is_cleared(machine: CudaMachine, programs: Programs) -> None:
    app, other = programs("init()"), programs("init()")
    machine.inject("cuMemAlloc_v2", FaultAction.HANG, times=1)
    app.send("alloc(2)")
    while machine.calls("cuMemAlloc_v2") == 0:
        pass
    other("alloc(2)")
    assert machine.used() == (600 + 2) * MIB
    machine.clear_faults()
    app.receive()
    assert machine.used() == (600 + 4) * MIB


def test_a_call_ends_the_process(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()", "alloc(64)")
    machine.inject("cuMemFree_v2", FaultAction.CRASH)
    with pytest.raises(ProgramError, match="ended with -9"):
        app("free(1)")
    assert machine.used() == 0


def test_a_kernel_takes_its_time_on_the_device(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()", "kernel = function(b'kernel_40ms')", "stream = out('cuStreamCreate', 0)")
    app("begun = time.monotonic()", "launch(kernel, stream)", "launch(kernel, stream)")
    assert app("call('cuStreamQuery', u64(stream))") in (0, 600)
    assert app("check('cuStreamSynchronize', u64(stream))", "time.monotonic() - begun") >= 0.08
    use = machine.state.slots[0].uses[0]
    assert (use.launches, use.busy_ns) == (2, 80_000_000)


def test_a_graph_takes_the_time_of_its_nodes(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()", "kernel = function(b'kernel_5ms')", "stream = out('cuStreamCreate', 0)")
    app(
        "check('cuStreamBeginCapture_v2', u64(stream), 0)",
        "[launch(kernel, stream) for _ in range(4)]",
        "graph = u64()",
        "check('cuStreamEndCapture', u64(stream), ctypes.byref(graph))",
        "exe = out('cuGraphInstantiateWithFlags', graph, u64())",
    )
    use = machine.state.slots[0].uses[0]
    assert use.launches == 0
    app("check('cuGraphLaunch', u64(exe), u64(stream))")
    assert (use.launches, use.busy_ns) == (1, 20_000_000)


def test_events_measure_the_device(programs: Programs) -> None:
    app = programs("init()", "kernel = function(b'kernel_20ms')", "stream = out('cuStreamCreate', 0)")
    app("first, last = out('cuEventCreate', 0), out('cuEventCreate', 0)")
    app(
        "check('cuEventRecord', u64(first), u64(stream))",
        "launch(kernel, stream)",
        "check('cuEventRecord', u64(last), u64(stream))",
        "check('cuEventSynchronize', u64(last))",
        "passed = ctypes.c_float()",
        "check('cuEventElapsedTime', ctypes.byref(passed), u64(first), u64(last))",
    )
    assert app("passed.value") >= 20


def test_calls_before_cu_init_are_refused(programs: Programs) -> None:
    app = programs()
    assert app("call('cuMemAlloc_v2', ctypes.byref(u64()), size(1))") == 3, "CUDA_ERROR_NOT_INITIALIZED"


@pytest.mark.parametrize(
    "call", ["'cuStreamSynchronize', u64(77)", "'cuEventQuery', u64(77)", "'cuArrayDestroy', u64(77)"]
)
def test_foreign_handles_are_refused(programs: Programs, call: str) -> None:
    assert programs("init()")(f"call({call})") == 400, "CUDA_ERROR_INVALID_HANDLE"
