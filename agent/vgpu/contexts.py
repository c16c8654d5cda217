"""The cost of one CUDA context on this node's GPUs, learned from containers that run.

A context takes hundreds of MiB by its existence, no call says how many, and they differ by GPU and driver.
Of a container with a single process they are what the driver measures beyond what the library counts there.
The library charges the figure ahead for each context, so that a cap holds from a program's first moment on;
until there is a figure a table by product counts, whether anybody measures or not.

What the library counts its container may write, and what it does not count (code, calls past it) looks like
a context, so that a figure is no more than a hint. Of each namespace the least counts, of several
namespaces the one in the middle, or below it; where fewer than three have one, nobody is charged more than
the table says, or than contexts take on GPUs of today, and nobody ever more than half of its cap. Nor is a
figure taken from a container that is above its cap.
"""

from collections import deque
from collections.abc import Callable, Collection
from statistics import median_low

# So many readings in a row have to be the very same: two moments are compared.
STABLE_READINGS = 3
LEAST_BYTES, MOST_BYTES = 16 << 20, 4 << 30
MOST_OF_A_CAP = 2
# Namespaces of which no single one sets a price, and the most that fewer may set.
AGREEING = 3
MOST_OF_FEW = 600 << 20


class Contexts:
    """Figures by GPU; one that has none yet takes that of the others, since a node's GPUs are alike."""

    def __init__(self, expected: Callable[[str], int] = lambda _: 0) -> None:
        """`expected`: bytes of a context on a GPU by its model; 0: the model is not known."""
        self._expected = expected
        self._readings: dict[str, deque[tuple[int, ...]]] = {}  # by folder
        self._learned: dict[str, tuple[str, str, int]] = {}  # GPU, namespace and bytes, by folder
        self._figures: dict[str, int] = {}  # by GPU; the last one stays when its containers are gone

    def of(self, gpu: str, cap_bytes: int) -> int:
        """The charge for each context of a container, in bytes; 0: not known yet."""
        expected = self._expected(gpu)
        figure = self._figures.get(gpu) or expected or min(self._figures.values(), default=0)
        return min(figure, cap_bytes // MOST_OF_A_CAP)

    def measured(
        self,
        key: str,
        place: tuple[str, str],
        memory_bytes: int,
        sole: tuple[int, int] | None,
        cap_bytes: int,
    ) -> None:
        """Take in a reading: what the driver measures, and what the library charged the `sole` process.

        Of that the first figure is all of it, the second what is for contexts. `place`: GPU and namespace of
        the container.
        """
        if sole is None or memory_bytes > cap_bytes:
            self._readings.pop(key, None)
            return
        readings = self._readings.setdefault(key, deque(maxlen=STABLE_READINGS))
        readings.append((memory_bytes, *sole))
        charged, of_contexts = sole
        found = memory_bytes - (charged - of_contexts)
        if (
            len(readings) == STABLE_READINGS
            and len(set(readings)) == 1
            and LEAST_BYTES <= found <= MOST_BYTES
        ):
            self._learn(key, place, found)

    def remembered(self, key: str, place: tuple[str, str], context_bytes: int, cap_bytes: int) -> None:
        """Take in what a container is charged that an earlier agent started."""
        if LEAST_BYTES <= context_bytes < min(cap_bytes // MOST_OF_A_CAP, MOST_BYTES):
            self._learn(key, place, context_bytes)

    def keep(self, keys: Collection[str]) -> None:
        """Forget containers that are not among these."""
        for gone in self._readings.keys() - set(keys):
            del self._readings[gone]
        for gone in self._learned.keys() - set(keys):
            del self._learned[gone]

    def _learn(self, key: str, place: tuple[str, str], found: int) -> None:
        gpu = place[0]
        self._learned[key] = (*place, found)
        least: dict[str, int] = {}
        for where, namespace, figure in self._learned.values():
            if where == gpu:
                least[namespace] = min(figure, least.get(namespace, figure))
        figure = median_low(least.values())
        self._figures[gpu] = (
            figure if len(least) >= AGREEING else min(figure, self._expected(gpu) or MOST_OF_FEW)
        )
