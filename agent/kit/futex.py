"""Wait for a word of shared memory to change, without polling (futex(2)).

The word lies in a shared mapping, so the wake-up crosses processes and reaches C readers of the
same file. ctypes drops the GIL during the system call: a waiting thread costs nothing.
"""

import ctypes
import errno
import os
import platform
import time

_FUTEX_WAIT = 0  # not the PRIVATE variants: waiters sit in other processes
_FUTEX_WAKE = 1
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221}
_NUMBER = _NUMBERS.get(platform.machine(), 98)
_ALL = 0x7FFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


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
        result = _syscall(
            ctypes.c_long(_NUMBER),
            ctypes.c_void_p(address),
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(expected),
            limit,
            None,
            ctypes.c_int(0),
        )
        if result == 0:
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


def wake(address: int) -> int:
    """Wake everybody who waits on the word at `address`; answers how many that were."""
    return int(
        _syscall(
            ctypes.c_long(_NUMBER),
            ctypes.c_void_p(address),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(_ALL),
            None,
            None,
            ctypes.c_int(0),
        )
    )
