"""Reads the moving figures of every healthy GPU at a steady pace; scrapes read what it published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import anyio
import structlog

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.nvml.errors import NvmlError
from agent.nvml.lane import Lane
from agent.nvml.port import NvmlPort, Sample

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TakenSample:
    """One reading and when it was taken, in seconds of the event loop's clock."""

    sample: Sample
    at: float


@dataclass(frozen=True, slots=True)
class Samples:
    """By UUID: the readings of the last round, GPUs that failed left out; how many failed so far."""

    taken: Mapping[str, TakenSample] = field(default_factory=lambda: MappingProxyType({}))
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class Sampler:
    """The task that samples. A GPU that fails loses its own sample and no other."""

    def __init__(self, nvml: NvmlPort, lane: Lane, snapshot: Cell[Snapshot], interval_seconds: float) -> None:
        self._nvml = nvml
        self._lane = lane
        self._snapshot = snapshot
        self._interval = interval_seconds
        self._failures: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self.samples: Cell[Samples] = Cell(Samples())

    @property
    def fresh_seconds(self) -> float:
        """How old a sample may be before it tells nothing: the sampler itself must be held up then."""
        return 5.0 + 3 * self._interval

    async def run(self) -> None:
        """Sample for ever. Rounds start at even intervals; one that overran is not made up for."""
        due = anyio.current_time()
        while True:
            await self._round()
            due = max(due + self._interval, anyio.current_time())
            await anyio.sleep_until(due)

    async def _round(self) -> None:
        snapshot = self._snapshot.value
        taken: dict[str, TakenSample] = {}
        if snapshot.problem is None:
            for state in snapshot.gpus:
                if state.healthy and (sample := await self._sample(state.uuid)):
                    taken[state.uuid] = sample
        self.samples.publish(Samples(MappingProxyType(taken), MappingProxyType(dict(self._failures))))

    async def _sample(self, uuid: str) -> TakenSample | None:
        try:
            sample = await self._lane.run(self._nvml.sample, uuid)
        except NvmlError as error:
            self._failures[uuid] = self._failures.get(uuid, 0) + 1
            self._told(uuid, str(error))
            return None
        self._told(uuid, None)
        return TakenSample(sample, anyio.current_time())

    def _told(self, uuid: str, problem: str | None) -> None:
        if problem == self._problems.get(uuid):
            return
        if problem is None:
            del self._problems[uuid]
            log.info("gpu_sampled_again", gpu=uuid)
        else:
            self._problems[uuid] = problem
            log.warning("gpu_not_sampled", gpu=uuid, problem=problem)
