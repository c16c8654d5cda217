"""The keeper of shares in the enforcement library; all times are the simulated GPU's own."""

import os
from collections.abc import Mapping

import pytest

from agent.vgpu import layout
from tests.component.caps.container import Container
from tests.component.shares.conftest import Site, hold
from tests.cuda_double.layout import FaultAction
from tests.cuda_double.timed import kernels

MS = 1_000_000
EVENTS = ("cuEventRecord", "cuEventQuery", "cuEventElapsedTime", "cuEventCreate")


def usage(container: Container) -> layout.CountedUsage:
    return layout.read_usage(container.usage.read_bytes()[: layout.usage_head_bytes(1)])[0]


def calls(called: Mapping[str, int], *names: str) -> int:
    return sum(called.get(name, 0) for name in names)


CAPTURE = """
def work():
    kernel, graph = function(b'work_1ms'), u64()
    captured, other = out('cuStreamCreate', 1), out('cuStreamCreate', 1)
    for _ in range(50): launch(kernel, other)  # some of them measured, and not read yet
    check('cuStreamBeginCapture_v2', u64(captured), {mode})
    sleep(500)
    print('{{"value": "begun"}}', flush=True); sys.stdin.readline()
    for _ in range(300): launch(kernel, other)
    for _ in range(3): launch(kernel, captured)
    print('{{"value": "done"}}', flush=True); sys.stdin.readline()
    ended = call('cuStreamEndCapture', u64(captured), ctypes.byref(graph))
    if ended: return ended, 0
    ready = out('cuGraphInstantiateWithFlags', graph, u64())
    check('cuCtxSynchronize')
    sleep(2000)  # so that the graph has not to wait for the share
    begin = event(captured)
    check('cuGraphLaunch', u64(ready), u64(captured))
    end = event(captured)
    check('cuCtxSynchronize')
    return ended, elapsed(begin, end)
"""


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread", "relaxed"])
def test_capture_is_never_broken(site: Site, mode: int) -> None:
    program = site.program(site.container(30))
    program(CAPTURE.format(mode=mode))
    program.send("timed(work)")
    assert program.receive() == "begun"
    before = calls(site.machine.called(), *EVENTS)
    program.send("go")
    assert program.receive() == "done"
    # Not one event is touched while something is captured, of whatever stream.
    assert calls(site.machine.called(), *EVENTS) == before
    program.send("go")
    assert program.receive() == [0, pytest.approx(3)]


REPRICED = """
def graph_of(name):
    kernel, graph, node = function(name), out('cuGraphCreate', 0), u64()
    parameters = (ctypes.c_uint64 * 16)(kernel)
    check('cuGraphAddKernelNode_v2', ctypes.byref(node), u64(graph), None, size(0), parameters)
    return graph
def decode(ready, until):
    while now() < until:
        check('cuGraphLaunch', u64(ready), u64())
        check('cuCtxSynchronize')
def work():
    ready = out('cuGraphInstantiateWithFlags', u64(graph_of(b'work_2ms')), u64())
    decode(ready, 2000)
    info = (ctypes.c_uint64 * 4)()
    check('cuGraphExecUpdate_v2', u64(ready), u64(graph_of(b'work_20ms')), info)
    began = CUDA.gna_sim_now()
    decode(ready, 4000)
    return began
"""


def test_graph_exec_update_is_repriced(site: Site) -> None:
    program = site.program(site.container(40))
    program(REPRICED)
    program("timed(work)")
    # At the old price the second half would have had the GPU to itself.
    assert site.machine.busy_ns(program.pid) / (4000 * MS) == pytest.approx(0.4, abs=0.03)


def test_uncapped_is_untouched(site: Site) -> None:
    container = site.container(None)
    program = site.program(container)
    program("def work():\n    global kernel\n    kernel = function(b'work_1us')\n    launch(kernel)")
    program("timed(work)")
    before = site.machine.called()
    program("def work():\n    for _ in range(3000): launch(kernel)")
    program("timed(work)")
    after = site.machine.called()
    added = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
    # That of the thread that was started, and the launches.
    assert added == {"cuInit": 1, "cuDevicePrimaryCtxRetain": 1, "cuCtxSetCurrent": 1, "cuLaunchKernel": 3000}
    assert (usage(container).next_ns, usage(container).waits) == (0, 0)


