"""A running extender beside the in-memory API server, and kube-scheduler's side of the protocol."""

import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import aiohttp
import anyio

from agent.cluster.api import KubeApi
from agent.extender.app import Extender, running
from agent.extender.settings import ExtenderSettings, load
from tests.component.extender.api import Object

READY_SECONDS = 10.0


class Connected(Protocol):
    """An API server, to which a client can be had."""

    def client(self) -> AbstractAsyncContextManager[KubeApi]:
        """A client, open while the context is."""


def settings_for(**flags: Any) -> ExtenderSettings:
    """On loopback. A lease lasts: where a machine is busy a renewal comes late, and nobody serves."""
    given = {
        "http.address": "127.0.0.1",
        "http.port": 0,
        "http.verbs": "true",
        "lease.namespace": "ns",
        "lease.durationSeconds": 120,
        "lease.renewSeconds": 100,
        "lease.retrySeconds": 0.1,
        **flags,
    }
    return load(None, {}, [f"{key}={value}" for key, value in given.items()])


class Scheduler:
    """Calls one replica as kube-scheduler does."""

    def __init__(self, http: aiohttp.ClientSession, extender: Extender) -> None:
        self._http = http
        self.extender = extender
        self.url = f"http://127.0.0.1:{extender.http.port}"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status, and the JSON or text of the answer; `body` may be bytes."""
        data = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self._http.post(f"{self.url}/scheduler/{path}", **data) as reply:
            json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if json else reply.text())

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text."""
        async with self._http.get(f"{self.url}{path}") as reply:
            return reply.status, await reply.text()

    async def filter(self, pod: Object, names: Sequence[str]) -> Any:
        """Names only, as with nodeCacheCapable."""
        status, answer = await self.post("predicates", {"Pod": pod, "Nodes": None, "NodeNames": names})
        assert status == 200, answer
        return answer

    async def preempt(self, pod: Object, victims: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Nodes that count and whom they lose, by UID; `victims` are the scheduler's, by node."""
        proposed = {
            node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": len(uids)}
            for node, uids in victims.items()
        }
        status, answer = await self.post("preempt", {"Pod": pod, "NodeNameToMetaVictims": proposed})
        assert status == 200, answer
        found = answer["NodeNameToMetaVictims"]
        assert all(one["NumPDBViolations"] <= len(one["Pods"]) for one in found.values())
        return {node: [each["UID"] for each in one["Pods"]] for node, one in found.items()}

    async def bind(self, pod: Object, node: str) -> str:
        """The error; empty: bound."""
        metadata = pod["metadata"]
        body = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        status, answer = await self.post("bind", body)
        assert status == 200, answer
        return str(answer["Error"])

    async def ready(self) -> None:
        """Wait until it serves."""
        with anyio.fail_after(READY_SECONDS):
            while (await self.get("/serving"))[0] != 200:
                await anyio.sleep(0.02)

    async def settled(self) -> None:
        """Wait until the watch has shown every choice."""
        with anyio.fail_after(READY_SECONDS):
            while self.extender.fleet is None or self.extender.fleet.waiting:
                await anyio.sleep(0.02)


@asynccontextmanager
async def replica(api: Connected, **flags: Any) -> AsyncIterator[Scheduler]:
    """A replica and a scheduler that calls it; it need not be leader."""
    async with (
        api.client() as connected,
        running(settings_for(**flags), connected) as extender,
        aiohttp.ClientSession() as http,
    ):
        yield Scheduler(http, extender)


@asynccontextmanager
async def leader(api: Connected, **flags: Any) -> AsyncIterator[Scheduler]:
    """The same, serving."""
    async with replica(api, **flags) as made:
        await made.ready()
        yield made
