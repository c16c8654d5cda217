"""Whether figures of use are true: bursts through the simulated NVML, in virtual time."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import anyio
import pytest

from agent.holdings.process_owners import Owners
from agent.kit.tasks import Cell
from agent.model.cgroup import ContainerRef
from agent.model.holding import Holding, Record
from agent.nvml.port import GpuProcess, Sample
from agent.nvml.sampling import mean_use
from agent.simulator.state import ProcessKind
from agent.telemetry.container_use import ContainerUse, ContainerWatch
from agent.telemetry.sampler import ProcessWork, Samples
from tests.pods import seen
from tests.unit.telemetry.agents import Parts

START = 1_000_000  # seconds since 1970
MINUTE = 60
Busy = Callable[[float, float], float]  # seconds of work between two moments


class _Owners(Owners):
    """Process 100 + n is of the container `main` of pod n."""

    def of(self, pids: object) -> Mapping[int, ContainerRef | None]:
        return {pid: ContainerRef(f"uid-{pid}", f"id-{pid}") for pid in pids}  # type: ignore[attr-defined]


class Minute:
    """A GPU with one process in each of some containers, under a driver that samples once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: list[Busy]) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "time_ns", lambda: int((START + self.now) * 1e9))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.busy = busy
        self.parts = Parts("dgx-h200", interval=1.0)
        self.uuid = self.parts.scan()[0]
        for number in range(len(busy)):
            self.parts.machine.processes.start(0, 100 + number, ProcessKind.COMPUTE, 100)
        units = tuple(f"{self.uuid}::c{n}" for n in range(10))
        holdings = [
            Holding("team", f"pod-{n}", "main", "tencent.com/vcuda-core", units) for n in range(len(busy))
        ]
        pods = {
            f"uid-{100 + n}": seen("team", f"pod-{n}", {f"id-{100 + n}": "main"}) for n in range(len(busy))
        }
        records: Cell[Record | None] = Cell(Record(tuple(holdings), ()))
        sampler = self.parts.sampler
        self.watch = ContainerWatch(
            self.parts.inventory.snapshot, sampler.samples, records, _Owners(), lambda: pods
        )

    def tick(self, second: int) -> None:
        """The driver samples the second that has just ended: processes that were idle are left out."""
        self.now = float(second)
        for number, busy in enumerate(self.busy):
            percent = round(100 * busy(second - 1.0, float(second)))
            if percent:
                self.parts.machine.processes.work(100 + number, percent)

    async def round(self, now: float, monkeypatch: pytest.MonkeyPatch) -> tuple[ContainerUse, ...]:
        """One round of the sampler, and the containers' figures of it."""
        self.now = now
        sampler = self.parts.sampler
        with monkeypatch.context() as patch:
            patch.setattr(anyio, "current_time", lambda: now)
            taken = sampler.taken(self.uuid, sampler.sample(self.uuid))
            assert taken is not None
            await self.watch.look(Samples(MappingProxyType({self.uuid: taken})))
        return self.watch.uses.value.containers


def bursts(cycle: float, duty: float) -> Busy:
    """Works for the first `duty` (0..1) of each `cycle` seconds."""

    def until(moment: float) -> float:
        whole, rest = divmod(moment, cycle)
        return whole * cycle * duty + min(rest, cycle * duty)

    return lambda start, end: until(end) - until(start)


def turn(number: int, others: int) -> Busy:
    """Works in each `others`-th second."""
    return lambda start, _: float(start % others == number)


