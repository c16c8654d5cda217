"""Layout of the file that stands for the GPUs' memory: the one place where it is written down.

The CUDA double and the NVML double of every process map the same file, so that both give the same
figures. The C view is generated from these structures with a check of every offset, as that of the
simulated machine is (`tests.nvml_double.header`).

A process holds a POSIX record lock on one byte of the file behind the structures, `LOCK_BASE` plus
the number of its slot, for as long as it lives. The kernel drops the lock when the process ends or
calls exec, whatever way it ended, before its parent can wait for it: as the driver frees memory. And
the kernel translates the holder's pid into the PID namespace of the caller.
"""

import ctypes
import zlib
from ctypes import Array, Structure, c_char, c_int32, c_uint32, c_uint64
from enum import IntEnum
from typing import ClassVar, Final

from tests.cuda_double import layout_time
from tests.cuda_double.layout_time import CudaClockState

STATE_VARIABLE: Final = "GNA_SIM_CUDA_STATE"
# Without the variable: a file of this name beside the library, since tenants can empty their environment.
STATE_BESIDE_LIBRARY: Final = "cuda-state"
MAGIC: Final = 0x31_41_44_55_43_41_4E_47  # "GNACUDA1" in memory, little endian
LOCK_BASE: Final = 1 << 40
DEVICES: Final = 16
SLOTS: Final = 4096
SHARED: Final = 1024
HOLDERS: Final = 16
CALLS: Final = 1024
FAULTS: Final = 16
LIMITS: Final = 256
RECORDS: Final = 256
ARGUMENTS: Final = 16


class MemoryKind(IntEnum):
    """Which part of the driver a byte was given to."""

    CONTEXT = 0
    LINEAR = 1
    POOL = 2
    PHYSICAL = 3  # cuMemCreate
    ARRAY = 4
    GRAPH = 5
    MANAGED = 6
    CODE = 7


class FaultAction(IntEnum):
    """The effect of an injected fault on a call."""

    NONE = 0
    FAIL = 1
    HANG = 2
    CRASH = 3
    SLOW = 4


class Watch(IntEnum):
    """Conditions that every call checks before its work; bits."""

    FAULTS = 1
    RECORD = 2  # write down the symbol and the arguments
    PROBE = 4  # write them down, and do nothing else


class CudaDeviceState(Structure):
    """One GPU; `used` and `peak` count the bytes of all processes."""

    uuid: bytes
    name: bytes
    bus_id: bytes
    total: int
    used: int
    peak: int
    context_bytes: int
    module_bytes: int
    pool_chunk: int
    granularity: int
    cc_major: int
    cc_minor: int
    processors: int
    unified: int
    _fields_: ClassVar = [
        ("uuid", c_char * 48),
        ("name", c_char * 64),
        ("bus_id", c_char * 32),
        ("total", c_uint64),
        ("used", c_uint64),
        ("peak", c_uint64),
        ("context_bytes", c_uint64),
        ("module_bytes", c_uint64),
        ("pool_chunk", c_uint64),
        ("granularity", c_uint64),
        ("cc_major", c_uint32),
        ("cc_minor", c_uint32),
        ("processors", c_uint32),
        ("unified", c_uint32),
    ]


class CudaUseState(Structure):
    """The resources of one process on one GPU."""

    bytes: Array[c_uint64]
    launches: int
    busy_ns: int
    _fields_: ClassVar = [
        ("bytes", c_uint64 * len(MemoryKind)),
        ("launches", c_uint64),
        ("busy_ns", c_uint64),
    ]


class CudaSlotState(Structure):
    """One process. `space` and `started` tell a pid from the same number elsewhere or later."""

    state: int
    pid: int
    space: int
    started: int
    uses: Array[CudaUseState]
    _fields_: ClassVar = [
        ("state", c_uint32),
        ("pid", c_uint32),
        ("space", c_uint64),
        ("started", c_uint64),
        ("uses", CudaUseState * DEVICES),
    ]