LOOP = """
def work():
    kernel = function(b'work_5ms')
    while now() < {until}:
        launch(kernel)
        check('cuCtxSynchronize')
    {end}
"""


def test_controller_survives_sigkill_and_fork(site: Site) -> None:
    site.tasks(3)
    container = site.container(40)
    killed, parent, other = (site.program(container) for _ in range(3))
    killed(LOOP.format(until=500, end="os.kill(os.getpid(), 9)"))
    killed.send("timed(work)")
    for program in (parent, other):
        program(LOOP.format(until=4000, end="return now()"))
    child = parent("fork('timed(work)')")
    other.send("timed(work)")
    assert other.receive() >= 4000
    parent("os.waitpid(-1, 0)")
    busy = sum(site.machine.busy_ns(pid) for pid in (killed.pid, child, other.pid))
    assert busy / (4000 * MS) == pytest.approx(0.4, abs=0.03)
    assert site.machine.busy_ns(child) > 400 * MS < site.machine.busy_ns(other.pid)


IN_TURN = """
def work():
    kernel, streams = function(b'work_1ms'), [out('cuStreamCreate', 1) for _ in range(2)]
    while now() < 4000:
        for stream in streams:
            launch(kernel, stream)
            check('cuStreamSynchronize', u64(stream))
"""


def test_streams_that_wait_for_each_other_pay_in_full(site: Site) -> None:
    program = site.program(site.container(30))
    program(IN_TURN)
    program("timed(work)")
    assert site.machine.busy_ns(program.pid) / (4000 * MS) == pytest.approx(0.3, abs=0.03)


def test_one_stream_is_not_looked_at(site: Site) -> None:
    """Each launch of a look costs two events."""
    program = site.program(site.container(40))
    program(LOOP.format(until=2000, end="return now()"))
    program("timed(work)")
    launches = site.machine.launches(program.pid)
    assert site.machine.calls("cuEventRecord") < launches


UNMEASURED = """
def work():
    kernel, begun = function(b'work_1us'), now()
    for _ in range(3000): launch(kernel)
    check('cuCtxSynchronize')
    return now() - begun
"""


@pytest.mark.parametrize("refused", ["cuEventCreate", "cuEventRecord"])
def test_a_share_that_cannot_be_measured_holds_nobody_back(site: Site, refused: str) -> None:
    """Held to the guess of 0.1 ms for each launch they would take 3 s of the GPU."""
    container = site.container(10)
    program = site.program(container)
    site.machine.inject(refused, FaultAction.FAIL)
    program(UNMEASURED)
    assert program("timed(work)") < 1500
    assert usage(container).unmeasured == 1
    # Measured again it is held again.
    site.machine.clear_faults()
    program(LOOP.format(until=5000, end="return now()"))
    before = site.machine.busy_ns(program.pid)
    began = program("timed(work)")
    assert site.machine.busy_ns(program.pid) - before < 0.2 * began * MS


def test_a_launch_that_fails_is_not_paid_for(site: Site) -> None:
    container = site.container(10)
    program = site.program(container)
    program(
        "def work():\n    return [call('cuLaunchKernel', u64(1), 1, 1, 1, 1, 1, 1, 0, u64(), None, None)"
        " for _ in range(1000)]"
    )
    assert set(program("timed(work)")) == {400}
    assert usage(container).waits == 0


FAILING = """
def work():
    wrong = ({arguments}, 1, 1, 1, 1, 1, 1, 0, {stream}, None, None)
    failed = [call('cuLaunchKernel', *wrong) for _ in range(100)]
    begun, kernel = now(), function(b'work_1ms')
    for _ in range(200): launch(kernel)
    check('cuCtxSynchronize')
    return sorted(set(failed)), now() - begun
"""


