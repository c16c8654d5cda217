"""Whether memory goes back to normal: what lives in this process, less what was there before all storms.

Nothing is sampled, so that a seed has the same figures twice. What the kubelet, the API server and the
machine keep in a storm is among it, and changes little in quiet.
"""

import gc
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import msgspec

# What refers to nothing that counts; frames of what runs now are no part of a storm.
_LEAVES = (str, bytes, int, float, bool, type(None), FrameType, CodeType)


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
    """Objects that live now and were not there at `ignore_what_is_there`."""
    gc.collect()
    objects = gc.get_objects()
    return Memory(len(objects), _size(objects))


def _size(objects: list[object]) -> int:
    """Bytes of these, and of what the collector does not list by itself.

    That is texts and numbers, and containers of nothing else. A function of its own, as what it keeps while
    it counts is then younger than the list, and not counted.
    """
    untracked: dict[int, object] = {}
    fresh = objects
    while fresh:
        found = {id(one): one for one in gc.get_referents(*fresh) if not gc.is_tracked(one)}
        fresh = [one for key, one in found.items() if key not in untracked and not isinstance(one, _LEAVES)]
        untracked |= found
    return sum(_bytes(one) for each in (objects, untracked.values()) for one in each)


def _bytes(one: object) -> int:
    # By msgspec 0.22.0 a Raw that is part of another has the size of a pointer's value, that is, terabytes.
    return memoryview(one).nbytes if type(one) is msgspec.Raw else sys.getsizeof(one, 0)
