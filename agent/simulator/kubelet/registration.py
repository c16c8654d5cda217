"""How plugins become known: `kubelet.sock`, and the table of clients both ways share.

Clients are keyed by resource name alone, and that is a fault of the kubelet which is kept here on purpose
(1.36.3, `pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go`): when the stream of a plugin ends, the
client that stands in the table under its NAME is disconnected, which may be one that registered since.
"""

import re
from collections.abc import Callable
from pathlib import Path

import structlog
from anyio.abc import TaskGroup
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent._proto import v1beta1

from .device_tables import CallFailed, Endpoint, Tables
from .plugin import PluginClient
from .timings import Timings

logger = structlog.get_logger()
VERSION = "v1beta1"
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_extended_resource(name: str) -> bool:
    """Whether Kubernetes takes `name` for an extended resource: a foreign domain, a slash, a plain name."""
    domain, slash, rest = name.partition("/")
    if not slash or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    # Quotas put "requests." before the name: it must still be a qualified name then.
    sound = _DOMAIN.fullmatch(domain) and _NAME.fullmatch(rest)
    return bool(sound) and len(f"requests.{domain}") <= 253 and len(rest) <= 63


class Plugins:
    """All connected plugins, by resource name."""

    def __init__(
        self,
        group: TaskGroup,
        tables: Tables,
        timings: Timings,
        on_list: Callable[[str, list[v1beta1.Device]], None],
    ) -> None:
        self._group = group
        self._tables = tables
        self._timings = timings
        self._on_list = on_list
        self._clients: dict[str, PluginClient] = {}
        self._open: set[PluginClient] = set()

    def fault(self, name: str, versions: list[str]) -> str | None:
        """The fault of a registration, in the kubelet's words."""
        if VERSION not in versions:
            asked = ", ".join(versions)
            return (
                f'requested API version "{asked}" is not supported by kubelet. '
                f'Supported version is ["{VERSION}"]'
            )
        return None if is_extended_resource(name) else f'the ResourceName "{name}" is invalid'

    async def connect(self, name: str, socket: Path, versions: object = None) -> None:  # noqa: ARG002
        """Dial a plugin, ask for its options, follow its lists in the background. Raises CallFailed."""
        client = PluginClient(name, socket, self._timings)
        self._clients[name] = client
        self._open.add(client)
        try:
            options = await client.connect()
        except BaseException:
            # By name again: a failing newcomer makes the kubelet forget the plugin that was there.
            self._clients.pop(name, None)
            self._forget(client)
            raise
        self._tables.endpoints[name] = Endpoint(name, client, options)
        logger.info("plugin_connected", resource=name, socket=str(socket))
        self._group.start_soon(self._run, client)

    async def _run(self, client: PluginClient) -> None:
        why = await client.run(self._on_list)
        logger.info("plugin_stream_ended", resource=client.resource, error=why)
        self.disconnect(client.resource)
        self._forget(client)

    def disconnect(self, name: str, socket: Path | None = None) -> None:  # noqa: ARG002  a fault, see above
        """Close whichever connection stands under that name; its devices turn unhealthy."""
        client = self._clients.pop(name, None)
        if client is not None:
            self._forget(client)
            self._tables.plugin_gone(name, self._timings.clock())

    def _forget(self, client: PluginClient) -> None:
        if client in self._open:
            self._open.discard(client)
            client.close()

    def close(self) -> None:
        """Drop every connection, as the end of the process does."""
        for client in tuple(self._open):
            self._forget(client)


class RegistrationServer(v1beta1.RegistrationBase):
    """`kubelet.sock`: plugins register themselves, and are dialled before the answer goes out."""

    def __init__(self, plugins: Plugins, folder: Path) -> None:
        self._plugins = plugins
        self._folder = folder

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """Refuses with UNKNOWN, the code of every error of a Go server that names none."""
        if fault := self._plugins.fault(message.resource_name, [message.version]):
            raise GRPCError(Status.UNKNOWN, fault)
        try:
            await self._plugins.connect(message.resource_name, self._folder / message.endpoint)
        except CallFailed as error:
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return v1beta1.Empty()
