"""Layout of the simulated machine's shared memory: the one place where it is written down.

Plain ctypes structures without bit fields or pointers. The C library's header is generated from
them (`clib.header`) with a compile-time check of every offset, so the two cannot drift; a library
built for another layout refuses the file by its version.

Words that others wait on (`event_word`, `fault_word`) are futexes. Fields that must fit together
are written between two steps of `sequence` (odd while a change is under way).
"""

import ctypes
import zlib
from ctypes import Array, Structure, c_char, c_int32, c_uint32, c_uint64
from enum import IntEnum
from typing import ClassVar, Final

from agent.simulator.nvml_functions import CALLS

MAGIC: Final = 0x31_4D_49_53_41_4E_47  # "GNASIM1" in memory, little endian
MAX_GPUS: Final = 16
MAX_LINKS: Final = 18
MAX_INSTANCES: Final = 7  # of a GPU in MIG mode
MAX_MIG_PROFILES: Final = 8
WHOLE_GPU: Final = 0xFFFFFFFF  # in place of an instance's number
EVENT_SLOTS: Final = 1024  # a reader that falls further behind loses the oldest, as with the driver
FAULT_SLOTS: Final = 32
PROCESS_SLOTS: Final = 2048
NO_RECOVERY_ACTION: Final = 0xFFFFFFFF  # of a driver before R565: it has no such field
ACTIVITIES: Final = 4  # engine, SM, tensor, memory: as agent.nvml.sampling asks for them
CLOCKS: Final = 4  # graphics, SM, memory, video: nvmlClockType_t


class Presence(IntEnum):
    """How much of a GPU is still there."""

    PRESENT = 0
    LOST = 1
    FALLEN = 2  # off the bus: lost, and gone from sysfs


class FaultKind(IntEnum):
    """The effect of an injected fault on a call."""

    NONE = 0
    SLOW = 1
    HANG = 2
    FAIL = 3


class ProcessKind(IntEnum):
    """Which of NVML's process lists a process stands in."""

    COMPUTE = 1
    MPS = 2
    GRAPHICS = 4


class LinkState(Structure):
    """One NVLink of a GPU."""

    active: int
    peer_type: int  # nvmlIntNvLinkDeviceType_t
    domain: int
    bus: int
    device: int
    pci_device_id: int
    version: int
    crc_flit_errors: int
    crc_data_errors: int
    replay_errors: int
    recovery_errors: int
    tx_kib: int
    rx_kib: int
    _fields_: ClassVar = [
        ("active", c_uint32),
        ("peer_type", c_uint32),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("pci_device_id", c_uint32),
        ("version", c_uint32),
        ("padding", c_uint32),
        ("crc_flit_errors", c_uint64),
        ("crc_data_errors", c_uint64),
        ("replay_errors", c_uint64),
        ("recovery_errors", c_uint64),
        ("tx_kib", c_uint64),
        ("rx_kib", c_uint64),
    ]


class MigProfileState(Structure):
    """One kind of instance that a GPU in MIG mode can have; `slices` 0: none."""

    number: int  # NVML's number of it, which `kind` is not: the place in its enumeration
    kind: int
    slices: int
    eighths: int
    starts: int  # a bit for each place
    most: int
    multiprocessors: int
    media: int
    memory_total: int
    name: bytes
    _fields_: ClassVar = [
        ("number", c_uint32),
        ("kind", c_uint32),
        ("slices", c_uint32),
        ("eighths", c_uint32),
        ("starts", c_uint32),
        ("most", c_uint32),
        ("multiprocessors", c_uint32),
        ("media", c_uint32),
        ("memory_total", c_uint64),
        ("name", c_char * 32),
    ]


