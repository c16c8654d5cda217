"""Memory of graphs and of pools: charged with what the driver has reserved for them."""

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.cuda_double.machine import MIB, CudaMachine

GRAPH = """
def graph_of(*sizes):
    graph = out("cuGraphCreate", 0)
    for megabytes in sizes:
        free_node(graph, alloc_node(graph, megabytes))
    return graph

def executable(graph):
    return out("cuGraphInstantiateWithFlags", u64(graph), u64())
"""
RUN = "code = call('cuGraphLaunch', u64(ready), u64()); call('cuCtxSynchronize')"


def test_a_graph_is_charged_when_it_runs(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, GRAPH, "init()")
    program("ready = executable(graph_of(400))")
    assert made.charged() == machine.used() == 300 * MIB
    for _ in range(3):
        program(RUN)
        assert program("code") == 0
    assert made.charged() == machine.used() == 700 * MIB
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(800 * MIB))") == 2
    program("check('cuGraphExecDestroy', u64(ready)); check('cuDeviceGraphMemTrim', 0)")
    assert made.charged() == machine.used() == 300 * MIB


def test_a_graph_above_the_cap_is_refused(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, GRAPH, "init()", "alloc(400)")
    program("ready = executable(graph_of(400))", RUN)
    assert program("code") == 2
    assert machine.peak() == made.charged() == 700 * MIB


def test_memory_captured_from_a_stream_is_charged_when_it_runs(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, GRAPH, "init()", "stream = out('cuStreamCreate', 1)")
    program(
        "check('cuStreamBeginCapture_v2', u64(stream), 2)",
        "at = out('cuMemAllocAsync', size(800 * MIB), u64(stream))",
        "check('cuMemFreeAsync', u64(at), u64(stream))",
        "graph = u64(); check('cuStreamEndCapture', u64(stream), ctypes.byref(graph))",
        "ready = executable(graph.value)",
        RUN,
    )
    assert program("code") == 2
    assert machine.peak() == made.charged() == 300 * MIB


CAPTURED = """
def captured(count, megabytes, kept=0):
    stream = out("cuStreamCreate", 1)
    check("cuStreamBeginCapture_v2", u64(stream), 2)
    for number in range(count):
        at = out("cuMemAllocAsync", size(megabytes * MIB), u64(stream))
        if number >= kept:
            check("cuMemFreeAsync", u64(at), u64(stream))
    graph = u64(); check("cuStreamEndCapture", u64(stream), ctypes.byref(graph))
    return executable(graph.value), stream
def run_on(ready, stream):
    return call("cuGraphLaunch", u64(ready), u64(stream)) or call("cuStreamSynchronize", u64(stream))
"""


def test_graph_with_temporaries_runs(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, GRAPH, CAPTURED, "init()", "ready, stream = captured(50, 200)")
    assert program("run_on(ready, stream)") == 0
    assert machine.peak() == made.peak() == made.charged() == 500 * MIB
    # Another one on the same stream uses the same memory, in turn with the first: nothing is trimmed.
    program("other = executable(graph_of(*[600] * 20))")
    assert program("[run_on(ready, stream) or run_on(other, stream) for _ in range(10)]") == [0] * 10
    assert machine.calls("cuDeviceGraphMemTrim") == 0
    # What is never freed counts at once.
    assert program("run_on(*captured(5, 200, kept=4))") == 2
    assert made.charged() == machine.used()
    assert max(machine.peak(), made.peak()) <= 1024 * MIB


@pytest.mark.parametrize("stream", [0, 2], ids=["default", "per thread"])
def test_a_graph_is_not_trimmed_at_every_launch(
    stream: int, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024, context=100)
    machine.state.devices[0].context_bytes = 100 * MIB
    program = programs(made, GRAPH, CAPTURED, "init()", "ready = executable(graph_of(600))")
    launch = f"call('cuGraphLaunch', u64(ready), u64({stream}))"
    assert program(f"[{launch} for _ in range(50)]") == [0] * 50
    assert machine.calls("cuDeviceGraphMemTrim") == machine.calls("cuStreamSynchronize") == 0
    assert machine.used() == made.charged() == 700 * MIB


def test_a_pool_gives_back_what_others_need(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "pool = out('cuDeviceGetDefaultMemPool', 0)")
    # Release threshold: keep everything.
    program("keep = u64(1 << 62); check('cuMemPoolSetAttribute', u64(pool), 4, ctypes.byref(keep))")
    program("at = out('cuMemAllocAsync', size(700 * MIB), u64()); check('cuMemFreeAsync', u64(at), u64())")
    program("check('cuCtxSynchronize')")
    assert made.charged() == machine.used() == 1000 * MIB
    program("alloc(600)")
    assert machine.used() == made.charged() == 900 * MIB
    assert machine.peak() <= 1024 * MIB


def test_a_pool_used_again_and_again_never_runs_out(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()")
    program(
        "for megabytes in [700, 3, 500, 690, 1, 720] * 5:\n"
        "    at = out('cuMemAllocAsync', size(megabytes * MIB), u64())\n"
        "    check('cuMemFreeAsync', u64(at), u64())\n"
    )
    assert machine.peak() <= 1024 * MIB
    program("check('cuCtxSynchronize')")
    assert machine.used() == made.charged()
