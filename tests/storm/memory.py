"""Whether memory goes back to normal: what lives in this process, less what was there before all storms.

Nothing is sampled, so that a seed has the same figures twice. What the kubelet, the API server and the
machine keep in a storm is among it, and changes little in quiet.
"""

import gc
import sys
from collections.abc import Iterator
from typing import NamedTuple

_ATOMS = (str, bytes, int, float, bool, type(None))


class Memory(NamedTuple):
    """Objects that may refer to others, and bytes of all."""

    objects: int
    size: int

    def beyond(self, other: "Memory") -> "Memory":
        """How much more this is."""
        return Memory(self.objects - other.objects, self.size - other.size)

    def exceeds(self, bound: "Memory") -> bool:
        """Whether either figure is larger."""
        return self.objects > bound.objects or self.size > bound.size

    def __str__(self) -> str:
        return f"{self.objects} objects ({self.size >> 10} KiB)"


def ignore_what_is_there() -> None:
    """Count nothing that lives now: modules, classes, code."""
    gc.collect()
    gc.freeze()


def measured() -> Memory:
    """What lives now and was not there at `ignore_what_is_there`."""
    gc.collect()
    objects = gc.get_objects()
    seen: set[int] = set()
    size = 0
    for one in objects:
        size += sys.getsizeof(one, 0)
        for each in _untracked(one):
            if id(each) not in seen:
                seen.add(id(each))
                size += sys.getsizeof(each, 0)
    return Memory(len(objects), size)


def _untracked(one: object) -> Iterator[object]:
    """What the collector does not list by itself: texts and numbers, and containers of nothing else."""
    for each in gc.get_referents(one):
        if not gc.is_tracked(each):
            yield each
            if not isinstance(each, _ATOMS):
                yield from _untracked(each)
