"""Waiting for a word of shared memory to change, without polling (futex(2)); `agent.kit.futex` wakes."""

import ctypes
import errno
import os
import time

from agent.kit.futex import call

_FUTEX_WAIT = 0  # not the PRIVATE variant: who wakes may sit in another process


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_s: float | None) -> bool:
    """Sleep while the 32-bit word at `address` equals `expected`; False once the time is over.

    True means "look again", not "it changed": wake-ups may be spurious.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        limit = None
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            limit = ctypes.byref(_Timespec(int(left), int(left % 1 * 1e9)))
        if call(address, _FUTEX_WAIT, expected, limit) == 0:
            return True
        match ctypes.get_errno():
            case errno.EAGAIN:
                return True
            case errno.ETIMEDOUT:
                return False
            case errno.EINTR:
                continue
            case number:
                raise OSError(number, os.strerror(number))
