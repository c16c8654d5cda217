"""Messages to the inventory actor. `at` is always seconds since boot (`boot_seconds`)."""

from dataclasses import dataclass

from agent.inventory.snapshot import HealthRecord, KernelXid, Unreadable
from agent.model.gpu import Driver, Gpu
from agent.model.health import Fault
from agent.model.recovery_action import RecoveryAction
from agent.model.topology import Topology


@dataclass(frozen=True, slots=True)
class Probed:
    """How the probe of one GPU went: `fault` None means that it answered."""

    uuid: str
    fault: Fault | None = None
    detail: str = ""  # the failure in words
    ecc_risen: bool = False  # uncorrectable errors more than at the probe before
    was_reset: bool = False  # volatile counters less than at the probe before
    obstacle: str = ""  # what waits for a reset (row remap, page retirement)
    remap_failed: bool = False
    action: RecoveryAction | None = None  # what the driver asks for; None: not reported


@dataclass(frozen=True, slots=True)
class Scanned:
    """A scan of all enumeration indices succeeded; some of them may have been unreadable."""

    driver: Driver
    gpus: tuple[Gpu, ...]
    unreadable: tuple[Unreadable, ...] = ()
    probes: tuple[Probed, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unavailable:
    """NVML as a whole cannot be used; `problem` says why and what helps."""

    problem: str
    released_until: float | None = None
    at: float = 0.0
    let_go: str | None = None  # of a release: empty once NVML is closed, else why it cannot be


@dataclass(frozen=True, slots=True)
class Accused:
    """Something happened to a GPU: an Xid, an ECC event."""

    uuid: str
    fault: Fault
    at: float
    instance: tuple[int, int] | None = None  # GPU and compute instance that it concerns alone


@dataclass(frozen=True, slots=True)
class KernelXidSeen:
    """An Xid in the kernel log of a GPU that NVML sends no events for."""

    xid: KernelXid
    at: float


@dataclass(frozen=True, slots=True)
class XidExplained:
    """The log line of an Xid that NVML reports by its number alone."""

    xid: KernelXid
    at: float


@dataclass(frozen=True, slots=True)
class Restored:
    """Remains of earlier runs: verdicts, and Xids that fell while no agent listened."""

    records: tuple[HealthRecord, ...]
    kernel_xids: tuple[KernelXid, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """A person declares a GPU healthy."""

    uuid: str
    at: float


@dataclass(frozen=True, slots=True)
class Removed:
    """A person says that a GPU which the driver no longer lists was taken out of the machine."""

    uuid: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The links between the GPUs were read again."""

    topology: Topology


Message = (
    Scanned | Unavailable | Accused | KernelXidSeen | XidExplained | Restored | Cleared | Removed | Connected
)
