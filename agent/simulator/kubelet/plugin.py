"""The kubelet's end of one device plugin: its connection, its calls, its stream of lists."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from grpclib.const import Cardinality

from agent._proto import v1beta1

from .device_tables import CallFailed
from .grpc_peer import CALL_FAILURES, UnixChannel, go_error
from .timings import Timings


@contextmanager
def translated() -> Iterator[None]:
    """Turns what a call can end with into CallFailed."""
    try:
        yield
    except CALL_FAILURES as error:
        raise CallFailed(go_error(error)) from error


class PluginClient:
    """One connection to one plugin. The device manager knows it by its resource name only."""

    def __init__(self, resource: str, socket: Path, timings: Timings) -> None:
        self.resource = resource
        self.socket = socket
        self._timings = timings
        self._channel = UnixChannel(socket)
        self._stub = v1beta1.DevicePluginStub(self._channel)

    async def connect(self) -> v1beta1.DevicePluginOptions:
        """Dial and ask for the options, which is the first call a plugin gets. Raises CallFailed."""
        deadline = anyio.current_time() + self._timings.dial
        try:
            await self._channel.dial(self._timings.dial)
        except CALL_FAILURES as error:  # GRPCError: the kubelet stops meanwhile
            raise CallFailed(f"failed to dial device plugin: {error}") from error
        with translated():
            return await self._stub.get_device_plugin_options(timeout=deadline - anyio.current_time())

    async def run(self, on_list: Callable[[str, list[v1beta1.Device]], None]) -> str:
        """Follow ListAndWatch, without a deadline, until it ends; why it did, in grpc-go's words."""
        path, kind, reply = "/v1beta1.DevicePlugin/ListAndWatch", v1beta1.Empty, v1beta1.ListAndWatchResponse
        try:
            async with self._channel.request(path, Cardinality.UNARY_STREAM, kind, reply) as stream:
                await stream.send_message(kind(), end=True)
                async for message in stream:
                    on_list(self.resource, message.devices)
        except CALL_FAILURES as error:
            return go_error(error)
        return "EOF"

    def close(self) -> None:
        """Drop the connection; the plugin sees its streams cancelled."""
        self._channel.close()

    async def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """GetPreferredAllocation for one container; no deadline, as in the kubelet. Raises CallFailed."""
        request = v1beta1.ContainerPreferredAllocationRequest(
            available_device_ids=available, must_include_device_ids=must_include, allocation_size=size
        )
        with translated():
            answer = await self._stub.get_preferred_allocation(
                v1beta1.PreferredAllocationRequest(container_requests=[request])
            )
        return answer.container_responses[0].device_ids if answer.container_responses else []

    async def allocate(self, ids: list[str]) -> list[v1beta1.ContainerAllocateResponse]:
        """Allocate for one container; no deadline, as in the kubelet. Raises CallFailed."""
        request = v1beta1.ContainerAllocateRequest(devices_ids=ids)
        with translated():
            answer = await self._stub.allocate(v1beta1.AllocateRequest(container_requests=[request]))
        return answer.container_responses

    async def pre_start(self, ids: list[str]) -> None:
        """PreStartContainer, within 30 s. Raises CallFailed."""
        with translated():
            await self._stub.pre_start_container(
                v1beta1.PreStartContainerRequest(devices_ids=ids), timeout=self._timings.pre_start
            )
