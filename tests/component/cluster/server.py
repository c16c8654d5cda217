"""A scripted API server: each request to a path gets the next answer of its script, the last one for ever."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from aiohttp import web

from agent.cluster import lean
from agent.cluster.api import KubeApi
from agent.simulator.kubelet.http_serving import serving

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
END = {"k8s.io/initial-events-end": "true"}


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any

    @property
    def version(self) -> str | None:
        """The resource version that was named."""
        return self.query.get("resourceVersion")


@dataclass
class FakeApi:
    """The server's answers, and the requests that it got."""

    scripts: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def script(self, path: str, *answers: Answer) -> None:
        """Append answers for a path."""
        self.scripts[path].extend(answers)

    def of(self, path: str) -> list[Asked]:
        """The requests for a path so far."""
        return [one for one in self.asked if one.path == path]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The route of everything."""
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append(Asked(request.method, request.path, dict(request.query), request.headers, body))
        script = self.scripts[request.path]
        answer = script.pop(0) if len(script) > 1 else script[0] if script else status(404, "not scripted")
        return await answer(request)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["FakeApi"]:
        """Serve on loopback; connections drop at the end."""
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{tail:.*}", self.answer)
        async with serving(app, port=port) as bound:
            self.url = f"http://127.0.0.1:{bound}"
            yield self

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def client(url: str, **settings: Any) -> AsyncIterator[KubeApi]:
    """The agent's client, pointed at a URL."""
    configured = await anyio.to_thread.run_sync(lean._empty)
    configured.host = url
    for name, value in settings.items():
        setattr(configured, name, value)
    api = KubeApi(configured, lean.rest_client(configured))
    try:
        yield api
    finally:
        await api.close()


# Answers


def status(code: int, message: str = "", **headers: str) -> Answer:
    """A v1 Status; header names with _ for -."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "apiVersion": "v1", "message": message, "code": code}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=code, headers=named)

    return answer


def page(version: str, *items: Mapping[str, Any], next_page: str = "") -> Answer:
    """A plain list, or a part of it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        metadata = {"resourceVersion": version, "continue": next_page}
        return web.json_response({"metadata": metadata, "items": items})

    return answer


def missing(kind: str, name: str) -> Answer:
    """The API server's own 404."""
    status = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
    return objects({**status, "details": {"name": name, "kind": kind}}, code=404)


def objects(body: Any, code: int = 200) -> Answer:
    """One object."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=code)

    return answer


def watch(*events: Mapping[str, Any] | bytes, then: str = "hang", pieces: int = 0) -> Answer:
    """A watch: events as lines (bytes as they are), then hang, end, or cut the connection.

    `pieces`: bytes to a write, so that lines arrive in parts.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await opened(request)
        lines = [one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in events]
        for data in _cut(b"".join(lines), pieces):
            await response.write(data)
        if then == "hang":
            await anyio.sleep_forever()
        if then == "cut" and request.transport is not None:
            request.transport.abort()
        return response

    return answer


async def silence(request: web.Request) -> web.StreamResponse:
    """No answer at all."""
    await anyio.sleep_forever()
    raise AssertionError


async def opened(request: web.Request) -> web.StreamResponse:
    """The head of an answer that a test writes by itself."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, *events: Mapping[str, Any]) -> None:
    """Events as lines."""
    await response.write(b"".join(json.dumps(one).encode() + b"\n" for one in events))


def _cut(data: bytes, pieces: int) -> list[bytes]:
    size = pieces or max(len(data), 1)
    return [data[at : at + size] for at in range(0, len(data), size)]


# Objects and events


def pod(name: str, version: str = "1", **more: Any) -> dict[str, Any]:
    """A pod; its UID is its name unless `uid` says otherwise."""
    metadata = {"name": name, "namespace": "ns", "uid": more.pop("uid", name), "resourceVersion": version}
    return {"kind": "Pod", "metadata": metadata | more.pop("metadata", {}), **more}


def event(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """ADDED, MODIFIED or DELETED."""
    return {"type": kind, "object": item}


def bookmark(version: str, *, complete: bool = False) -> dict[str, Any]:
    """A BOOKMARK; `complete`: the one that ends the initial events."""
    metadata = {"resourceVersion": version, "annotations": END if complete else {}}
    return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}}


def error(code: int, message: str) -> dict[str, Any]:
    """An ERROR in a watch."""
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": message}}
