"""gRPC over unix sockets the way a kubelet speaks it: blocking dials, a receive limit, abrupt ends.

Facts: kubelet 1.36 (`pkg/kubelet/cm/devicemanager/plugin/v1beta1`, `pkg/kubelet/pluginmanager`) and grpc-go's
defaults.
"""

import contextlib
import socket
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server

RECEIVE_LIMIT = 4 * 1024 * 1024  # bytes; grpc-go's default, which the kubelet leaves alone
# What a call to a plugin can end with when the plugin misbehaves or goes away.
CALL_FAILURES = (GRPCError, StreamTerminatedError, ProtocolError, OSError, TimeoutError)


class _LimitedCodec(ProtoCodec):
    """Refuses messages above the receive limit, as grpc-go does before it looks into them."""

    def decode(self, data: bytes, message_type: Any) -> Any:  # noqa: ANN401  grpclib's signature
        if len(data) > RECEIVE_LIMIT:
            text = f"grpc: received message larger than max ({len(data)} vs. {RECEIVE_LIMIT})"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        return super().decode(data, message_type)


class UnixChannel(Channel):
    """A connection to one plugin.

    `authority`: "localhost" on device plugin connections; None for the plugin watcher's, which send the
    percent-encoded path of the socket.
    """

    def __init__(self, path: Path, authority: str | None = "localhost") -> None:
        self._chosen_authority = authority if authority is not None else quote(str(path), safe="")
        self._closing = False
        super().__init__(path=str(path), codec=_LimitedCodec())

    def _get_authority(self, host: str, port: int) -> str:  # noqa: ARG002
        return self._chosen_authority

    async def __connect__(self) -> H2Protocol:
        # grpclib would connect again for a call that comes, or waits for its connection, after close().
        protocol = None if self._closing else await super().__connect__()
        if protocol is None or self._closing:
            super().close()
            raise GRPCError(Status.CANCELLED, "grpc: the client connection is closing")
        return protocol

    def close(self) -> None:
        """Close for good."""
        self._closing = True
        super().close()

    async def dial(self, within: float) -> None:
        """Connect, however often it takes. Raises OSError of the last try when the time is over.

        grpc-go's pauses between tries start at 1 s and grow by 1.6.
        """
        deadline, pause = anyio.current_time() + within, 1.0
        while True:
            try:
                await self.__connect__()
            except OSError:
                if anyio.current_time() + pause > deadline:
                    raise
            else:
                return
            await anyio.sleep(pause)
            pause *= 1.6


class _DroppingServer(Server):
    """A server that can drop the connections it accepted: grpclib's own close sends the peers nothing."""

    def __init__(self, handlers: Collection[Any]) -> None:
        super().__init__(handlers)
        self._accepted: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._accepted = [one for one in self._accepted if not _is_closed(one)]
        self._accepted.append(protocol)
        return protocol

    def drop_peers(self) -> None:
        for protocol in self._accepted:
            if hasattr(protocol, "processor"):
                protocol.processor.close("kubelet stops")


def _is_closed(protocol: H2Protocol) -> bool:
    return hasattr(protocol, "connection") and not hasattr(protocol.connection, "_transport")


@contextlib.asynccontextmanager
async def serving(path: Path, *services: Any) -> AsyncIterator[None]:  # noqa: ANN401  grpclib services
    """Serve on a new socket at `path`; at the end all peers are dropped and the socket FILE stays.

    A kubelet that exits leaves its sockets lying, too; its next start removes them. Nothing may be there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        server = _DroppingServer(services)
        await server.start(sock=listener)
    except BaseException:
        listener.close()
        raise
    try:
        yield
    finally:
        server.close()
        server.drop_peers()
        with anyio.move_on_after(2, shield=True):
            await server.wait_closed()


def go_error(error: BaseException) -> str:
    """A failed call in the words of grpc-go, as they show in pod messages and logs."""
    if isinstance(error, GRPCError):
        name = "".join(part.capitalize() for part in error.status.name.split("_"))
        return f"rpc error: code = {name} desc = {error.message or ''}"
    if isinstance(error, TimeoutError):
        return "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
    return f"rpc error: code = Unavailable desc = {error}"
