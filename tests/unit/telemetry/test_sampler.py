"""The sampler over a simulated machine with injected faults."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agent.inventory.reducer import Unavailable, reduce
from agent.kit.tasks import Courtesy
from agent.nvml.port import NvmlCode, Sample, SampleRequest
from agent.telemetry.sampler import Sampler, Samples
from agent.telemetry.series import sample_series
from tests.unit.telemetry.agents import Parts
from tests.virtual_time import in_virtual_time

Logs = list[MutableMapping[str, Any]]


@asynccontextmanager
async def running(sampler: Sampler) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(sampler.run)
        yield
        group.cancel_scope.cancel()


async def rounds(sampler: Sampler, count: int = 2) -> Samples:
    """The samples after `count` more rounds: the first may have begun before the test's last change."""
    with anyio.fail_after(10):
        for _ in range(count):
            await sampler.samples.wait_change(sampler.samples.version)
    return sampler.samples.value


async def work_becomes(sampler: Sampler, uuid: str, work: Mapping[int, float]) -> None:
    """Wait until the processes of a GPU are known to do just this work."""
    with anyio.fail_after(30):
        await sampler.samples.wait_for(lambda newest: newest.taken[uuid].work == work)


def long_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose samples stand for longer than any round of a busy machine."""
    monkeypatch.setattr("agent.telemetry.sampler.DRIVER_SECONDS", 600.0)
    monkeypatch.setattr("agent.telemetry.sampler.SHORTEST_SECONDS", 600.0)


async def test_every_healthy_gpu_is_read() -> None:
    parts = Parts()
    uuids = parts.scan()
    parts.machine.load(
        0, utilization=40, memory_utilization=20, memory_used_mib=1024, power_w=65.5, temperature_c=51
    )
    async with running(parts.sampler):
        samples = await rounds(parts.sampler)
    assert set(samples.taken) == set(uuids)
    sample = samples.taken[uuids[0]].sample
    assert (sample.gpu_utilization_ratio, sample.memory_utilization_ratio) == (0.4, 0.2)
    assert (sample.power_watts, sample.temperature_celsius) == (65.5, 51.0)
    assert sample.memory_used_bytes == 1024 * 2**20
    assert samples.failures == {}


async def test_a_failing_gpu_loses_only_its_own_sample_and_comes_back(logs: Logs) -> None:
    parts = Parts()
    uuids = parts.scan()
    fault = parts.machine.fail("nvmlDeviceGetHandleByUUID", NvmlCode.UNKNOWN, gpu=1)
    async with running(parts.sampler):
        samples = await rounds(parts.sampler, 3)
        assert set(samples.taken) == set(uuids) - {uuids[1]}
        assert samples.failures[uuids[1]] >= 2
        fault.release()
        samples = await rounds(parts.sampler)
        assert set(samples.taken) == set(uuids)
    told = [(event["event"], event["gpu"]) for event in logs if event["event"].startswith("gpu_")]
    assert told == [("gpu_not_sampled", uuids[1]), ("gpu_sampled_again", uuids[1])]


async def test_a_gpu_that_hangs_holds_one_thread_and_no_other_gpu() -> None:
    parts = Parts(deadline=1.0)
    uuids = parts.scan()
    parts.machine.hang("nvmlDeviceGetHandleByUUID", gpu=2)
    async with running(parts.sampler):
        # The round in which it is found out takes the deadline, all later ones leave it out.
        for _ in range(4):
            samples = await rounds(parts.sampler, 1)
            assert set(samples.taken) == set(uuids) - {uuids[2]}
            assert parts.thread.stuck == 1
        assert set(samples.failures) == {uuids[2]}
        parts.machine.clear_faults()
        with anyio.fail_after(20):
            await parts.sampler.samples.wait_for(lambda newest: set(newest.taken) == set(uuids))
    parts.thread.close()


async def test_an_unhealthy_gpu_and_a_node_without_nvml_are_not_asked() -> None:
    parts = Parts()
    uuids = parts.scan()
    cell = parts.inventory.snapshot
    async with running(parts.sampler):
        await rounds(parts.sampler)
        cell.publish(reduce(cell.value, Unavailable("the driver is being replaced")))
        samples = await rounds(parts.sampler)
    assert samples.taken == {}
    assert samples.failures == {}
    assert len(uuids) == 4


async def test_what_a_gpu_does_not_offer_is_missing_and_no_failure() -> None:
    parts = Parts()
    uuids = parts.scan()
    parts.machine.fail("nvmlDeviceGetPowerUsage", NvmlCode.NOT_SUPPORTED, gpu=0)
    async with running(parts.sampler):
        samples = await rounds(parts.sampler)
    assert samples.taken[uuids[0]].sample.power_watts is None
    assert samples.taken[uuids[1]].sample.power_watts is not None
    assert samples.failures == {}


class AtOnce:
    """NVML's thread where no thread may be: calls run in the loop."""

    async def run(self, call: Callable[[], None], **_: object) -> None:
        call()

    def hangs(self, _: object) -> bool:
        return False