@pytest.mark.parametrize("cycle", [0.3, 1.0, 2.0, 5.0, 10.0, 30.0])
async def test_bursty_use_is_true(cycle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for percent in (1, 10, 25, 50, 75, 100):
        for late in (0.05, 0.9):
            busy = bursts(cycle, percent / 100)
            minute = Minute(monkeypatch, [busy])
            for second in range(1, MINUTE + 1):
                minute.tick(second)
                # Rounds are never quite even.
                (found,) = await minute.round(second + late + (second % 2) * 0.04, monkeypatch)
            true = busy(0, MINUTE) / MINUTE
            told = f"{percent} % of {cycle} s, rounds {late} s behind the driver"
            assert found.utilization is not None
            assert found.gpu_seconds is not None
            assert found.utilization.mean == pytest.approx(true, abs=0.05), told
            assert found.gpu_seconds / MINUTE == pytest.approx(true, abs=0.05), told


@pytest.mark.parametrize("period", [1.0, 0.5, 1 / 6])
@pytest.mark.parametrize("jitter", [0.0, 0.005])
def test_rounds_that_meet_the_drivers_samples_now_before_and_now_after(period: float, jitter: float) -> None:
    """The driver's ring holds several samples of a process; rounds find none, one or many new ones."""
    for cycle, length in ((10, 1), (5, 1), (10, 3), (4, 2), (60, 60)):
        work, since, shown, true = ProcessWork(), 0, 0.0, 0.0
        ring: list[tuple[int, int, int]] = []
        ticks = iter([round(number * period * 1e6) for number in range(1, int(125 / period))])
        tick = next(ticks)
        for second in range(1, 121):
            now = second + (jitter if second % 2 else -jitter)
            while tick <= now * 1e6:
                if (tick / 1e6 - period / 2) % cycle < length:
                    ring.append((7, tick, 100))
                    true += period
                tick = next(ticks)
            busy, newest, stamps = mean_use(ring, since)
            since = newest or since
            sample = Sample(
                0,
                0,
                1,
                80,
                None,
                None,
                processes=(GpuProcess(7, 1),),
                busy=busy,
                busy_us=stamps,
                newest_us=newest,
            )
            found, elapsed = work.round(sample, now, 1.0)
            shown += found.get(7, 0.0) * elapsed
        assert shown / 120 == pytest.approx(true / 120, abs=0.05), f"{length} s of {cycle} s"


def test_a_round_that_is_paid_whole_shows_what_was_sampled() -> None:
    """To the last digit, however long the round was."""
    busy = Sample(0, 0, 1, 80, None, None, processes=(GpuProcess(7, 1),), busy=((7, 0.4),), newest_us=1)
    for milliseconds in range(50, 400):
        assert ProcessWork().round(busy, 1.0, milliseconds / 1000)[0] == {7: 0.4}


async def test_idle_means_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    minute = Minute(monkeypatch, [lambda start, _: 1.0 if start < 5 else 0.0])
    shown = []
    for second in range(1, 12):
        minute.tick(second)
        (found,) = await minute.round(second + 0.5, monkeypatch)
        shown.append(found.use.utilization)
    assert shown == [pytest.approx(1.0)] * 5 + [0.0] * 6


async def test_a_counter_of_estimated_use_is_missing_and_goes_on_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that stands still is the bill of a container that idles: `rate` of it is 0."""

    def beside(start: float, _: float) -> float:
        return 0.5 if 5 <= start < 20 else 0.0

    minute = Minute(monkeypatch, [lambda start, _: 0.25 if start >= 5 else 0.0, beside])
    told: list[tuple[float | None, ...]] = []
    for second in range(1, 150):
        minute.tick(second)
        if second == 21:
            minute.parts.machine.processes.stop(101)
        told.append(tuple(each.gpu_seconds for each in await minute.round(second + 0.05, monkeypatch)))
    assert list(told[3]) == [0, 0]  # nobody worked yet
    assert set(told[6:78]) == {(None, None)}
    first = [seconds[0] for seconds in told[85:]]
    assert None not in first
    assert first == sorted(seconds for seconds in first if seconds is not None)
    assert first[-1] == pytest.approx(0.25 * (150 - 21), abs=2)


async def test_containers_never_sum_above_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each seems to have had the whole GPU, as clients of an MPS server are; and some take turns.
    for together in (
        [bursts(1.0, 1.0)] * 4,
        [bursts(3.0, 0.4), bursts(2.0, 0.9), bursts(5.0, 0.7)],
        [turn(number, 3) for number in range(3)],
    ):
        minute = Minute(monkeypatch, together)
        for second in range(1, MINUTE + 1):
            minute.tick(second)
            found = await minute.round(second + 0.3 + (second % 3) * 0.02, monkeypatch)
            assert len(found) == len(together)
            assert sum(each.use.utilization for each in found) <= 1 + 1e-9
            assert sum(each.utilization.mean for each in found if each.utilization) <= 1 + 1e-9
            assert sum(each.gpu_seconds or 0.0 for each in found) <= second + 1.0
    # Of who takes turns nobody knows the own part: a third each is an estimate, and no bill.
    assert [each.gpu_seconds for each in found] == [None] * 3
    assert [each.utilization.mean for each in found if each.utilization] == pytest.approx(
        [1 / 3] * 3, abs=0.02
    )
