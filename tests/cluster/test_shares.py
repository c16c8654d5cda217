"""Shares of compute in real containers, on a simulated GPU whose clock runs at a quarter of the wall's speed.

What a pod got is read from the simulated GPU, in its own time; the library is the real one, by that clock.
"""

import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from clib.build_library import cached
from tests.cluster.build import python_image
from tests.cluster.capped_pods import CappedPods, capped_pods, thread
from tests.cluster.rig import Cluster
from tests.component.shares.row import CLOCK
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.program import Program

CAP = 8  # blocks of memory
SECOND = 1_000_000_000
WARM, MEASURED = 1, 3  # seconds of the GPU
WORK = """
CUDA.gna_sim_now.restype = ctypes.c_uint64
def work(seconds):
    kernel = function(b"work_500us")
    end = CUDA.gna_sim_now() + int(seconds * 1e9)
    while CUDA.gna_sim_now() < end:
        for _ in range(100): launch(kernel)
        check("cuCtxSynchronize")
"""


@pytest.fixture
async def pods(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CappedPods]:
    await thread(lambda: cluster.import_image(python_image.build(cluster.parts.program("busybox"))))
    async with capped_pods(cluster, monkeypatch.setenv) as made:
        made.library = await thread(partial(cached, clock=CLOCK))
        made.machine.start_clock(ClockMode.WALL, speed=0.25)
        yield made


def busy(pods: CappedPods, gpu: int) -> tuple[int, list[int]]:
    """The GPU's time, and for how long each process has had it."""
    clock = pods.machine.state.clock
    tenants = [each for each in clock.tenants[: clock.tenant_high] if each.state and each.device == gpu]
    return int(clock.devices[gpu].now_ns), sorted(int(each.busy_ns) for each in tenants)


def side_by_side(pods: CappedPods, gpu: int) -> list[float]:
    """Percent of the GPU that each pod had in the measured time, the smaller first."""
    with pods.program("thirty") as thirty, pods.program("seventy") as seventy:
        programs: list[Program] = [thirty, seventy]
        for program in programs:
            program(WORK, f"init({gpu})")
        for program in programs:
            program.send(f"work({WARM + MEASURED + 3})")
        began, _ = wait_for(pods, gpu, 0)
        start, before = wait_for(pods, gpu, began + WARM * SECOND)
        end, after = wait_for(pods, gpu, start + MEASURED * SECOND)
        for program in programs:
            program.receive()
    return [(b - a) * 100 / (end - start) for a, b in zip(before, after, strict=True)]


def wait_for(pods: CappedPods, gpu: int, instant: int) -> tuple[int, list[int]]:
    """As `busy`, once both work and the GPU's clock has come so far."""
    deadline = time.monotonic() + 60
    while True:
        now, each = busy(pods, gpu)
        if now >= instant and len(each) == 2 and all(each):
            return now, each
        assert time.monotonic() < deadline, (now, each)
        time.sleep(0.01)


async def test_two_pods_share_as_asked(pods: CappedPods) -> None:
    await pods.start(**{"vgpu.compute": "hard"})
    await pods.run("thirty", CAP, cores=30)
    await pods.run("seventy", CAP, cores=70)
    gpu = await pods.gpu_of("thirty")
    assert await pods.gpu_of("seventy") == gpu
    shares = await thread(side_by_side, pods, gpu)
    assert shares == [pytest.approx(30, abs=5), pytest.approx(70, abs=5)]
    told = (await pods.status_of("thirty"))["compute"]
    assert (told["askedPercent"], told["allottedPercent"]) == (30, 30)
    assert told["throttledSeconds"] > 0