async def rounds_beside(waits: Callable[[float], bool]) -> list[tuple[str, float]]:
    """When the first two rounds read and published; `waits`: whether pods wait at a time."""
    parts, seen = Parts(), list[tuple[str, float]]()
    parts.scan()
    began, sample = anyio.current_time(), parts.nvml.sample

    def now() -> float:
        return round(anyio.current_time() - began, 2)

    def reading(uuid: str, request: SampleRequest | None = None) -> Sample:
        seen.append(("read", now()))
        return sample(uuid, request)

    parts.nvml.sample = reading  # type: ignore[method-assign]
    thread: Any = AtOnce()
    courtesy = Courtesy(lambda: waits(now()))
    sampler = Sampler(parts.nvml, thread, parts.inventory.snapshot, 1.0, courtesy=courtesy)
    async with running(sampler):
        for _ in range(2):
            await sampler.samples.wait_change(sampler.samples.version)
            seen.append(("published", now()))
    return list(dict.fromkeys(seen))


@in_virtual_time
async def test_a_round_stands_back_while_pods_wait() -> None:
    """It took the interpreter from calls of the kubelet: the slowest hundredth of all pairs waited for it."""
    found = await rounds_beside(lambda now: now < 0.05 or 1 <= now < 1.07)
    assert found == [("read", 0.05), ("published", 0.05), ("read", 1.07), ("published", 1.07)]


@in_virtual_time
async def test_a_round_stands_back_for_a_moment_only() -> None:
    found = await rounds_beside(lambda _: True)
    assert found == [("read", 0.1), ("published", 0.2), ("read", 1.1), ("published", 1.2)]


async def test_cancellation_ends_it_with_no_call_under_way() -> None:
    parts = Parts(interval=0.1)
    parts.scan()
    parts.machine.slow("nvmlDeviceGetHandleByUUID", 30)
    with anyio.move_on_after(0.1) as scope:
        await parts.sampler.run()
    assert scope.cancelled_caught
    assert parts.thread.stuck == 0
    assert await parts.thread.run(parts.nvml.count) == 4
    parts.thread.close()


@pytest.mark.parametrize(("interval", "fresh"), [(0.1, 5.3), (60.0, 185.0)])
def test_how_long_a_sample_tells_something(interval: float, fresh: float) -> None:
    assert Parts(interval=interval).sampler.fresh_seconds == pytest.approx(fresh)


async def test_a_peak_between_two_scrapes_is_told() -> None:
    parts = Parts()
    uuids = parts.scan()
    async with running(parts.sampler):
        parts.machine.load(0, utilization=100, memory_used_mib=8000, power_w=70, temperature_c=80)
        await rounds(parts.sampler)
        parts.machine.load(0, utilization=0, memory_used_mib=0, power_w=10, temperature_c=30)
        samples = await rounds(parts.sampler, 4)
    taken = samples.taken[uuids[0]]
    assert taken.sample.gpu_utilization_ratio == 0
    assert taken.spans["utilization"].most == 1
    assert 0 < taken.spans["utilization"].mean < 1
    assert taken.spans["memory_used"].most == 8000 * 2**20
    assert (taken.spans["power"].most, taken.spans["temperature"].most) == (70, 80)


async def test_work_of_processes_is_asked_for_since_the_last_time_and_kept_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_periods(monkeypatch)
    parts = Parts()
    uuids = parts.scan()
    machine = parts.machine
    machine.processes.start(0, 77, memory_mib=100)
    asked: list[int] = []
    sample = parts.nvml.sample

    def recording(uuid: str, request: SampleRequest | None = None) -> Sample:
        if request and uuid == uuids[0]:
            asked.append(request.since_us)
        return sample(uuid, request)

    parts.nvml.sample = recording  # type: ignore[method-assign]
    async with running(parts.sampler):
        await rounds(parts.sampler)  # the first round looks back by one interval: a late one sees nothing
        machine.processes.work(77, 60)
        await work_becomes(parts.sampler, uuids[0], {77: 0.6})
        samples = await rounds(parts.sampler)
        assert samples.taken[uuids[0]].work == {77: 0.6}  # though the driver reported it once
        assert asked[-1] == machine.mapping.state.processes[0].sampled_us
        machine.processes.stop(77)
        samples = await rounds(parts.sampler)
        assert samples.taken[uuids[0]].work == {}


