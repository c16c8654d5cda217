"""Pods come and go on nodes without the extender: how many die at admission, by what lists leave out.

`python -m tests.bench.departures` prints the figures of docs/decisions.md.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from agent.model.placement import USUAL
from agent.model.pod import CORES
from tests.bench.arrivals import BLOCKS

GPUS, NODES, PODS, SEEDS = 8, 4, 1500, 6
LISTED_SECONDS = 0.015  # from a pod's end until the kubelet has taken in the bigger list
PATCHED_SECONDS = 0.385  # from then until the scheduler counts by it
BOUND_SECONDS = (0.007, 0.027)  # from a pod's end until the next is at the kubelet, as on the real cluster
LIFE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """Cores and blocks of one GPU, or that many hundreds of cores for whole GPUs."""

    cores: int
    blocks: int


@dataclass(slots=True)
class Gpu:
    """The held part of one GPU."""

    cores: int = 0
    blocks: int = 0
    whole: bool = False

    def listed(self, trim: bool) -> tuple[int, int]:
        """Its cores and blocks on the lists."""
        cores = self.cores if trim and self.blocks == BLOCKS else CORES
        return cores, self.blocks if trim and self.whole else BLOCKS


@dataclass(slots=True)
class Node:
    """A node, and what kubelet and scheduler believe of it."""

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu() for _ in range(GPUS)])
    listed: list[tuple[int, int]] = field(default_factory=lambda: [(CORES, BLOCKS)] * GPUS)
    allocatable: tuple[int, int] = (GPUS * CORES, GPUS * BLOCKS)
    cores: int = 0  # of pods that the scheduler has sent here
    blocks: int = 0

    def promises(self, request: Request) -> bool:
        """Whether the scheduler sends a pod here."""
        cores, blocks = self.allocatable
        return cores - self.cores >= request.cores and blocks - self.blocks >= request.blocks

    def place(self, request: Request) -> list[int]:
        """GPUs of a pod, by binpack; none: it dies."""
        if whole := request.cores // CORES:
            free = [at for at, gpu in enumerate(self.gpus) if gpu == Gpu() and self.listed[at][0] == CORES]
            return free[:whole] if len(free) >= whole else []
        fitting = [
            (cores - gpu.cores, blocks - gpu.blocks, at)
            for at, (gpu, (cores, blocks)) in enumerate(zip(self.gpus, self.listed, strict=True))
            if not gpu.whole and cores - gpu.cores >= request.cores and blocks - gpu.blocks >= request.blocks
        ]
        return [min(fitting)[2]] if fitting else []

    def hold(self, request: Request, places: Sequence[int], sign: int) -> None:
        """A pod comes (1) or goes (-1)."""
        for at in places:
            self.gpus[at].cores += sign * min(request.cores, CORES)
            self.gpus[at].blocks += sign * request.blocks
            self.gpus[at].whole = request.cores >= CORES and sign > 0


class Run:
    """One run in virtual time."""

    def __init__(self, trim: bool, seed: int, load: float, alone: float, uneven: float) -> None:
        """`alone`: part of the pods that ask for memory alone; `uneven`: for memory unlike their cores."""
        self.died = 0
        self._trim, self._alone, self._uneven = trim, alone, uneven
        self._draw = random.Random(seed)
        self._nodes = [Node() for _ in range(NODES)]
        self._waiting: list[Request] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0
        mean = sum(size * weight for size, weight in USUAL.items()) / sum(USUAL.values())
        every = mean * LIFE_SECONDS / (NODES * GPUS * CORES * load)
        arrives = 0.0
        for _ in range(PODS):
            arrives += self._draw.expovariate(1 / every)
            self._after(arrives, partial(self._come, self._request()))
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            action()

    def _request(self) -> Request:
        size, kind = self._draw.choices(list(USUAL), list(USUAL.values()))[0], self._draw.random()
        if size >= CORES:
            return Request(size, 0)
        if kind < self._alone:
            return Request(0, size * BLOCKS // CORES)
        quarters = self._draw.randint(1, 4) if kind < self._alone + self._uneven else 0
        return Request(size, quarters * BLOCKS // 4 or size * BLOCKS // CORES)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, action))

    def _come(self, request: Request) -> None:
        self._waiting.append(request)
        self._schedule()

    def _schedule(self) -> None:
        left = []
        for request in self._waiting:
            nodes = [node for node in self._nodes if node.promises(request)]
            if not nodes:
                left.append(request)
                continue
            node = max(nodes, key=lambda each: each.allocatable[0] - each.cores)
            node.cores, node.blocks = node.cores + request.cores, node.blocks + request.blocks
            self._after(self._draw.uniform(*BOUND_SECONDS), partial(self._admit, node, request))
        self._waiting = left

    def _admit(self, node: Node, request: Request) -> None:
        places = node.place(request)
        if places:
            node.hold(request, places, 1)
            self._after(self._draw.expovariate(1 / LIFE_SECONDS), partial(self._end, node, request, places))
            self._after(LISTED_SECONDS, partial(self._list, node))
        else:
            self.died += 1
            self._end(node, request, ())

    def _end(self, node: Node, request: Request, places: Sequence[int]) -> None:
        node.hold(request, places, -1)
        node.cores, node.blocks = node.cores - request.cores, node.blocks - request.blocks
        self._after(LISTED_SECONDS, partial(self._list, node))
        self._schedule()

    def _list(self, node: Node) -> None:
        listed = [gpu.listed(self._trim) for gpu in node.gpus]
        if listed != node.listed:
            node.listed = listed
            self._after(PATCHED_SECONDS, partial(self._patch, node))

    def _patch(self, node: Node) -> None:
        node.allocatable = (sum(each[0] for each in node.listed), sum(each[1] for each in node.listed))
        self._schedule()


def main() -> None:
    """Print how many of a hundred pods die, by mix and demand, under full and under trimmed lists."""
    for alone, uneven, mix in (
        (0.0, 0.0, "the usual mix"),
        (0.2, 0.0, "a fifth asks for memory alone"),
        (0.0, 0.3, "three in ten ask for other memory"),
    ):
        for load in (0.9, 1.1):
            died = [
                sum(Run(trim, seed, load, alone, uneven).died for seed in range(SEEDS)) / (PODS * SEEDS)
                for trim in (False, True)
            ]
            print(
                f"{mix}, demand {load:.0%}: full lists {died[0]:.1%}, trimmed lists {died[1]:.1%}", flush=True
            )


if __name__ == "__main__":
    main()
