"""Layout of the part of the shared file that stands for the GPUs' time (`gpu_clock.c`, `gpu_time.c`)."""

from ctypes import Array, Structure, c_uint32, c_uint64
from enum import IntEnum
from typing import ClassVar, Final

LANES: Final = 128
ITEMS: Final = 256
STAMPS: Final = 4096
TENANTS: Final = 128
TASKS: Final = 64
SLICE_NS: Final = 2_000_000
"""How long one process has the GPU while others wait for it."""
WINDOW_NS: Final = 166_666_667
"""NVML's sampling period."""
WINDOWS: Final = 32
"""Periods that NVML remembers."""


class ClockMode(IntEnum):
    """How the GPUs' time passes."""

    OFF = 0  # streams are independent of each other, and work takes real time
    WALL = 1  # the GPU is shared in time slices; its clock is the machine's, at `permille` of the speed
    VIRTUAL = 2  # the same, and the clock is moved on when every task waits: as fast as the tasks compute


class TaskState(IntEnum):
    """Of a thread that takes part in virtual time."""

    FREE = 0
    RUNNING = 1
    WAITING = 2


class CudaItemState(Structure):
    """Work in a stream. `stamp` is the number of the one that its end is written to, plus one."""

    left_ns: int
    stamp: int
    generation: int
    copies: int
    _fields_: ClassVar = [
        ("left_ns", c_uint64),
        ("stamp", c_uint32),
        ("generation", c_uint32),
        ("copies", c_uint32),  # work of a copy engine: beside the kernels, and no tenant waits for it
    ]


class CudaLaneState(Structure):
    """A stream of a process with work in order: items `done` to `pushed` of the ring."""

    tenant: int
    pushed: int
    done: int
    items: Array[CudaItemState]
    _fields_: ClassVar = [
        ("tenant", c_uint32),  # number plus one; 0: free
        ("pushed", c_uint64),
        ("done", c_uint64),
        ("items", CudaItemState * ITEMS),
    ]


class CudaStampState(Structure):
    """When an event happened; 0: not yet."""

    at_ns: int
    generation: int
    taken: int
    _fields_: ClassVar = [("at_ns", c_uint64), ("generation", c_uint32), ("taken", c_uint32)]


class CudaTenantState(Structure):
    """A process on one GPU: its time there, and what NVML says of it."""

    state: int
    slot: int
    device: int
    percent: int
    busy_ns: int
    window_ns: int
    last_ns: int
    _fields_: ClassVar = [
        ("state", c_uint32),  # 0: free; 1: living; 2: ended, its figures still there
        ("slot", c_uint32),
        ("device", c_uint32),
        ("percent", c_uint32),
        ("busy_ns", c_uint64),
        ("window_ns", c_uint64),
        ("last_ns", c_uint64),  # when it last had the GPU
    ]


class CudaWindowState(Structure):
    """One period of NVML's: all that was done in it, in percent of the GPU, as one process's."""

    end_ns: int
    tenant: int
    percent: int
    _fields_: ClassVar = [
        ("end_ns", c_uint64),
        ("tenant", c_uint32),  # number plus one; 0: nobody
        ("percent", c_uint32),
    ]


class CudaTimeState(Structure):
    """The time of one GPU."""

    now_ns: int
    slice_end_ns: int
    window_end_ns: int
    active: int
    closed: int
    windows: Array[CudaWindowState]
    _fields_: ClassVar = [
        ("now_ns", c_uint64),
        ("slice_end_ns", c_uint64),
        ("window_end_ns", c_uint64),
        ("active", c_uint32),  # tenant plus one
        ("closed", c_uint32),  # periods so far; the ring has the last ones
        ("windows", CudaWindowState * WINDOWS),
    ]


class CudaTaskState(Structure):
    """A thread that takes part in virtual time: it runs, or waits for an instant or a stream."""

    state: int
    pid: int
    wake: int
    lane: int
    until_ns: int
    target: int
    _fields_: ClassVar = [
        ("state", c_uint32),
        ("pid", c_uint32),
        ("wake", c_uint32),
        ("lane", c_uint32),  # number plus one; 0: it waits for the instant alone
        ("until_ns", c_uint64),
        ("target", c_uint64),
    ]


class CudaClockState(Structure):
    """Time of all GPUs of the machine."""

    mode: int
    permille: int
    expected: int
    joined: int
    turn: int
    origin_ns: int
    now_ns: int
    lock: Array[c_uint64]
    tasks: Array[CudaTaskState]
    devices: Array[CudaTimeState]
    tenants: Array[CudaTenantState]
    lanes: Array[CudaLaneState]
    stamps: Array[CudaStampState]
    _fields_: ClassVar = [
        ("mode", c_uint32),
        ("permille", c_uint32),
        ("expected", c_uint32),  # tasks without which virtual time does not begin
        ("joined", c_uint32),
        ("turn", c_uint32),  # task plus one that runs
        ("tenant_high", c_uint32),
        ("lane_high", c_uint32),
        ("task_high", c_uint32),
        ("origin_ns", c_uint64),
        ("now_ns", c_uint64),
        ("lock", c_uint64 * 16),
        ("tasks", CudaTaskState * TASKS),
        ("devices", CudaTimeState * 16),
        ("tenants", CudaTenantState * TENANTS),
        ("lanes", CudaLaneState * LANES),
        ("stamps", CudaStampState * STAMPS),
    ]


STRUCTURES: Final = (
    CudaItemState,
    CudaLaneState,
    CudaStampState,
    CudaTenantState,
    CudaWindowState,
    CudaTimeState,
    CudaTaskState,
    CudaClockState,
)
