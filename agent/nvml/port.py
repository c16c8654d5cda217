"""The seam between the agent and NVML: what the agent asks, in its own types.

Two implementations: `binding.NvmlBinding` over nvidia-ml-py, and the simulated machine's
(`agent.simulator`). All methods block and are called from worker threads only; all raise
`agent.nvml.nvml_errors.NvmlError` or one of its kinds. GPUs are named by UUID, never by index,
except in `describe`, which is how UUIDs are learnt.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Protocol

from agent.model.gpu import Driver, Gpu, Instance
from agent.model.health import RecoveryAction

# Errors between the agent and NVML, as exceptions of this room.


class NvmlCode(IntEnum):
    """Return codes of NVML that the agent distinguishes (`nvmlReturn_t` in nvml.h)."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


class NvmlError(Exception):
    """A call into NVML failed; `code` is NVML's own, `call` the function that said so."""

    def __init__(self, code: int, call: str, message: str | None = None) -> None:
        self.code = code
        self.call = call
        super().__init__(message or f"NVML {call} failed: {code_name(code)} ({code})")


class NvmlLibraryMissing(NvmlError):
    """libnvidia-ml.so.1 is not on this node, or cannot be loaded."""


class NvmlDriverMismatch(NvmlError):
    """The loaded library does not fit the running kernel module; only a restart of the process can help."""


class NvmlNotSupported(NvmlError):
    """This GPU or this driver has no such function: not a fault."""


class NvmlGpuLost(NvmlError):
    """The GPU fell off the bus, is lost, or is not there any more."""


class NvmlLeftOver(NvmlError):
    """A call failed half-way, and what it had made is still there."""


class NvmlHung(NvmlError):
    """A call did not return within its deadline; its thread was given up."""


def code_name(code: int) -> str:
    try:
        return NvmlCode(code).name.lower().replace("_", " ")
    except ValueError:
        return "unknown code"


def error_for(code: int, call: str, detail: str | None = None) -> NvmlError:
    """The exception of this room for NVML's return code `code` of function `call`."""
    kind: type[NvmlError]
    match code:
        case NvmlCode.LIBRARY_NOT_FOUND:
            kind = NvmlLibraryMissing
        case NvmlCode.LIB_RM_VERSION_MISMATCH:
            kind = NvmlDriverMismatch
        case NvmlCode.NOT_SUPPORTED | NvmlCode.FUNCTION_NOT_FOUND:
            kind = NvmlNotSupported
        case NvmlCode.GPU_IS_LOST | NvmlCode.GPU_NOT_FOUND | NvmlCode.NOT_FOUND:
            kind = NvmlGpuLost
        case _:
            kind = NvmlError
    return kind(code, call, detail)


# Drivers from which a cgroup's memory on a GPU can be limited (nvmlDeviceSetMemoryLimits_v1, CUDA 13.4).
FIRST_WITH_MEMORY_LIMITS = 615


# Parts of a GPU whose activity may be read: time with work, multiprocessors, tensor cores, memory bandwidth.
ACTIVITY = ("engine", "sm", "tensor", "memory")


class EventKind(Enum):
    """Kinds of NVML events that the agent listens to."""

    XID = "xid"
    ECC_SINGLE = "ecc_single"  # corrected
    ECC_DOUBLE = "ecc_double"  # uncorrected


@dataclass(frozen=True, slots=True)
class NvmlEvent:
    """One event; `data` is the Xid number for XID, 0 else."""

    uuid: str
    kind: EventKind
    data: int = 0
    instance: tuple[int, int] | None = None  # GPU and compute instance that it concerns alone, by number


@dataclass(frozen=True, slots=True)
class Probe:
    """The reading of a health probe of one GPU; None: the GPU has no such counter."""

    memory_used_bytes: int
    ecc_uncorrected: int | None  # volatile, since the driver was loaded
    remap_pending: bool | None  # row remapping waits for a reset
    remap_failed: bool | None
    retirement_pending: bool | None  # page retirement (before Ampere) waits for a reboot
    action: RecoveryAction | None = None  # what the driver itself asks for; None: not reported


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has a GPU open. `pid` is the host's only where the agent is in its PID namespace."""

    pid: int
    memory_bytes: int | None  # None: not reported by the driver
    mps: bool = False  # a client of an MPS server


