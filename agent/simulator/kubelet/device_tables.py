"""Devices as the kubelet knows them: the tables of its device manager, without any I/O.

Facts: kubelet 1.36, `pkg/kubelet/cm/devicemanager/manager.go` and `pod_devices.go`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agent._proto.v1beta1 import ContainerAllocateResponse, Device, DevicePluginOptions

NO_NUMA = -1  # devices that name no NUMA node stand under this number
HEALTHY = "Healthy"


class CallFailed(Exception):
    """A call to a plugin failed; the text is grpc-go's."""


@dataclass(slots=True)
class Allocation:
    """The devices of one resource of one container, by NUMA node, and what the plugin answered for them."""

    by_numa: Mapping[int, tuple[str, ...]]
    response: ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        """All device IDs."""
        return frozenset(device for devices in self.by_numa.values() for device in devices)


class PodDevices:
    """Who holds what: pod UID -> container -> resource -> allocation."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, dict[str, Allocation]]] = {}

    def insert(self, uid: str, container: str, resource: str, allocation: Allocation) -> None:
        self._pods.setdefault(uid, {}).setdefault(container, {})[resource] = allocation

    def of_container(self, uid: str, container: str) -> Mapping[str, Allocation]:
        """Allocations of a container by resource; empty if it holds none."""
        return self._pods.get(uid, {}).get(container, {})

    def keep_only(self, uids: Collection[str]) -> bool:
        """Forget all other pods; whether there was one."""
        gone = [uid for uid in self._pods if uid not in uids]
        for uid in gone:
            del self._pods[uid]
        return bool(gone)

    def entries(self) -> Iterator[tuple[str, str, str, Allocation]]:
        """Pod UID, container, resource, allocation."""
        for uid, containers in self._pods.items():
            for container, resources in containers.items():
                for resource, allocation in resources.items():
                    yield uid, container, resource, allocation

    def in_use(self) -> dict[str, set[str]]:
        """Held IDs by resource."""
        held: dict[str, set[str]] = {}
        for _, _, resource, allocation in self.entries():
            held.setdefault(resource, set()).update(allocation.ids)
        return held


class PluginCalls(Protocol):
    """The kubelet's calls of a registered plugin. Each raises CallFailed."""

    async def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """GetPreferredAllocation for one container."""

    async def allocate(self, ids: list[str]) -> list[ContainerAllocateResponse]:
        """Allocate for one container."""

    async def pre_start(self, ids: list[str]) -> None:
        """PreStartContainer."""


@dataclass(slots=True)
class Endpoint:
    """The plugin of a resource as the device manager sees it."""

    resource: str
    calls: PluginCalls | None  # None: known from the checkpoint only
    options: DevicePluginOptions
    stopped_at: float | None = None


@dataclass
class Tables:
    """Devices and endpoints by resource name."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    all: dict[str, dict[str, Device]] = field(default_factory=dict)
    healthy: dict[str, set[str]] = field(default_factory=dict)
    unhealthy: dict[str, set[str]] = field(default_factory=dict)
    allocated: dict[str, set[str]] = field(default_factory=dict)
    pods: PodDevices = field(default_factory=PodDevices)

    def knows(self, resource: str) -> bool:
        """Whether a plugin offers, or offered, this resource."""
        return resource in self.healthy or resource in self.allocated

    def waits_for_a_list(self) -> bool:
        """Whether a plugin is connected whose first list has not come yet."""
        return any(
            each.stopped_at is None and each.resource not in self.all for each in self.endpoints.values()
        )

    def replace_list(self, resource: str, devices: Collection[Device]) -> None:
        """A list message: it replaces all that was known."""
        self.all[resource] = {device.id: device for device in devices}
        self.healthy[resource] = {device.id for device in devices if device.health == HEALTHY}
        self.unhealthy[resource] = {device.id for device in devices if device.health != HEALTHY}

    def plugin_gone(self, resource: str, now: float) -> None:
        """The plugin's connection ended: all its devices are unhealthy at once, none is forgotten yet."""
        if endpoint := self.endpoints.get(resource):
            healthy = self.healthy.get(resource, set())
            self.unhealthy.setdefault(resource, set()).update(healthy)
            self.healthy[resource] = set()
            endpoint.stopped_at = now

    def capacity(self, now: float, grace: float) -> tuple[dict[str, int], dict[str, int], set[str]]:
        """Capacity, allocatable, and the resources whose endpoint is dropped now, its grace being over."""
        dropped = {r for r in (*self.healthy, *self.unhealthy) if self._expired(r, now, grace)}
        for resource in dropped:
            self.endpoints.pop(resource, None)
            self.healthy.pop(resource, None)
            self.unhealthy.pop(resource, None)
        allocatable = {resource: len(ids) for resource, ids in self.healthy.items()}
        capacity = {r: n + len(self.unhealthy.get(r, ())) for r, n in allocatable.items()}
        return capacity, allocatable, dropped

    def _expired(self, resource: str, now: float, grace: float) -> bool:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return True
        return endpoint.stopped_at is not None and now - endpoint.stopped_at > grace

    def free_inactive(self, active: Collection[str]) -> None:
        """Free what pods hold that are not active any more. Nothing else ever frees a device."""
        if self.pods.keep_only(active):
            self.allocated = self.pods.in_use()

    def numa_of(self, resource: str, device: str) -> tuple[int, ...]:
        """NUMA nodes of a listed device. Raises KeyError for one that has left the list."""
        topology = self.all[resource][device].topology
        return tuple(node.id for node in topology.nodes) if topology and topology.nodes else (NO_NUMA,)