@pytest.mark.parametrize(
    ("arguments", "stream"),
    [("u64(1)", "u64()"), ("u64(function(b'own'))", "u64(4096)")],
    ids=["kernel", "stream"],
)
def test_own_failing_launches_do_not_count_as_unmeasured(site: Site, arguments: str, stream: str) -> None:
    """A container could have all launches free that nobody has measured yet, by some that cannot go well."""
    container = site.container(10)
    program = site.program(container)
    program(FAILING.format(arguments=arguments, stream=stream))
    failed, took = program("timed(work)")
    assert failed == [400]
    assert usage(container).unmeasured == 0
    assert took > 200 / 0.1 * 0.8


def test_a_share_of_nothing_waits_until_it_is_one(site: Site) -> None:
    """The paused state of containers that only use what others leave."""
    site.tasks(2)
    container, free = site.container(0), site.container(None)
    paused, running = site.program(container), site.program(free)
    paused(kernels(1, 5))
    running(
        "def work():\n"
        "    sleep(700)\n"
        "    print('{\"value\": 0}', flush=True); sys.stdin.readline()\n"
        "    sleep(1000)"
    )
    paused.send("timed(work)")
    running.send("timed(work)")
    running.receive()
    assert site.machine.busy_ns(paused.pid) == 0
    hold(container, 50)
    running.send("go")
    assert paused.receive() <= 700 + 100 + 5 + 1
    running.receive()


@pytest.mark.parametrize("beats", [True, False], ids=["a beat", "an older agent"])
def test_pause_ends_without_an_agent(site: Site, beats: bool) -> None:
    """30 s after its last beat; the pause of an agent that keeps no beat has no end."""
    site.tasks(2)
    container, free = site.container(0), site.container(None)
    beat(container, None if beats else 0)
    paused, running = site.program(container), site.program(free)
    paused(kernels(1, 5))
    running(
        "def work():\n"
        "    for until in (20000, 49000, 90000):\n"
        "        sleep(until - now())\n"
        "        print('{\"value\": 0}', flush=True); sys.stdin.readline()\n"
    )
    paused.send("timed(work)")
    running.send("timed(work)")
    running.receive()
    assert site.machine.busy_ns(paused.pid) == 0
    if beats:
        beat(container)
    running.send("go")
    running.receive()
    assert site.machine.busy_ns(paused.pid) == 0
    running.send("go")
    running.receive()
    assert (site.machine.busy_ns(paused.pid) > 0) is beats
    hold(container, 50)
    running.send("go")
    assert (paused.receive() <= 20000 + 30000 + 200) is beats
    running.receive()


def beat(container: Container, value: int | None = None) -> None:
    """As an agent does, or as one that writes a value there."""
    descriptor = os.open(container.limits, os.O_RDWR)
    try:
        if value is None:
            layout.beat(descriptor)
        else:
            os.pwrite(descriptor, layout.CRC.pack(value), layout.BEAT_AT)
    finally:
        os.close(descriptor)


CONTEXTS = """
def work():
    for _ in range(9):
        context = out('cuCtxCreate_v2', 0, 0)
        kernel = function(b'work_20ms')
        launch(kernel)
        check('cuCtxSynchronize')
    while now() < 8000:
        launch(kernel)
        check('cuCtxSynchronize')
"""


def test_launches_in_a_ninth_context_are_priced_like_others(site: Site) -> None:
    program = site.program(site.container(30))
    program(CONTEXTS)
    program("timed(work)")
    assert site.machine.busy_ns(program.pid) / (8000 * MS) == pytest.approx(0.3, abs=0.03)


FORGOTTEN = """
def work():
    kernel, captured = function(b'work_20ms'), out('cuStreamCreate', 1)
    check('cuStreamBeginCapture_v2', u64(captured), 2)
    while now() < 60000:
        launch(kernel)
        check('cuCtxSynchronize')
"""


def test_a_capture_that_nobody_ends_hides_no_launch_for_long(site: Site) -> None:
    program = site.program(site.container(30))
    program(FORGOTTEN)
    program("timed(work)")
    # What passed at a guess before is paid for afterwards.
    assert site.machine.busy_ns(program.pid) / (60000 * MS) == pytest.approx(0.3, abs=0.03)