class CudaSharedState(Structure):
    """Memory that was exported. It is counted for the first holder and is there until the last is gone."""

    state: int
    generation: int
    device: int
    kind: int
    bytes: int
    holders: Array[c_uint32]
    _fields_: ClassVar = [
        ("state", c_uint32),
        ("generation", c_uint32),
        ("device", c_uint32),
        ("kind", c_uint32),
        ("bytes", c_uint64),
        ("holders", c_uint32 * HOLDERS),  # number of the slot plus one; 0 is none
    ]


class CudaFaultState(Structure):
    """One injected fault; `symbol` is -1 for any, `remaining` is -1 for ever."""

    action: int
    symbol: int
    after: int
    remaining: int
    code: int
    milliseconds: int
    _fields_: ClassVar = [
        ("action", c_uint32),
        ("symbol", c_int32),
        ("after", c_int32),
        ("remaining", c_int32),
        ("code", c_uint32),
        ("milliseconds", c_uint32),
    ]


class CudaRecordState(Structure):
    """One call that was written down; an argument wider than 8 bytes is its FNV-1a hash."""

    symbol: int
    count: int
    pid: int
    ready: int
    arguments: Array[c_uint64]
    _fields_: ClassVar = [
        ("symbol", c_uint32),
        ("count", c_uint32),
        ("pid", c_uint32),
        ("ready", c_uint32),
        ("arguments", c_uint64 * ARGUMENTS),
    ]


class CudaLimitState(Structure):
    """A limit that was set through NVML on one GPU for a cgroup. Kept and reported, not enforced here."""

    state: int
    device: int
    soft: int
    hard: int
    cgroup: bytes
    _fields_: ClassVar = [
        ("state", c_uint32),
        ("device", c_uint32),
        ("soft", c_uint64),
        ("hard", c_uint64),
        ("cgroup", c_char * 512),
    ]


class CudaMachineState(Structure):
    """The whole mapping."""

    magic: int
    version: int
    size: int
    symbols: int
    ready: int
    watch: int
    device_count: int
    slot_high: int
    record_head: int
    lock: Array[c_uint64]
    devices: Array[CudaDeviceState]
    limits: Array[CudaLimitState]
    faults: Array[CudaFaultState]
    records: Array[CudaRecordState]
    calls: Array[c_uint64]
    shared: Array[CudaSharedState]
    slots: Array[CudaSlotState]
    clock: CudaClockState
    _fields_: ClassVar = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("symbols", c_uint32),  # checksum of the symbols' names; 0 until a library is bound to the file
        ("ready", c_uint32),
        ("watch", c_uint32),
        ("device_count", c_uint32),
        ("slot_high", c_uint32),
        ("record_head", c_uint32),
        ("lock", c_uint64 * 16),  # a robust pthread_mutex_t; the first process makes it
        ("devices", CudaDeviceState * DEVICES),
        ("limits", CudaLimitState * LIMITS),
        ("faults", CudaFaultState * FAULTS),
        ("records", CudaRecordState * RECORDS),
        ("calls", c_uint64 * CALLS),
        ("shared", CudaSharedState * SHARED),
        ("slots", CudaSlotState * SLOTS),
        ("clock", CudaClockState),
    ]


STRUCTURES: Final = (
    *layout_time.STRUCTURES,
    CudaDeviceState,
    CudaUseState,
    CudaSlotState,
    CudaSharedState,
    CudaFaultState,
    CudaRecordState,
    CudaLimitState,
    CudaMachineState,
)
VERSION: Final = zlib.crc32(
    "\n".join(
        f"{structure.__name__}.{name} {getattr(structure, name).offset} {getattr(structure, name).size}"
        for structure in STRUCTURES
        for name, *_ in structure._fields_
    ).encode()
)
SIZE: Final = ctypes.sizeof(CudaMachineState)
