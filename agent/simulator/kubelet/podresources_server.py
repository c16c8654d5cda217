"""PodResources v1: who holds which device, as the kubelet shows exporters and agents.

Facts: kubelet 1.36, `pkg/kubelet/apis/podresources`. Before 1.34 List names finished pods, too, but without
devices, as their end has freed them.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent._proto import v1

from .api_server import Pod
from .claims import ClaimManager
from .device_tables import NO_NUMA, Allocation
from .devices import DeviceManager
from .pod_specs import ContainerSpec

RATE, BURST = 100.0, 10.0  # calls a second, shared by all who use the socket


class _TokenBucket:
    """golang.org/x/time/rate as the kubelet uses it: a call without a token is refused, never queued."""

    def __init__(self) -> None:
        self._tokens = BURST
        self._filled_at = time.monotonic()

    def take(self) -> None:
        """Raises GRPCError RESOURCE_EXHAUSTED."""
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled_at) * RATE)
        self._filled_at = now
        if self._tokens < 1:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1


class PodResourcesServer(v1.PodResourcesListerBase):
    """Answers from the tables; takes no lock, so that it can be asked from inside an Allocate."""

    def __init__(
        self,
        devices: DeviceManager,
        claims: ClaimManager,
        pods: Callable[[], list[Pod]],
        lists_finished_pods: bool,
    ) -> None:
        self._devices = devices
        self._claims = claims
        self._pods = pods
        self._lists_finished = lists_finished_pods
        self._bucket = _TokenBucket()

    async def list(
        self,
        message: v1.ListPodResourcesRequest,  # noqa: ARG002  the service's signature
    ) -> v1.ListPodResourcesResponse:
        """All pods that the kubelet has taken up, with the devices of their containers."""
        self._bucket.take()
        pods = self._listed()
        self._devices.free_inactive()
        return v1.ListPodResourcesResponse(pod_resources=[self._of(pod) for pod in pods])

    async def get(self, message: v1.GetPodResourcesRequest) -> v1.GetPodResourcesResponse:
        """One pod, by the rule that List has for finished ones."""
        self._bucket.take()
        for pod in self._listed():
            if pod.spec.key == (message.pod_namespace, message.pod_name):
                return v1.GetPodResourcesResponse(pod_resources=self._of(pod))
        text = f"pod {message.pod_name} in namespace {message.pod_namespace} not found"
        raise GRPCError(Status.UNKNOWN, text)

    async def get_allocatable_resources(
        self,
        message: v1.AllocatableResourcesRequest,  # noqa: ARG002  the service's signature
    ) -> v1.AllocatableResourcesResponse:
        """All healthy devices, free or not."""
        self._bucket.take()
        tables = self._devices.tables
        return v1.AllocatableResourcesResponse(
            devices=[
                entry
                for resource, ids in tables.healthy.items()
                for device in sorted(ids)
                for entry in _entries(resource, dict.fromkeys(tables.numa_of(resource, device), (device,)))
            ]
        )

    def _listed(self) -> Sequence[Pod]:
        return [pod for pod in self._pods() if self._lists_finished or not pod.phase.finished]

    def _of(self, pod: Pod) -> v1.PodResources:
        sidecars = [container for container in pod.spec.init_containers if container.restartable]
        return v1.PodResources(
            name=pod.spec.name,
            namespace=pod.spec.namespace,
            containers=[self._container(pod, each) for each in (*sidecars, *pod.spec.containers)],
        )

    def _container(self, pod: Pod, container: ContainerSpec) -> v1.ContainerResources:
        held: Mapping[str, Allocation] = self._devices.tables.pods.of_container(pod.uid, container.name)
        return v1.ContainerResources(
            name=container.name,
            devices=[entry for r, allocation in held.items() for entry in _entries(r, allocation.by_numa)],
            dynamic_resources=self._claims.dynamic_resources(pod, container),
        )


def _entries(resource: str, by_numa: Mapping[int, tuple[str, ...]]) -> list[v1.ContainerDevices]:
    """One entry per device, and per NUMA node where a device has several."""
    return [
        v1.ContainerDevices(
            resource_name=resource,
            device_ids=[device],
            topology=None if numa == NO_NUMA else v1.TopologyInfo(nodes=[v1.NumaNode(id=numa)]),
        )
        for numa, devices in by_numa.items()
        for device in devices
    ]
