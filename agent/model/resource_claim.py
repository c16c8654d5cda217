"""A ResourceClaim as the API server shows it, and the devices of this agent that one has."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agent.model.claim_device import DRIVER, ClaimedShare
from agent.model.pod import Metadata

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


class ListMetadata(msgspec.Struct, frozen=True):
    next_page: str = msgspec.field(default="", name="continue")


class ClaimList(msgspec.Struct):
    """A page of claims."""

    metadata: ListMetadata = ListMetadata()
    items: list[ResourceClaim] = msgspec.field(default_factory=list)


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
