"""The embedded kubelet's connections as a plugin sees them, and long paths."""

import asyncio
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

from agent._proto import pluginregistration, v1beta1
from agent.simulator.kubelet import EmbeddedKubelet
from agent.simulator.kubelet.grpc_peer import UnixChannel
from agent.simulator.kubelet.registration import is_extended_resource
from tests.component.kubelet.peer import Plugin
from tests.pace import scaled


async def authority_seen(socket: Path, *, watcher: bool) -> str:
    """The :authority of one call, as a bare HTTP/2 server reads it."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, RequestReceived):
                    seen.append(str(dict(event.headers or ()).get(":authority")))  # type: ignore[call-overload]
                    writer.close()
            if not writer.is_closing():
                writer.write(connection.data_to_send())

    async with await asyncio.start_unix_server(serve, socket):
        channel = UnixChannel(socket, authority=None) if watcher else UnixChannel(socket)
        call = (
            pluginregistration.RegistrationStub(channel).get_info(timeout=scaled(5))
            if watcher
            else v1beta1.DevicePluginStub(channel).get_device_plugin_options(timeout=scaled(5))
        )
        try:
            with pytest.raises(StreamTerminatedError):
                await call
        finally:
            channel.close()
    return seen[0]


async def test_authority_on_device_plugin_connections(root: Path) -> None:
    assert await authority_seen(root / "p.sock", watcher=False) == "localhost"


async def test_authority_of_the_plugin_watcher(root: Path) -> None:
    assert await authority_seen(root / "p.sock", watcher=True) == str(root / "p.sock").replace("/", "%2F")


async def test_call_after_close_does_not_connect_anew(root: Path) -> None:
    with Plugin(root / "p.sock").serving():
        channel = UnixChannel(root / "p.sock")
        stub = v1beta1.DevicePluginStub(channel)
        await stub.get_device_plugin_options(timeout=scaled(5))
        channel.close()
        with pytest.raises(GRPCError, match="the client connection is closing"):
            await stub.get_device_plugin_options(timeout=scaled(5))


def test_long_root_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="too long for unix sockets below it; take a folder"):
        EmbeddedKubelet(Path("/tmp/" + "x" * 80))


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("nvidia.com/gpu", True),
        ("tencent.com/vcuda-core", True),
        ("nvidia.com/mig-1g.10gb", True),
        ("nvidia", False),
        ("cpu", False),
        ("kubernetes.io/gpu", False),
        ("a.kubernetes.io/gpu", False),
        ("requests.nvidia.com/gpu", False),
        ("nvidia.com/", False),
        ("/gpu", False),
        ("nvidia.com/gpu/0", False),
        ("NVIDIA.com/gpu", False),
        ("nvidia.com/" + "g" * 64, False),
    ],
)
def test_names_of_extended_resources(name: str, good: bool) -> None:
    assert is_extended_resource(name) is good
