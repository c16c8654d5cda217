"""Which whole GPUs a container should get: the best connected set.

Among sets with the same link score the one that leaves the rest of the free GPUs best connected,
among those the one of lowest positions. An exact search: GPUs that can be swapped for each other are
tried once, and a branch is left when even its best case is not better. The kubelet waits for the answer
with every pod of the node, so the search ends after a number of steps, which machines that exist
do not come near, with the best set found by then.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from agent.model.topology import Topology

# A sum of scores of 16 GPUs stays below this, so own score and rest go into one number.
_BIG: Final = 1 << 20
_MOST_STEPS: Final = 160


def choose(
    topology: Topology, available: Iterable[str], must_include: Sequence[str], size: int
) -> tuple[str, ...]:
    """`size` of the GPUs in `available`, `must_include` first and all of them.

    GPUs that the topology does not know (never seen, links not readable) are taken last. Fewer come back
    only if there are fewer.
    """
    must = tuple(dict.fromkeys(must_include))
    if len(must) >= size:
        return must[:size]
    free = [uuid for uuid in dict.fromkeys(available) if uuid not in must]
    known = sorted(topology.position[uuid] for uuid in free if uuid in topology.position)
    unknown = [uuid for uuid in free if uuid not in topology.position]
    wanted = size - len(must)
    fixed = [topology.position[uuid] for uuid in must if uuid in topology.position]
    picked = known if len(known) <= wanted else _Search(topology, known, fixed, wanted).best()
    chosen = [topology.gpus[number] for number in picked]
    return (*must, *chosen, *unknown[: wanted - len(chosen)])


class _Search:
    """Depth first with bounds over the free GPUs in order of position."""

    def __init__(self, topology: Topology, pool: list[int], fixed: list[int], size: int) -> None:
        scores = topology.scores
        self._size = size
        self._pool = pool
        everyone = [*pool, *fixed]
        # Worth of a GPU by itself: its links to the fixed ones, less what it takes from the rest.
        self._gains = [
            _BIG * sum(scores[one][other] for other in fixed) - sum(scores[one][other] for other in everyone)
            for one in pool
        ]
        self._weights = [[_BIG * scores[one][other] for other in pool] for one in pool]
        self._twins = [topology.twins[one] for one in pool]
        # Half of the best links that a GPU can have within a set of m, for every m.
        self._hopes = [self._hope(row) for row in self._weights]
        self._steps = 0
        self._best_value = -1 << 62
        self._best: tuple[int, ...] = ()

    def best(self) -> list[int]:
        """Positions of the chosen GPUs, in order."""
        for start in self._firsts():
            self._greedy(start)
        self._walk(0, (), 0, self._gains)
        return [self._pool[number] for number in sorted(self._best)]

    def _hope(self, row: list[int]) -> list[int]:
        sums = [0, 0]
        for weight in sorted(row, reverse=True)[: self._size]:
            sums.append(sums[-1] + weight // 2)
        return sums

    def _firsts(self) -> list[int]:
        return [i for i, twin in enumerate(self._twins) if twin not in self._twins[:i]]

    def _keep(self, value: int, chosen: tuple[int, ...]) -> None:
        if value > self._best_value:
            self._best_value, self._best = value, chosen

    def _greedy(self, start: int) -> None:
        gains, chosen, value = list(self._gains), [start], self._gains[start]
        left = set(range(len(self._pool))) - {start}
        while len(chosen) < self._size:
            row = self._weights[chosen[-1]]
            for number in left:
                gains[number] += row[number]
            following = max(left, key=lambda number: (gains[number], -number))
            value += gains[following]
            chosen.append(following)
            left.discard(following)
        self._keep(value, tuple(chosen))

    def _walk(self, first: int, chosen: tuple[int, ...], value: int, gains: list[int]) -> None:
        need = self._size - len(chosen)
        if need == 0:
            self._keep(value, chosen)
            return
        skipped: set[int] = set()
        for number in range(first, len(self._pool) - need + 1):
            if self._steps >= _MOST_STEPS or self._ceiling(number, need, value, gains) <= self._best_value:
                return
            if self._twins[number] in skipped:
                continue
            skipped.add(self._twins[number])
            self._steps += 1
            row = self._weights[number]
            grown = [gain + weight for gain, weight in zip(gains, row, strict=True)]
            self._walk(number + 1, (*chosen, number), value + gains[number], grown)

    def _ceiling(self, first: int, need: int, value: int, gains: list[int]) -> int:
        """No set that takes the rest from `first` on is worth more than this."""
        hopes = self._hopes
        best = sorted((gains[i] + hopes[i][need] for i in range(first, len(gains))), reverse=True)
        return value + sum(best[:need])
