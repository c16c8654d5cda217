"""Claims of DRA: what they ask for, what is allocated to them, and how a device of ours is named."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.model.pod import Metadata

# Devices of DRA as they are named: in slices, in claims, in the kubelet's records. Pure.
#
# Each GPU is two devices that exclude each other: all of it, or shares of it behind its MPS daemon. The names
# of a share's CDI devices say how much of the GPU it is.

DRIVER = "gpu-node-agent.io"
SHARE_KIND = "gpu-node-agent.io/share"  # of the agent's own CDI specification
WORDS = {WHOLE_GPUS: "whole", SHARES: "mps"}
_MODES = {word: mode for mode, word in WORDS.items()}
_PREFIX = "gpu-"
_DAEMON, _CORES, _MEMORY, _VISIBLE = "mps-", "mps-core-", "mps-memory-", "visible-"
LOW_PRIORITY = "mps-priority-low"


@dataclass(frozen=True, slots=True)
class ClaimedShare:
    """A device that a claim has; one of a whole GPU has no amounts."""

    gpu: str  # UUID
    mode: Mode
    cores: int = 0  # hundredths of the GPU
    memory: int = 0  # GiB
    claim: str = ""  # its name
    share_id: str = ""
    low_priority: bool = False  # its kernels give way to those of other shares


def pool_of(node: str) -> str:
    """Not the node's name alone: schedulers of before 1.36.5 keep counters by the name of a pool."""
    return f"{DRIVER}/{node}"


def device_name(uuid: str, mode: Mode) -> str:
    return f"{uuid.lower()}-{WORDS[mode]}"


def parse_device(name: str) -> tuple[str, Mode] | None:
    """The GPU's UUID, in lower case, and the mode of a device; None: it is none of ours."""
    gpu, _, word = name.rpartition("-")
    if not gpu.startswith(_PREFIX) or word not in _MODES:
        return None
    return gpu, _MODES[word]


def daemon(uuid: str) -> str:
    return f"{_DAEMON}{uuid}"


def core(number: int) -> str:
    return f"{_CORES}{number}"


def memory(number: int) -> str:
    return f"{_MEMORY}{number}"


def visible(uuid: str) -> str:
    """The GPU by a variable, where it has no CDI device: simulated ones."""
    return f"{_VISIBLE}{uuid}"


def share_of(name: str, cdi: Sequence[str], claim: str = "", share_id: str = "") -> ClaimedShare | None:
    """A device by the kubelet's records; None: it is none of ours.

    The kubelet lists the CDI names of a claim's earlier devices with those of a later one: the last counts.
    """
    parsed = parse_device(name)
    if parsed is None:
        return None
    lower, mode = parsed
    uuid = f"GPU-{lower.removeprefix(_PREFIX)}"
    cores = gib = 0
    low = False
    for text in cdi:
        _, _, device = text.partition("=")
        for prefix in (_DAEMON, _VISIBLE, ""):
            found = device.removeprefix(prefix)
            if found.lower() == lower:
                uuid = found
        low = low or device == LOW_PRIORITY
        if device.startswith(_CORES):
            cores = _number(device.removeprefix(_CORES))
        elif device.startswith(_MEMORY):
            gib = _number(device.removeprefix(_MEMORY))
    return ClaimedShare(uuid, mode, cores, gib, claim, share_id, low)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# A ResourceClaim as the API server shows it, and the devices of this agent that one has.

GROUP: Final = "resource.k8s.io/v1"


class DeviceResult(msgspec.Struct, rename="camel", frozen=True):
    """A device that is allocated to a request of a claim."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    share_id: str = msgspec.field(default="", name="shareID")
    consumed_capacity: dict[str, str] = msgspec.field(default_factory=dict)
    admin_access: bool | None = None


class OpaqueConfiguration(msgspec.Struct, frozen=True):
    driver: str = ""
    parameters: Any = None


class DeviceConfiguration(msgspec.Struct, frozen=True):
    """Of a class or of a claim. No requests: it is of all."""

    requests: list[str] = msgspec.field(default_factory=list)
    opaque: OpaqueConfiguration | None = None


class AllocatedDevices(msgspec.Struct, frozen=True):
    results: list[DeviceResult] = msgspec.field(default_factory=list)
    config: list[DeviceConfiguration] = msgspec.field(default_factory=list)


class ClaimAllocation(msgspec.Struct, frozen=True):
    devices: AllocatedDevices = AllocatedDevices()


class Consumer(msgspec.Struct, rename="camel", frozen=True):
    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimDeviceStatus(msgspec.Struct, frozen=True):
    """A driver's report on a device, as far as it is asked for."""

    driver: str = ""


class ClaimStatus(msgspec.Struct, rename="camel", frozen=True):
    allocation: ClaimAllocation | None = None
    reserved_for: list[Consumer] = msgspec.field(default_factory=list)
    devices: list[ClaimDeviceStatus] = msgspec.field(default_factory=list)


class ResourceClaim(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: ClaimStatus = ClaimStatus()

    @property
    def owned(self) -> bool:
        """Whether it was made for one pod, as from a template, and no other uses it now."""
        users = {each.uid for each in self.status.reserved_for}
        return any(each.kind == "Pod" and users <= {each.uid} for each in self.metadata.owner_references)

    @property
    def told(self) -> bool:
        """Whether its status says something of a device of ours."""
        return any(each.driver == DRIVER for each in self.status.devices)


@dataclass(frozen=True, slots=True)
class AskedDevice:
    """A device that a claim has got of us, and for which of its requests."""

    request: str
    pool: str
    device: str
    share: ClaimedShare


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim with devices of ours. `devices`: in order of the claim."""

    uid: str
    namespace: str
    name: str
    devices: tuple[AskedDevice, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(each.share.gpu for each in self.devices)

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"
