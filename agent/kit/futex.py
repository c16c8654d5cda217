"""Waking those who wait for a word of shared memory to change (futex(2)).

The word lies in a shared mapping, so the wake-up crosses processes and reaches C readers of the same file.
"""

import ctypes
import platform

_FUTEX_WAKE = 1  # not the PRIVATE variant: waiters sit in other processes
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221}
_NUMBER = _NUMBERS.get(platform.machine(), 98)
_ALL = 0x7FFFFFFF

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def call(address: int, operation: int, value: int, limit: object = None) -> int:
    """The system call on the word at `address`; -1 with ctypes' errno. Holds no GIL meanwhile."""
    fixed = (ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(operation))
    return int(_syscall(*fixed, ctypes.c_uint32(value), limit, None, ctypes.c_int(0)))


def wake(address: int) -> int:
    """Wake everybody who waits on the word at `address`; answers how many that were."""
    return call(address, _FUTEX_WAKE, _ALL)
