"""`kubelet.sock`: whether a kubelet serves there, and Register, the older of the two ways in."""

from enum import Enum
from pathlib import Path

import anyio
import anyio.to_thread
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent._proto import v1beta1
from agent.kubelet.api import ResourcePlugin
from agent.kubelet.service import API_VERSION

REGISTER_SECONDS = 10.0  # the kubelet dials back within the call and allows itself as long
CONNECT_SECONDS = 1.0


class Way(Enum):
    """How the kubelet comes to know a resource."""

    REGISTRY = "plugins_registry"
    SOCKET = "kubelet.sock"


class RegistrationFailed(Exception):
    """The kubelet could not be asked, or refused; the text says which socket and why."""


# Inode and time of change: a kubelet makes its socket anew at each start, often with the same inode.
Identity = tuple[int, int]


class KubeletSocket:
    """The kubelet's Registration service."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def identity(self) -> Identity | None:
        """Which socket file lies there; None: none. The kubelet leaves it behind when it ends."""

        def look() -> Identity | None:
            try:
                found = self.path.stat()
            except OSError:
                return None
            return found.st_ino, found.st_ctime_ns

        return await anyio.to_thread.run_sync(look)

    async def serves(self) -> Identity | None:
        """The identity of the socket file if somebody accepts connections there, else None."""
        before = await self.identity()
        if before is None:
            return None
        with anyio.move_on_after(CONNECT_SECONDS):
            try:
                async with await anyio.connect_unix(self.path):
                    return before
            except OSError:
                return None
        return None

    async def register(self, plugin: ResourcePlugin, file: str) -> None:
        """Announce the socket `file`, which lies in the same folder and serves already.

        Raises RegistrationFailed.
        """
        request = v1beta1.RegisterRequest(
            version=API_VERSION,
            endpoint=file,
            resource_name=plugin.resource,
            options=v1beta1.DevicePluginOptions(
                pre_start_required=plugin.needs_pre_start,
                get_preferred_allocation_available=plugin.offers_preference,
            ),
        )
        channel = Channel(path=str(self.path))
        try:
            # Not grpclib's own timeout: see agent.kubelet.podresources.
            with anyio.fail_after(REGISTER_SECONDS):
                await v1beta1.RegistrationStub(channel).register(request)
        except (GRPCError, ProtocolError, StreamTerminatedError, OSError) as error:
            raise RegistrationFailed(f"Register on {self.path} failed: {_told(error)}") from error
        finally:
            channel.close()


def _told(error: Exception) -> str:
    if isinstance(error, GRPCError):
        return f"{error.message} ({error.status.name})"
    if isinstance(error, TimeoutError):
        return f"no answer within {REGISTER_SECONDS:g} s; the kubelet hangs or cannot reach the socket"
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return f"{error.strerror}; is the kubelet running?"
    return str(error) or type(error).__name__
