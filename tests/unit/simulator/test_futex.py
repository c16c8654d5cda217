"""Waiting for words of shared memory, and waking who waits."""

import ctypes

from agent.kit import futex
from agent.simulator.futex_wait import wait


def test_futex_answers_whether_it_timed_out() -> None:
    word = ctypes.c_uint32(7)
    assert wait(ctypes.addressof(word), 8, 10.0)  # changed already
    assert not wait(ctypes.addressof(word), 7, 0.01)
    assert futex.wake(ctypes.addressof(word)) == 0