@dataclass(frozen=True, slots=True)
class Traffic:
    """NVLink of a GPU, all links together, since the driver was loaded."""

    sent_bytes: int
    received_bytes: int
    errors: Mapping[str, int] = field(default_factory=dict)  # by kind: crc_flit, crc_data, replay, recovery


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the moving figures of a GPU; None: not offered by this GPU."""

    gpu_utilization_ratio: float | None
    memory_utilization_ratio: float | None
    memory_used_bytes: int
    memory_total_bytes: int
    power_watts: float | None
    temperature_celsius: float | None
    power_limit_watts: float | None = None
    energy_joules: float | None = None  # since the driver was loaded
    clocks_mhz: Mapping[str, int] = field(default_factory=dict)  # graphics, sm, memory, video
    throttle: int | None = None  # bits of `nvmlClocksEventReasons`
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    nvlink: Traffic | None = None
    pcie_bytes_per_second: tuple[float, float] | None = None  # sent, received
    # 0..1 since the reading before, by the names in ACTIVITY.
    activity: Mapping[str, float] | None = None
    processes: tuple[GpuProcess, ...] | None = None
    # (pid, 0..1): mean use of the GPU's multiprocessors over the driver's samples after `since_us`.
    # Processes that did nothing are left out. None: the GPU has no such figures.
    busy: tuple[tuple[int, float], ...] | None = None
    newest_us: int = 0  # time stamp of the newest of those samples; 0: there is none
    busy_us: tuple[tuple[int, ...], ...] = ()  # by entry of `busy`: its samples' time stamps, ascending


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The content of a reading. Processes' work counts after `since_us` and up to `until_us`, since 1970."""

    since_us: int
    pcie: bool = False  # throughput; each reading blocks for 40 ms
    activity: bool = False  # of SMs, tensor cores and memory
    # Also what moves slowly: power limit, energy, ECC and NVLink counters, which are half of the calls' time.
    counters: bool = True
    # A clock that was set back leaves samples of the driver that lie in the future: they are old ones.
    until_us: int = sys.maxsize


class PcieLevel(IntEnum):
    """Closest common ancestor of two GPUs (`nvmlGpuTopologyLevel_t`); smaller is closer."""

    INTERNAL = 0  # two GPUs on one board
    SINGLE_SWITCH = 10  # PIX
    MULTIPLE_SWITCHES = 20  # PXB
    HOST_BRIDGE = 30  # PHB
    NUMA_NODE = 40  # NODE
    SYSTEM = 50  # SYS


class LinkPeer(Enum):
    """The device at the far end of an NVLink (`nvmlIntNvLinkDeviceType_t`)."""

    GPU = "gpu"
    SWITCH = "switch"
    OTHER = "other"


