"""A small device plugin on C-core grpcio, scripted by tests: the embedded kubelet's independent peer."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from tests.component import protos
from tests.pace import scaled

V1BETA1 = protos.load("deviceplugin")
REGISTRY = protos.load("registration")
PODS = protos.load("podresources")
GPU = "nvidia.com/gpu"


@dataclass
class Call:
    """One call that the kubelet made."""

    method: str
    ids: tuple[str, ...] = ()
    must_include: tuple[str, ...] = ()
    size: int = 0
    authority: str = ""
    remaining: float | None = None  # seconds of deadline; None: no deadline


@dataclass
class Plugin:
    """A plugin of one resource on a socket of its own. Every hook may be replaced."""

    socket: Path
    resource: str = GPU
    devices: Mapping[str, bool] = field(default_factory=dict)  # ID -> healthy
    numa: Mapping[str, Sequence[int]] = field(default_factory=dict)
    preferred: Callable[[Call], Sequence[str]] | None = None
    pre_start: Callable[[Call], None] | None = None
    answer: Callable[[Call], Mapping[str, Any]] = lambda call: {"envs": {"HELD": ",".join(sorted(call.ids))}}
    before_answer: Callable[[], None] = lambda: None
    count: int = 1  # container responses per Allocate
    version: str = "v1beta1"
    plugin_type: str = "DevicePlugin"
    info_delay: threading.Event | None = None
    calls: list[Call] = field(default_factory=list)
    statuses: list[tuple[bool, str]] = field(default_factory=list)
    streams: int = 0  # open ListAndWatch streams
    _lists: list["queue.Queue[Any]"] = field(default_factory=list)
    _server: Any = None

    def named(self, method: str) -> list[Call]:
        """The calls of one method so far."""
        return [call for call in self.calls if call.method == method]

    def publish(self, devices: Mapping[str, bool]) -> None:
        """Send a new list on all open streams."""
        self.devices = devices
        for stream in tuple(self._lists):
            stream.put(self._list())

    def publish_raw(self, message: Any) -> None:
        """Send any list message."""
        for stream in tuple(self._lists):
            stream.put(message)

    def end_streams(self) -> None:
        """Return from all open ListAndWatch handlers."""
        for stream in tuple(self._lists):
            stream.put(None)

    def _list(self) -> Any:
        message = V1BETA1.ListAndWatchResponse()
        for device, healthy in self.devices.items():
            added = message.devices.add(ID=device, health="Healthy" if healthy else "Unhealthy")
            for node in self.numa.get(device, ()):
                added.topology.nodes.add(ID=node)
        return message

    def _record(self, method: str, context: Any, **more: Any) -> Call:
        remaining = context.time_remaining()
        call = Call(method, **more, remaining=None if remaining is None or remaining > 1e6 else remaining)
        self.calls.append(call)
        return call

    # v1beta1.DevicePlugin

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._record("GetDevicePluginOptions", context)
        return V1BETA1.DevicePluginOptions(
            pre_start_required=self.pre_start is not None,
            get_preferred_allocation_available=self.preferred is not None,
        )

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._record("ListAndWatch", context)
        mine: queue.Queue[Any] = queue.Queue()
        context.add_callback(lambda: mine.put(None))
        mine.put(self._list())
        self._lists.append(mine)
        self.streams += 1
        try:
            while (message := mine.get()) is not None:
                yield message
        finally:
            self._lists.remove(mine)
            self.streams -= 1

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        (one,) = request.container_requests
        call = self._record(
            "GetPreferredAllocation",
            context,
            ids=tuple(one.available_device_ids),
            must_include=tuple(one.must_include_device_ids),
            size=one.allocation_size,
        )
        assert self.preferred is not None
        answer = V1BETA1.PreferredAllocationResponse()
        answer.container_responses.add(device_ids=self.preferred(call))
        return answer

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        (one,) = request.container_requests
        call = self._record("Allocate", context, ids=tuple(one.devices_ids))
        self.before_answer()
        answer = V1BETA1.AllocateResponse()
        for _ in range(self.count):
            answer.container_responses.add(**self.answer(call))
        return answer

    def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        call = self._record("PreStartContainer", context, ids=tuple(request.devices_ids))
        assert self.pre_start is not None
        self.pre_start(call)
        return V1BETA1.PreStartContainerResponse()

    # pluginregistration.Registration

    def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._record("GetInfo", context)
        if self.info_delay is not None:
            self.info_delay.wait(10)
        return REGISTRY.PluginInfo(
            type=self.plugin_type, name=self.resource, supported_versions=[self.version]
        )

    def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._record("NotifyRegistrationStatus", context)
        self.statuses.append((request.plugin_registered, request.error))
        return REGISTRY.RegistrationStatusResponse()

    # its life

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve until the context ends; the socket goes with it."""
        self._server = server = grpc.server(ThreadPoolExecutor(16))
        V1BETA1.add_DevicePluginServicer_to_server(self, server)
        REGISTRY.add_RegistrationServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self.socket}")
        server.start()
        try:
            yield self
        finally:
            self.end_streams()
            server.stop(0.2).wait()
            self.socket.unlink(missing_ok=True)


def register(kubelet_socket: Path, endpoint: str, resource: str = GPU, version: str = "v1beta1") -> None:
    """Call Register on `kubelet.sock`. Blocks. Raises grpc.RpcError."""
    with dial(kubelet_socket) as channel:
        request = V1BETA1.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
        V1BETA1.RegistrationStub(channel).Register(request, timeout=scaled(10), wait_for_ready=True)


class PodResources:
    """A client of the PodResources socket. Its methods block."""

    def __init__(self, channel: Any) -> None:
        self._stub = PODS.PodResourcesListerStub(channel)

    def held(self) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """(pod, container) -> (resource, ID) of each entry of List."""
        answer = self._stub.List(PODS.ListPodResourcesRequest(), timeout=scaled(5))
        return {
            (pod.name, container.name): [
                (entry.resource_name, one) for entry in container.devices for one in entry.device_ids
            ]
            for pod in answer.pod_resources
            for container in pod.containers
        }

    def get(self, name: str, namespace: str = "default") -> Any:
        """Get."""
        request = PODS.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace)
        return self._stub.Get(request, timeout=scaled(5)).pod_resources

    def allocatable(self) -> list[tuple[str, str]]:
        """(resource, ID) of GetAllocatableResources."""
        answer = self._stub.GetAllocatableResources(PODS.AllocatableResourcesRequest(), timeout=scaled(5))
        return [(entry.resource_name, one) for entry in answer.devices for one in entry.device_ids]


def dial(socket: Path) -> Any:
    """A channel to a socket, which shares no connection with others to the same address.

    gRPC's C core hands what is left of a closed channel to the next one, which gets the refusal of before
    with it, though somebody listens by now.
    """
    return grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def pod_resources(socket: Path) -> Iterator[PodResources]:
    """A client on its own connection."""
    with dial(socket) as channel:
        yield PodResources(channel)