async def test_counters_are_read_less_often_and_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts("dgx-h200")
    uuids = parts.scan()
    gpu = parts.machine.gpu(0)
    gpu.energy_mj = 5000
    async with running(parts.sampler):
        await rounds(parts.sampler)
        gpu.energy_mj = 7000
        samples = await rounds(parts.sampler)
        assert samples.taken[uuids[0]].sample.energy_joules == 5
        assert samples.taken[uuids[0]].sample.nvlink is not None
        monkeypatch.setattr("agent.telemetry.sampler.COUNTERS_SECONDS", 0.0)
        fault = parts.machine.fail("nvmlDeviceGetUtilizationRates", NvmlCode.UNKNOWN, gpu=0)
        await rounds(parts.sampler)
        fault.release()
        samples = await rounds(parts.sampler)  # after a failure nothing old is shown
        assert samples.taken[uuids[0]].sample.energy_joules == 7


async def test_pcie_throughput_is_read_only_when_asked_for() -> None:
    parts = Parts()
    uuids = parts.scan()
    for pcie in (False, True):
        sampler = Sampler(parts.nvml, parts.thread, parts.inventory.snapshot, 0.1, pcie=pcie)
        async with running(sampler):
            samples = await rounds(sampler, 1)
        assert (samples.taken[uuids[0]].sample.pcie_bytes_per_second is not None) is pcie
    parts.thread.close()


async def test_activity_is_read_only_when_asked_for() -> None:
    parts = Parts("dgx-h200")
    uuids = parts.scan()
    for activity in (False, True):
        sampler = Sampler(parts.nvml, parts.thread, parts.inventory.snapshot, 0.1, activity=activity)
        async with running(sampler):
            samples = await rounds(sampler, 2)
        taken = samples.taken[uuids[0]]
        assert (taken.sample.activity is not None) is activity
        names = {each[0].name for each in sample_series(taken, (uuids[0], "0"))}
        assert ("gpu_agent_gpu_tensor_active_ratio" in names) is activity
    parts.thread.close()


@in_virtual_time
async def test_a_clock_that_steps_back_loses_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round by round without its task: work is paid out over the rounds by their lengths, and a real machine's
    # pauses between a sample, a round and the next sample would mix the shares of two samples.
    parts = Parts(interval=0.1)
    uuid = parts.scan()[0]
    processes = parts.machine.processes
    processes.start(0, 77, memory_mib=100)
    processes.start(0, 78, memory_mib=100)
    now = 1_000_000 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)

    async def work() -> Mapping[int, float] | None:
        nonlocal now
        await anyio.sleep(0.1)
        now += 10**8
        taken = parts.sampler.taken(uuid, parts.sampler.sample(uuid))
        assert taken
        return taken.work

    assert await work() == {}
    processes.work(77, 60)
    processes.work(78, 30)
    assert await work() == {77: 0.6, 78: 0.3}
    now -= 3600 * 10**9
    # The driver still has the hour-ahead sample of 78: it is an old one, not a new one each second.
    seen = [await work() for _ in range(40)]
    assert all(shares == pytest.approx({77: 0.6, 78: 0.3}) for shares in seen[:9])
    assert seen[10:] == [{}] * 30
    for percent in (20, 80):
        processes.work(77, percent)
        assert await work() == {77: percent / 100}
    asked = parts.nvml.sample(uuid, SampleRequest(0, until_us=now // 1000))
    assert asked.busy == ((77, 0.8),)
    parts.thread.close()


async def test_a_round_that_is_late_after_the_clock_stepped_back_misses_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(interval=1.0)
    uuid = parts.scan()[0]
    now = 1_000_000 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)
    parts.machine.processes.start(0, 77)
    parts.machine.processes.work(77, 60)
    now += 10**8
    assert parts.sampler.sample(uuid).busy == ((77, 0.6),)
    now -= 3600 * 10**9
    assert parts.sampler.sample(uuid).busy == ()
    now += 10**8
    parts.machine.processes.work(77, 20)
    now += 5 * 10**9  # the machine was busy: five rounds are missing
    assert parts.sampler.sample(uuid).busy == ((77, 0.2),)
