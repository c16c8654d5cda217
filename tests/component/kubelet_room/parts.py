"""A scripted plugin, and a C-core grpcio client that plays the kubelet: independent of grpclib."""

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
import grpc

from agent.kit.tasks import Cell
from agent.kubelet import wire
from agent.kubelet.grpc_server import DrainableServer
from agent.kubelet.service import DevicePluginService
from agent.kubelet.wire import Allocation, PreferenceRequest
from agent.model.holding import Record
from agent.model.modes import Assignment
from tests.component import protos
from tests.pace import scaled

V1BETA1 = protos.load("deviceplugin")
REGISTRY = protos.load("registration")
GPU = "nvidia.com/gpu"


def listing(*ids: str) -> bytes:
    """An encoded list of healthy devices."""
    return b"".join(wire.device(one, True, None) for one in ids)


class ScriptedPlugin:
    """A plugin whose answers a test decides."""

    def __init__(self, *ids: str, resource: str = GPU) -> None:
        self.resource = resource
        self.offers_preference = True
        self.needs_pre_start = False
        self.lists: Cell[bytes] = Cell(listing(*ids))
        self.on_allocate: Callable[[Sequence[str]], Awaitable[Allocation]] = self._grant
        self.on_prefer: Callable[[PreferenceRequest], Awaitable[Sequence[str]]] = self._first
        self.on_pre_start: Callable[[Sequence[str]], Awaitable[None]] = self._nothing
        self.allocated: list[tuple[str, ...]] = []

    async def run(self) -> None:
        await anyio.sleep_forever()

    def refresh(self) -> None:
        """The list is always what a test published last."""

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        return 0, 0

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        granted = await self.on_allocate(ids)
        self.allocated.append(tuple(ids))
        return granted

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        return await self.on_prefer(request)

    async def pre_start(self, ids: Sequence[str]) -> None:
        await self.on_pre_start(ids)

    async def _grant(self, ids: Sequence[str]) -> Allocation:
        return Allocation(environment={"HELD": ",".join(ids)})

    async def _first(self, request: PreferenceRequest) -> Sequence[str]:
        return (*request.must_include, *request.available)[: request.size]

    async def _nothing(self, ids: Sequence[str]) -> None:
        return


class Served:
    """A plugin behind its socket."""

    def __init__(self, plugin: ScriptedPlugin, path: Path, allocated: Callable[[], None]) -> None:
        self.plugin = plugin
        self.path = path
        self.read = -math.inf  # when the newest reading of the kubelet's record began
        self.service = DevicePluginService(
            plugin, allocated, lambda: Record(began=self.read, written=self.read)
        )
        self.server = DrainableServer(self.service.handlers(), path)

    @property
    def peers(self) -> int:
        """How many are connected."""
        server = self.server._server
        return len(server.connections) if server else 0

    async def stop(self) -> None:
        """As the endpoint does it."""
        self.service.drain()
        await self.server.stop()


@asynccontextmanager
async def served(
    plugin: ScriptedPlugin, folder: Path, allocated: Callable[[], None] = lambda: None
) -> AsyncIterator[Served]:
    """The plugin served on a socket in `folder`; stopped at the end if a test has not done so."""
    one = Served(plugin, folder / "p.sock", allocated)
    await one.server.start()
    try:
        yield one
    finally:
        await one.stop()


class Peer:
    """The kubelet's end, on a connection of its own; every call runs in a thread."""

    def __init__(self, path: Path, **options: object) -> None:
        # Without this C-core shares connections between channels to one address.
        settings = {"grpc.use_local_subchannel_pool": 1, "grpc.max_receive_message_length": -1, **options}
        self.channel = grpc.insecure_channel(f"unix:{path}", options=list(settings.items()))
        self.device = V1BETA1.DevicePluginStub(self.channel)
        self.watcher = REGISTRY.RegistrationStub(self.channel)

    async def call(self, method: Any, request: object) -> Any:
        """One unary call. Raises grpc.RpcError."""
        return await anyio.to_thread.run_sync(lambda: method(request, timeout=scaled(10)))

    async def raw(self, path: str, data: bytes) -> bytes:
        """One unary call with bytes as they are. Raises grpc.RpcError."""
        method = self.channel.unary_unary(path)
        answer: bytes = await self.call(method, data)
        return answer

    async def allocate(self, *ids: str) -> Any:
        """Allocate for one container. Raises grpc.RpcError."""
        request = V1BETA1.AllocateRequest(container_requests=[{"devices_ids": ids}])
        return await self.call(self.device.Allocate, request)

    def listen(self) -> "Listener":
        """Open ListAndWatch."""
        return Listener(self.device.ListAndWatch(V1BETA1.Empty()))

    async def close(self) -> None:
        await anyio.to_thread.run_sync(self.channel.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()


class Listener:
    """A ListAndWatch stream, read in a thread."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.lists: list[list[str]] = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(grpc.RpcError):
            for message in self.stream:
                self.lists.append([device.ID for device in message.devices])
        self.ended.set()

    @property
    def status(self) -> Any:
        """How the stream ended, as a gRPC code."""
        return self.stream.code()


async def eventually(condition: Callable[[], bool], within: float = 10.0) -> None:
    """Return as soon as the condition holds. Raises TimeoutError."""
    with anyio.fail_after(within):
        while not condition():
            await anyio.sleep(0.005)


def open_files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  the fewest calls


def running_tasks() -> int:
    """How many tasks the loop has."""
    return len(asyncio.all_tasks())
