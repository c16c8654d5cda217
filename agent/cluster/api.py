"""The Kubernetes API as paths and JSON: every call has a deadline and errors of this room."""

import datetime as dt
import inspect
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from agent.cluster import lean
from agent.kit.lean_aiohttp import aiohttp

Query = Mapping[str, str] | None
T = TypeVar("T")

CALL_SECONDS = 5.0
CONNECT_SECONDS = 5.0
HEADERS_SECONDS = 15.0  # a streaming list may wait 3 s in the server until its cache is fresh
# A watch may be mute for minutes: this finds a dead connection in 50 s, and balancers do not forget it.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class ApiError(Exception):
    """A call to the API server failed."""

    status = 0  # HTTP's, where it answered
    refused = False  # the server said no; else a write may have been carried out, or still be


class ApiUnavailable(ApiError):
    """The API server cannot be reached, or did not answer in time."""


class ApiRefused(ApiError):
    """The API server answered with an error; `status` is the HTTP status."""

    def __init__(
        self, status: int, message: str, retry_after: float | None = None, said: "ApiStatus | None" = None
    ) -> None:
        """`said`: the answer's body; None: it cannot be understood."""
        self.status = status
        self.refused = status < HTTPStatus.INTERNAL_SERVER_ERROR
        self.retry_after = retry_after  # seconds, as the server asks
        self._said = said
        super().__init__(message)

    def misses(self, kind: str, name: str) -> bool:
        """Whether the API server itself says that this object is not there: any proxy may answer a 404."""
        said = self._said
        return (
            self.status == HTTPStatus.NOT_FOUND
            and said is not None
            and (said.kind, said.reason) == ("Status", "NotFound")
            and (said.details.kind, said.details.name) == (kind, name)
        )


class _Details(msgspec.Struct):
    kind: str = ""  # the resource, in the plural
    name: str = ""


class ApiStatus(msgspec.Struct):
    """A v1 Status object, as far as it is passed on."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details = msgspec.field(default_factory=_Details)


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class ListPage(msgspec.Struct):
    """A list of objects, or a part of one."""

    metadata: _ListMetadata  # both are required: what has neither is no list, and nobody has ended by it
    items: list[msgspec.Raw]


class KubeApi:
    """Each call answers the body. Raises ApiRefused or ApiUnavailable, at the latest after its deadline."""

    def __init__(self, configured: Any, rest: Any) -> None:  # noqa: ANN401  the client's untyped classes
        self._configured = configured
        self._rest = rest

    async def get(self, path: str, query: Query = None, deadline: float = CALL_SECONDS) -> bytes:
        return await self._call("GET", path, deadline, query)

    async def read(self, path: str, kind: type[T], query: Query = None, deadline: float = CALL_SECONDS) -> T:
        """GET an object of that kind."""
        return understood(await self.get(path, query, deadline), kind, path)

    async def post(
        self, path: str, body: object, deadline: float = CALL_SECONDS, query: Query = None
    ) -> bytes:
        return await self._call("POST", path, deadline, query, body)

    async def put(self, path: str, body: object, deadline: float = CALL_SECONDS) -> bytes:
        return await self._call("PUT", path, deadline, body=body)

    async def merge_patch(self, path: str, body: object, deadline: float = CALL_SECONDS) -> bytes:
        """PATCH as a JSON merge patch (RFC 7386); the body of the answer."""
        return await self._call("PATCH", path, deadline, None, body, "merge-patch+json")

    async def json_patch(
        self, path: str, operations: Sequence[Mapping[str, object]], deadline: float = CALL_SECONDS
    ) -> bytes:
        """PATCH as a JSON patch (RFC 6902); the body of the answer. A `test` that fails is a 422."""
        return await self._call("PATCH", path, deadline, None, operations, "json-patch+json")

    async def strategic_patch(self, path: str, body: object, deadline: float = CALL_SECONDS) -> bytes:
        """PATCH with Kubernetes' strategic merge, which merges lists by key; the body of the answer."""
        return await self._call("PATCH", path, deadline, None, body, "strategic-merge-patch+json")

    async def delete(self, path: str, query: Query = None, deadline: float = CALL_SECONDS) -> bytes:
        return await self._call("DELETE", path, deadline, query)

    async def pages(
        self, path: str, query: Mapping[str, str], deadline: float = CALL_SECONDS
    ) -> AsyncIterator[ListPage]:
        """A list in pages of as many items as its `limit` says: one of them is held at a time."""
        while True:
            page = await self.read(path, ListPage, query, deadline)
            yield page
            if not page.metadata.next_page:
                return
            query = {**query, "continue": page.metadata.next_page}

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], silence: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """GET an endless answer line by line; `silence` is how long, in seconds, it may stay mute."""
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=silence)
        with _translated(path):
            with anyio.fail_after(HEADERS_SECONDS):
                response = await self._request("GET", path, timeout, query)
            try:
                _keep_alive(response)
                if not 200 <= response.status <= 299:
                    raise _refusal(response, await _bounded_read(response))
                yield _lines(response)
            finally:
                response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1):
            await self._rest.close()

    async def _call(
        self,
        method: str,
        path: str,
        deadline: float,
        query: Query = None,
        body: object = None,
        kind: str = "json",
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline)
        with _translated(path):
            response = await self._request(method, path, timeout, query, body, kind)
            async with response:
                data: bytes = await response.read()
                if not 200 <= response.status <= 299:
                    raise _refusal(response, data)
                return data

    async def _request(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        query: Query,
        body: object = None,
        kind: str = "json",
    ) -> Any:  # noqa: ANN401  aiohttp's response
        headers = {"Accept": "application/json", "Content-Type": f"application/{kind}"}
        headers |= await self._credentials()
        return await self._rest.request(
            method,
            self._configured.host + path,
            query_params=list(query.items()) if query else None,
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=timeout,
        )

    async def _credentials(self) -> dict[str, str]:
        """Headers that say who we are. The client reads a service account's token again each minute."""
        refresh = self._configured.refresh_api_key_hook
        try:
            if refresh is not None and not inspect.iscoroutinefunction(refresh):
                await anyio.to_thread.run_sync(refresh, self._configured)
            found = (await self._configured.auth_settings()).values()
        except Exception as error:  # the client's own, and whatever a kubeconfig's command does
            raise ApiUnavailable(f"the credentials for the API server cannot be read: {error}") from error
        return {each["key"]: each["value"] for each in found if each["in"] == "header" and each["value"]}


