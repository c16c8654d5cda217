"""The time of the simulated GPU: what is asserted is read from its own clock."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cuda_double.fixtures import driver
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import Program, program
from tests.cuda_double.timed import HELP, kernels, together

__all__ = ["driver"]

MS = 1_000_000


class Site:
    """A machine in virtual time and as many programs as take part."""

    def __init__(self, stack: ExitStack, folder: Path, driver: Path) -> None:
        self._stack, self._folder, self._driver = stack, folder, driver

    def programs(self, count: int, threads: int = 1) -> list[Program]:
        """As many programs, with the helpers, of so many threads each that take part in the GPU's time."""
        tasks = count * threads
        self.machine = CudaMachine.create(self._folder / "state", clock=ClockMode.VIRTUAL, tasks=tasks)
        made = [
            self._stack.enter_context(program(self._driver, self.machine.environment)) for _ in range(count)
        ]
        for each in made:
            each(HELP)
        return made


@pytest.fixture
def site(tmp_path: Path, driver: Path) -> Iterator[Site]:
    """One GPU with a virtual clock."""
    with ExitStack() as stack:
        yield Site(stack, tmp_path, driver)


def test_a_gpu_is_shared_in_slices(site: Site) -> None:
    one, two = site.programs(2)
    assert together([one, two], kernels(20, 10), kernels(10, 10)) == [300, pytest.approx(200, abs=2)]
    assert site.machine.busy_ns(one.pid) == 200 * MS
    assert site.machine.busy_ns(two.pid) == 100 * MS


def test_streams_run_beside_each_other(site: Site) -> None:
    programs = site.programs(1)
    work = (
        "def work():\n"
        "    kernel, streams = function(b'work_10ms'), [out('cuStreamCreate', 1) for _ in range(2)]\n"
        "    for number in range(10): launch(kernel, streams[number % 2])\n"
        "    check('cuCtxSynchronize')\n"
        "    return now()"
    )
    assert together(programs, work) == [50]
    assert site.machine.busy_ns(programs[0].pid) == 50 * MS


def test_each_thread_has_a_default_stream_of_its_own(site: Site) -> None:
    programs = site.programs(1, threads=3)
    work = (
        "def work():\n"
        "    kernel = function(b'work_10ms')\n"
        "    def one():\n"
        "        init()\n"
        "        for _ in range(5): launch(kernel, 2)\n"
        "        check('cuStreamSynchronize', u64(2))\n"
        "    threads = [threading.Thread(target=one) for _ in range(2)]\n"
        "    for each in threads: each.start()\n"
        "    sleep(1000)\n"
        "    for each in threads: each.join()"
    )
    together(programs, work)
    assert site.machine.launches(programs[0].pid) == 10
    assert 50 * MS <= site.machine.busy_ns(programs[0].pid) < 60 * MS


def test_copies_run_beside_kernels_and_are_no_compute(site: Site) -> None:
    programs = site.programs(1)
    work = (
        "def work():\n"
        "    kernel, stream, at = function(b'work_10ms'), out('cuStreamCreate', 1), alloc(2)\n"
        "    host = ctypes.create_string_buffer(8)\n"
        "    check('cuMemcpyHtoDAsync_v2', u64(at), host, size(500000000), u64(stream))\n"
        "    launch(kernel)\n"
        "    check('cuCtxSynchronize')\n"
        "    return now()"
    )
    assert together(programs, work) == [20]
    assert site.machine.busy_ns(programs[0].pid) == 10 * MS


def test_a_graph_has_the_time_of_its_nodes(site: Site) -> None:
    programs = site.programs(1)
    work = (
        "def work():\n"
        "    kernel, stream, graph = function(b'work_10ms'), out('cuStreamCreate', 1), u64()\n"
        "    check('cuStreamBeginCapture_v2', u64(stream), 0)\n"
        "    launch(kernel, stream); launch(kernel, stream)\n"
        "    check('cuStreamEndCapture', u64(stream), ctypes.byref(graph))\n"
        "    ready = out('cuGraphInstantiateWithFlags', graph, u64())\n"
        "    begin = event(stream)\n"
        "    check('cuGraphLaunch', u64(ready), u64(stream))\n"
        "    end = event(stream)\n"
        "    check('cuEventSynchronize', u64(end))\n"
        "    return elapsed(begin, end)"
    )
    assert together(programs, work) == [pytest.approx(20)]


def test_events_contain_what_others_did_meanwhile(site: Site) -> None:
    programs = site.programs(2)
    work = (
        "def work():\n"
        "    kernel = function(b'work_10ms')\n"
        "    begin = event(); launch(kernel); end = event()\n"
        "    check('cuEventSynchronize', u64(end))\n"
        "    return elapsed(begin, end)"
    )
    measured, _ = together(programs, work, kernels(5, 10))
    assert 16 <= measured <= 20


def test_utilization_is_that_of_the_last_period_rounded_down(site: Site) -> None:
    programs = site.programs(1)
    work = (
        "def work():\n    kernel = function(b'work_50ms')\n    launch(kernel); sleep(170)\n    return now()"
    )
    assert together(programs, work) == [170]
    assert site.machine.utilization() == {programs[0].pid: 29}  # 50 of 166.7 ms, exactly 29.99 %


def test_time_goes_on_without_a_process_that_was_killed(site: Site) -> None:
    programs = site.programs(2)
    programs[0]("def work():\n    launch(function(b'work_900ms')); os.kill(os.getpid(), 9)")
    programs[0].send("timed(work)")
    assert together(programs[1:], kernels(10, 10)) == [pytest.approx(100, abs=15)]


UNSAFE = (
    "def work():\n"
    "    kernel, graph = function(b'work_1ms'), u64()\n"
    "    stream, done = out('cuStreamCreate', 1), event()\n"
    "    check('cuStreamBeginCapture_v2', u64(stream), 0)\n"
    "    launch(kernel, stream)\n"
    "    mode = ctypes.c_int({mode})\n"
    "    check('cuThreadExchangeStreamCaptureMode', ctypes.byref(mode))\n"
    "    answer = call({call})\n"
    "    return answer, call('cuStreamEndCapture', u64(stream), ctypes.byref(graph))"
)


@pytest.mark.parametrize(
    "call",
    [
        "'cuEventQuery', u64(done)",
        "'cuEventSynchronize', u64(done)",
        "'cuMemAlloc_v2', ctypes.byref(u64()), size(MIB)",
        "'cuMemAllocManaged', ctypes.byref(u64()), size(MIB), 1",
        "'cuCtxSynchronize'",
    ],
)
@pytest.mark.parametrize(("mode", "answers"), [(0, [900, 901]), (2, [0, 0])])
def test_a_capture_breaks_by_calls_that_it_forbids(
    site: Site, call: str, mode: int, answers: list[int]
) -> None:
    assert together(site.programs(1), UNSAFE.format(mode=mode, call=call)) == [answers]