class InstanceState(Structure):
    """One GPU instance: a MIG device once a compute instance takes all of it (`used`), `bare` until then."""

    used: int
    bare: int
    gpu_instance: int
    compute_instance: int
    slices: int
    start: int  # in eighths of the memory
    eighths: int
    multiprocessors: int
    media: int  # whether it has the engines of +me
    memory_total: int
    memory_used: int
    uuid: bytes
    profile: bytes
    profile_number: int
    _fields_: ClassVar = [
        ("used", c_uint32),
        ("bare", c_uint32),
        ("profile_number", c_uint32),
        ("padding", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("slices", c_uint32),
        ("start", c_uint32),
        ("eighths", c_uint32),
        ("multiprocessors", c_uint32),
        ("media", c_uint32),
        ("memory_total", c_uint64),
        ("memory_used", c_uint64),
        ("uuid", c_char * 48),
        ("profile", c_char * 32),
    ]


class GpuState(Structure):
    """One GPU. `ancestor` is NVML's common-ancestor level towards every other slot."""

    uuid: bytes
    name: bytes
    serial: bytes
    cpu_list: bytes
    used: int
    presence: int
    domain: int
    bus: int
    device: int
    pci_device_id: int
    pci_subsystem_id: int
    minor: int
    numa_node: int
    cc_major: int
    cc_minor: int
    architecture: int
    brand: int
    compute_mode: int
    mig_capable: int
    mig_mode: int
    mig_needs_reset: int  # whether switching MIG mode resets the GPU
    mig_pending: int  # as it is after the next reset
    gpu_utilization: int
    memory_utilization: int
    power_mw: int
    power_limit_mw: int
    temperature_c: int
    performance_state: int
    pcie_tx_kib_s: int
    pcie_rx_kib_s: int
    ecc_supported: int
    remap_supported: int
    remap_correctable: int
    remap_uncorrectable: int
    remap_pending: int
    remap_failed: int
    retirement_supported: int
    retirement_pending: int
    retired_single: int
    retired_double: int
    link_count: int
    recovery_action: int
    gpm_supported: int
    activity: Array[c_uint32]  # percent
    ancestor: Array[c_uint32]
    clocks_mhz: Array[c_uint32]
    max_clocks_mhz: Array[c_uint32]
    memory_total: int
    memory_reserved: int
    memory_used: int
    energy_mj: int
    event_reasons: int
    supported_events: int
    ecc_volatile_corrected: int
    ecc_volatile_uncorrected: int
    ecc_aggregate_corrected: int
    ecc_aggregate_uncorrected: int
    links: Array[LinkState]
    mig_profiles: Array[MigProfileState]
    instances: Array[InstanceState]
    _fields_: ClassVar = [
        ("uuid", c_char * 48),
        ("name", c_char * 64),
        ("serial", c_char * 16),
        ("cpu_list", c_char * 64),
        ("used", c_uint32),
        ("presence", c_uint32),
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("minor", c_uint32),
        ("numa_node", c_int32),
        ("cc_major", c_uint32),
        ("cc_minor", c_uint32),
        ("architecture", c_uint32),
        ("brand", c_uint32),
        ("compute_mode", c_uint32),
        ("mig_capable", c_uint32),
        ("mig_mode", c_uint32),
        ("mig_needs_reset", c_uint32),
        ("mig_pending", c_uint32),
        ("gpu_utilization", c_uint32),
        ("memory_utilization", c_uint32),
        ("power_mw", c_uint32),
        ("power_limit_mw", c_uint32),
        ("temperature_c", c_uint32),
        ("performance_state", c_uint32),
        ("pcie_tx_kib_s", c_uint32),
        ("pcie_rx_kib_s", c_uint32),
        ("ecc_supported", c_uint32),
        ("remap_supported", c_uint32),
        ("remap_correctable", c_uint32),
        ("remap_uncorrectable", c_uint32),
        ("remap_pending", c_uint32),
        ("remap_failed", c_uint32),
        ("retirement_supported", c_uint32),
        ("retirement_pending", c_uint32),
        ("retired_single", c_uint32),
        ("retired_double", c_uint32),
        ("link_count", c_uint32),
        ("recovery_action", c_uint32),
        ("gpm_supported", c_uint32),
        ("activity", c_uint32 * ACTIVITIES),
        ("ancestor", c_uint32 * MAX_GPUS),
        ("clocks_mhz", c_uint32 * CLOCKS),
        ("max_clocks_mhz", c_uint32 * CLOCKS),
        ("memory_total", c_uint64),
        ("memory_reserved", c_uint64),
        ("memory_used", c_uint64),
        ("energy_mj", c_uint64),
        ("event_reasons", c_uint64),
        ("supported_events", c_uint64),
        ("ecc_volatile_corrected", c_uint64),
        ("ecc_volatile_uncorrected", c_uint64),
        ("ecc_aggregate_corrected", c_uint64),
        ("ecc_aggregate_uncorrected", c_uint64),
        ("links", LinkState * MAX_LINKS),
        ("mig_profiles", MigProfileState * MAX_MIG_PROFILES),
        ("instances", InstanceState * MAX_INSTANCES),
    ]


class ProcessState(Structure):
    """One process on a GPU; the utilisation fields are percent over its last sample."""

    slot: int
    pid: int
    kind: int
    sm_utilization: int
    memory_utilization: int
    encoder_utilization: int
    decoder_utilization: int
    gpu_instance: int  # on which it runs; 0: on the whole GPU
    memory_used: int
    sampled_us: int
    _fields_: ClassVar = [
        ("slot", c_uint32),
        ("pid", c_uint32),
        ("kind", c_uint32),
        ("sm_utilization", c_uint32),
        ("memory_utilization", c_uint32),
        ("encoder_utilization", c_uint32),
        ("decoder_utilization", c_uint32),
        ("gpu_instance", c_uint32),
        ("memory_used", c_uint64),
        ("sampled_us", c_uint64),
    ]


class EventState(Structure):
    """One event of the ring; `kind` is NVML's event bit."""

    kind: int
    data: int
    slot: int
    gpu_instance: int  # WHOLE_GPU: of none
    compute_instance: int
    _fields_: ClassVar = [
        ("kind", c_uint64),
        ("data", c_uint64),
        ("slot", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("padding", c_uint32),
    ]


class FaultState(Structure):
    """One injected fault; `call` and `slot` are -1 for any, `remaining` is -1 for ever."""

    kind: int
    call: int
    slot: int
    code: int
    remaining: int
    milliseconds: int
    ticket: int  # a number of its own for every fault, so that a hung call knows when its fault is over
    _fields_: ClassVar = [
        ("kind", c_uint32),
        ("call", c_int32),
        ("slot", c_int32),
        ("code", c_uint32),
        ("remaining", c_int32),
        ("milliseconds", c_uint32),
        ("ticket", c_uint32),
        ("padding", c_uint32),
    ]


class MachineState(Structure):
    """The whole mapping."""

    magic: int
    version: int
    size: int
    driver_version: bytes
    nvml_version: bytes
    profile: bytes
    cuda_version: int
    library_missing: int
    driver_mismatch: int
    lost_breaks_uuid_lookup: int
    enumerates_at_open: int
    sequence: int
    event_head: int
    event_word: int
    fault_word: int
    fault_tickets: int
    gpu_count: int
    process_count: int
    order: Array[c_uint32]
    gpus: Array[GpuState]
    faults: Array[FaultState]
    events: Array[EventState]
    processes: Array[ProcessState]
    _fields_: ClassVar = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("driver_version", c_char * 32),
        ("nvml_version", c_char * 32),
        ("profile", c_char * 32),
        ("cuda_version", c_uint32),
        ("library_missing", c_uint32),
        ("driver_mismatch", c_uint32),
        ("lost_breaks_uuid_lookup", c_uint32),
        ("enumerates_at_open", c_uint32),
        ("sequence", c_uint32),
        ("event_head", c_uint64),
        ("event_word", c_uint32),
        ("fault_word", c_uint32),
        ("fault_tickets", c_uint32),
        ("gpu_count", c_uint32),
        ("process_count", c_uint32),
        ("order", c_uint32 * MAX_GPUS),
        ("gpus", GpuState * MAX_GPUS),
        ("faults", FaultState * FAULT_SLOTS),
        ("events", EventState * EVENT_SLOTS),
        ("processes", ProcessState * PROCESS_SLOTS),
    ]


STRUCTURES: Final = (
    LinkState,
    MigProfileState,
    InstanceState,
    GpuState,
    ProcessState,
    EventState,
    FaultState,
    MachineState,
)


def layout() -> str:
    """Every field with offset and size, one a line: what two builds must agree on."""
    lines = []
    for structure in STRUCTURES:
        lines.append(f"{structure.__name__} {ctypes.sizeof(structure)}")
        for name, *_ in structure._fields_:
            field = getattr(structure, name)
            lines.append(f"  {name} {field.offset} {field.size}")
    return "\n".join(lines)


VERSION: Final = zlib.crc32("\n".join((layout(), *CALLS)).encode())