async def connect(kubeconfig: Path | None) -> KubeApi:
    """Find a way to the API server. Makes no call yet. Raises lean.NoClusterAccess."""
    configured = await lean.configuration(kubeconfig)
    return KubeApi(configured, lean.rest_client(configured))


def understood(answer: bytes | msgspec.Raw, kind: type[T], of: str) -> T:
    """An answer of the API server. Raises ApiError where it is none of that kind."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(f"the answer for {of} cannot be understood: {error}") from error


def now() -> str:
    """The present time as Kubernetes writes times: in RFC 3339, to the second, in UTC."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turns the HTTP library's errors into this room's."""
    try:
        yield
    except TimeoutError as error:
        raise ApiUnavailable(f"the API server did not answer {path} in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiUnavailable(f"the API server cannot be reached for {path}: {error}") from error


_REMEDIES = {
    401: "; the agent's token is not accepted: look at its service account or kubeconfig",
    403: "; grant the right to the agent's service account (a ClusterRole comes with the chart)",
}


def _keep_alive(response: Any) -> None:  # noqa: ANN401  aiohttp's response
    transport = response.connection.transport if response.connection else None
    raw = transport.get_extra_info("socket") if transport else None
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


async def _bounded_read(response: Any) -> bytes:  # noqa: ANN401  aiohttp's response
    with anyio.move_on_after(CALL_SECONDS):
        data: bytes = await response.read()
        return data
    return b""


def _refusal(response: Any, data: bytes) -> ApiRefused:  # noqa: ANN401  aiohttp's response
    said: ApiStatus | None = None
    try:
        said = msgspec.json.decode(data, type=ApiStatus)
        message = said.message
    except msgspec.DecodeError:
        message = data[:200].decode(errors="replace")
    wait = response.headers.get("Retry-After", "")
    remedy = _REMEDIES.get(response.status, "")
    return ApiRefused(
        response.status,
        f"{response.method} {response.url.path}: {response.status} {message or response.reason}{remedy}",
        float(wait) if wait.isdigit() else None,
        said,
    )


async def _lines(response: Any) -> AsyncIterator[bytes]:  # noqa: ANN401  aiohttp's response
    """Lines of any length: a pod with 10,000 devices is one line of over a megabyte."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        searched = len(rest)
        rest += chunk
        while (end := rest.find(b"\n", searched)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            searched = 0
            if line:
                yield line
