"""Waking launches that wait in the enforcement library when limits change.

They sleep by futex(2) on a word of the limit file, of which containers have a read-only mapping: waiting
takes no more than that. The key of the futex is the file's page, so that a wake through the agent's own
mapping reaches them. Nothing is stored: a library that was not woken looks again within 100 ms.
"""

import ctypes
import mmap

from agent.kit import futex


def wake(descriptor: int, offset: int, size: int) -> int:
    """How many threads waited on the word at `offset` of a file of `size` bytes, opened for writing.

    0 also where they cannot be woken (a file system without mappings, a sandbox without the call): what was
    written stands all the same, and they see it by themselves.
    """
    try:
        with mmap.mmap(descriptor, size) as mapped:
            return max(0, _wake(mapped, offset))
    except (OSError, ValueError):
        return 0


def _wake(mapped: mmap.mmap, offset: int) -> int:
    # In a function of its own: while the word is referred to the mapping cannot be closed.
    return futex.wake(ctypes.addressof(ctypes.c_uint32.from_buffer(mapped, offset)))
