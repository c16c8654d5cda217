"""A way to the API server that can be cut while all others stay: a proxy between it and the kubelet."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketStream

from tests.cluster.real_rig import RealRig
from tests.cluster.rig import Cluster

LOST = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Way:
    """Hands on every connection to the API server, and none while it is cut."""

    def __init__(self, server: str) -> None:
        address = urlsplit(server)
        assert address.hostname
        assert address.port
        self._server = (address.hostname, address.port)
        self._open = True
        self._connections: set[anyio.CancelScope] = set()

    def cut(self) -> None:
        self._open = False
        for each in self._connections:
            each.cancel()

    def mend(self) -> None:
        self._open = True

    async def hand_on(self, client: SocketStream) -> None:
        async with client:
            if not self._open:
                return
            with anyio.CancelScope() as scope, suppress(*LOST):
                self._connections.add(scope)
                try:
                    async with (
                        await anyio.connect_tcp(*self._server) as server,
                        anyio.create_task_group() as both,
                    ):
                        both.start_soon(_copied, client, server, both.cancel_scope)
                        both.start_soon(_copied, server, client, both.cancel_scope)
                finally:
                    self._connections.discard(scope)


async def _copied(source: ByteStream, target: ByteStream, both: anyio.CancelScope) -> None:
    with suppress(*LOST):
        async for data in source:
            await target.send(data)
    both.cancel()


@asynccontextmanager
async def kubelets_way(cluster: Cluster, rig: RealRig) -> AsyncIterator[Way]:
    """The kubelet reaches the API server through a proxy of this process; restarted before and after."""
    file = anyio.Path(cluster.layout.certificates / "kubelet.kubeconfig")
    usual = await file.read_text()
    content = json.loads(usual)
    found = content["clusters"][0]["cluster"]
    way = Way(found["server"])
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(partial(listener.serve, way.hand_on))
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        found["server"] = f"https://127.0.0.1:{port}"
        try:
            await file.write_text(json.dumps(content))
            await rig.restart_kubelet()
            yield way
        finally:
            with anyio.CancelScope(shield=True):
                await file.write_text(usual)
                # Not the rig's, which waits for as many devices as before: what is listed may be changing.
                await anyio.to_thread.run_sync(cluster.restart_kubelet)
                await anyio.to_thread.run_sync(partial(cluster.wait_node_ready, timeout=60))
            group.cancel_scope.cancel()
