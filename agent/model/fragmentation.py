"""How much free GPU the usual mix of pods cannot use: fragmentation gradient descent.

After Weng and others, "Beware of Fragmentation" (USENIX ATC 2023): a pod goes where the expected share of
free GPU that a pod drawn from the mix could not use grows least. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agent.model.demand import CORES

# Share of pods in percent by GPUs asked for, in hundredths: a public production mix (issue 10).
USUAL: Mapping[int, float] = {
    100: 55.4, 81: 15.3, 47: 10.6, 32: 4.6, 65: 3.6, 23: 2.0, 46: 1.8, 59: 1.1, 16: 1.0, 55: 1.0, 22: 0.9,
    37: 0.7, 800: 0.6, 11: 0.3, 48: 0.3, 200: 0.2, 400: 0.2, 5: 0.1, 33: 0.1, 35: 0.1, 27: 0.1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Free:
    """Free hundredths on a node: on all GPUs, on those partly used, and how many are wholly free."""

    partly: int
    untouched: int


class Mix:
    """Weights of what pods ask for, in hundredths of a GPU: below 100 a share, above it whole GPUs."""

    def __init__(self, weights: Mapping[int, float] = USUAL) -> None:
        total = sum(weights.values()) or 1.0
        self._shares = [(size, weight / total) for size, weight in weights.items() if size < CORES]
        self._whole = [(size // CORES, weight / total) for size, weight in weights.items() if size >= CORES]
        # One number is asked for again and again: what shares lose on a GPU with so much left.
        self.share_loss = lru_cache(maxsize=1 << 15)(self._share_loss)

    def _share_loss(self, cores: int, fits: int) -> float:
        """Hundredths that shares cannot use of a GPU with `cores` left, where shares up to `fits` fit."""
        return cores * sum(weight for size, weight in self._shares if size > fits)

    def whole_loss(self, free: Free) -> float:
        """Hundredths of a node that pods of whole GPUs cannot use."""
        everything = free.partly + CORES * free.untouched
        return sum(
            weight * (everything if free.untouched < count else free.partly) for count, weight in self._whole
        )