class ComputeMode(IntEnum):
    """Who may open a GPU (`nvmlComputeMode_t`); only processes started after a change heed it."""

    DEFAULT = 0  # any number of processes
    EXCLUSIVE_THREAD = 1  # long gone
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3  # one process, such as an MPS server


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink of a GPU. `remote_bus_id` is in sysfs form."""

    peer: LinkPeer
    remote_bus_id: str


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A kind of instance that a GPU in MIG mode can have."""

    number: int  # the driver's
    name: str  # as NVIDIA writes it: "1g.18gb"
    slices: int  # of compute
    size: int  # slices of memory, of which `starts` are numbers
    starts: tuple[int, ...]  # where one may begin
    most: int  # how many a GPU has room for


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance, with all its compute instances or with none."""

    number: int
    profile: int  # by number
    start: int
    size: int
    computes: tuple[int, ...]  # numbers of its compute instances; none: half made, and nobody can have it
    whole: bool  # whether one compute instance takes all of it


@dataclass(frozen=True, slots=True)
class Partition:
    """A GPU in MIG mode as its administrator sees it, in one reading."""

    profiles: tuple[MigProfile, ...]
    instances: tuple[GpuInstance, ...]
    devices: tuple[Instance, ...]  # what containers can have of them

    def uuids_of(self, instance: GpuInstance) -> list[str]:
        """The UUIDs by which containers have an instance: one for each of its compute instances."""
        return [each.uuid for each in self.devices if each.gpu_instance == instance.number]

    def uuid_of(self, instance: GpuInstance) -> str:
        """The only one of them; empty: there is none, or it is divided."""
        uuids = self.uuids_of(instance)
        return uuids[0] if len(uuids) == 1 else ""


class NvmlPort(Protocol):
    """NVML as the agent needs it. See the module's text for the rules."""

    def open(self) -> Driver:
        """Load the library and initialise it. Raises NvmlLibraryMissing, NvmlDriverMismatch."""

    def close(self) -> None:
        """Free the event set and shut the library down, so that the kernel module can be unloaded."""

    def count(self) -> int:
        """How many GPUs the driver enumerates, lost ones included."""

    def describe(self, index: int) -> Gpu:
        """Identity of the GPU at an enumeration index. Raises NvmlGpuLost and others for a sick GPU."""

    def probe(self, uuid: str) -> Probe:
        """Read the health counters of a GPU through a fresh handle."""

    def sample(self, uuid: str, request: SampleRequest | None = None) -> Sample:
        """Read the moving figures; parts that the GPU does not offer come as None.

        Without `request` the work of processes is that of the last second.
        """

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """The processes that have a GPU open, whatever else cannot be read; None: it has no such list."""

    def ancestor(self, uuid_a: str, uuid_b: str) -> PcieLevel:
        """Closest common PCIe ancestor of two GPUs."""

    def links(self, uuid: str) -> tuple[NvLink, ...]:
        """Active NVLinks of a GPU, in link order; empty where it has none."""

    def watch(self, uuid: str) -> frozenset[EventKind]:
        """Register a GPU in the event set (made on first use); answers the kinds it supports.

        Raises NvmlNotSupported where the GPU supports none. Registering twice is the caller's fault.
        """

    def unwatch_all(self) -> None:
        """Drop the event set, so that GPUs can be registered again. Never while `wait` is under way."""

    def wait(self, timeout_ms: int) -> NvmlEvent | None:
        """Block until an event comes or the time is over (None)."""

    def compute_mode(self, uuid: str) -> ComputeMode:
        """Who may open a GPU. Raises NvmlNotSupported."""

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Say who may open a GPU from now on; needs root, and is lost at a reboot.

        Raises NvmlNotSupported, NvmlError with NO_PERMISSION.
        """

    def instance_memory(self, instance: str) -> int:
        """Bytes in use of an instance, by its UUID. Raises NvmlError: it is not there."""

    def partition(self, uuid: str) -> Partition:
        """Profiles, places and instances of a GPU in MIG mode. Needs root.

        Raises NvmlNotSupported: the GPU is not in MIG mode, or the driver is too old.
        """

    def make_instance(self, uuid: str, profile: MigProfile, start: int) -> int:
        """Make an instance whole, or not at all, and answer its number. Needs root.

        Raises NvmlError, with INSUFFICIENT_RESOURCES where it has no room; NvmlLeftOver: a part is left.
        """

    def destroy_instance(self, uuid: str, expected: GpuInstance, device: str) -> None:
        """Destroy an instance with its compute instances. Needs root.

        `device`: the UUID by which containers have it; empty: they cannot. Raises NvmlError with IN_USE while
        a process is on it, with NOT_FOUND where another one has its number; nothing is destroyed then.
        """

    def set_mig_mode(self, uuid: str, enabled: bool) -> None:
        """Switch MIG mode, by a reset where one is needed. Needs root.

        Raises NvmlError: it is as it was, and stays so at the next reset.
        """

    def memory_limit(self, uuid: str, cgroup: Path) -> int | None:
        """The driver's limit of GPU memory for a cgroup's processes, in bytes; None: it has no limit there.

        `cgroup` is the folder of a cgroup v2. Raises NvmlNotSupported: drivers before
        FIRST_WITH_MEMORY_LIMITS, GPUs in MIG mode.
        """

    def set_memory_limit(self, uuid: str, cgroup: Path, limit_bytes: int) -> None:
        """Limit what a cgroup's processes may have of a GPU; nothing is reserved for them. Needs root.

        Raises NvmlNotSupported as `memory_limit` does, NvmlError with NO_PERMISSION.
        """
