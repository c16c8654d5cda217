"""A small client of the API server: one HTTPS request per call, no cache, cheap enough to poll with.

kubectl costs about 0.1 s of a core per call; a test that waits for a pod would spend its time in kubectl.
Connections are kept, since on two cores the handshakes of a test that waits would take a part of one.
"""

import http.client
import json
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.cluster.network import Connection, Dial, dial

Manifest = Mapping[str, Any]
Object = dict[str, Any]

FIELD_MANAGER = "test-rig"


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status."""

    def __init__(self, status: int, request: str, message: str) -> None:
        super().__init__(f"{request}: {status}: {message}")
        self.status = status


class ApiClient:
    """Client with the certificate pair `admin` of `certificates`, or with a token in place of it.

    Usable from several threads at once.
    """

    def __init__(
        self, port: int, certificates: Path, user: str = "admin", how: Dial = dial, token: str = ""
    ) -> None:
        self._port = port
        self._how = how
        self._tls = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        if not token:
            self._tls.load_cert_chain(certificates / f"{user}.crt", certificates / f"{user}.key")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._resources: dict[str, dict[str, tuple[str, bool]]] = {}
        # Those of a token are few, and nobody closes them at the end.
        self._keeps = not token
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        timeout: float = 10,
    ) -> Any:
        """Send one request; return the decoded JSON (or the text, where the answer is no JSON)."""
        connection = self._connected(timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": content_type, **self._headers})
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        if response.status >= 400:
            raise ApiError(response.status, f"{method} {path}", _message(data))
        if response.headers.get_content_type() == "application/json":
            return json.loads(data)
        return data.decode()

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connected(self, timeout: float) -> Connection:
        while True:
            with self._lock:
                if not self._idle:
                    return Connection(self._port, self._tls, timeout, self._how)
                connection = self._idle.pop()
            # The server says nothing unasked: what can be read now is the end of the connection.
            if select.select([connection.sock], [], [], 0)[0]:
                connection.close()
                continue
            connection.sock.settimeout(timeout)
            return connection

    def _keep(self, connection: Connection) -> None:
        if not self._keeps:
            connection.close()
        if connection.sock is None:  # the server may have closed it with its answer
            return
        with self._lock:
            self._idle.append(connection)

    def path(self, api_version: str, kind: str, namespace: str | None, name: str | None = None) -> str:
        """Path of a collection, or of one object; the plural of `kind` is asked of the API server once."""
        base = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        if kind not in self._resources.get(api_version, {}):
            found = self.request("GET", base)["resources"]
            self._resources[api_version] = {
                item["kind"]: (item["name"], item["namespaced"]) for item in found if "/" not in item["name"]
            }
        plural, namespaced = self._resources[api_version][kind]
        scope = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{base}{scope}/{plural}" + (f"/{name}" if name else "")

    def apply(self, manifest: Manifest, *, namespace: str = "default") -> Object:
        """Create or update an object by server-side apply; return what the API server stored."""
        meta = manifest["metadata"]
        target = self.path(
            manifest["apiVersion"], manifest["kind"], meta.get("namespace", namespace), meta["name"]
        )
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": "true"})
        return self._object("PATCH", f"{target}?{query}", dict(manifest), "application/apply-patch+yaml")

    def merge_patch(self, path: str, patch: Mapping[str, Any]) -> Object:
        """Apply a JSON merge patch to the object at `path`."""
        return self._object("PATCH", path, dict(patch), "application/merge-patch+json")

    def get(self, path: str, **query: str) -> Object:
        """GET an object or a collection."""
        return self._object("GET", f"{path}?{urlencode(query)}" if query else path)

    def delete(self, path: str, *, grace_seconds: int | None = None) -> Object:
        """DELETE an object; raises ApiError 404 when there is none."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return self._object("DELETE", path, options)

    def watch(self, path: str, resource_version: str, **query: str) -> "Watch":
        """Watch a collection from just after `resource_version`."""
        fields = urlencode({"watch": "true", "resourceVersion": resource_version, **query})
        return Watch(Connection(self._port, self._tls, 60, self._how), f"{path}?{fields}")

    def _object(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> Object:
        answer = self.request(method, path, body, content_type=content_type)
        assert isinstance(answer, dict)
        return answer


class Watch:
    """Events of a collection, oldest first, until `close()` is called (from any thread)."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._connection.request("GET", path)
        # The response takes the socket away from the connection object, and `close()` needs it.
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        self._closed = False
        if self._response.status >= 400:
            message = _message(self._response.read())
            self.close()
            raise ApiError(self._response.status, f"GET {path}", message)

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        """Type (ADDED, MODIFIED, DELETED) and object of each event."""
        try:
            while line := self._response.readline():
                event = json.loads(line)
                yield event["type"], event["object"]
        except (OSError, ValueError, http.client.HTTPException):
            if not self._closed:
                raise
        finally:
            self._response.close()
            self._connection.close()

    def close(self) -> None:
        """End the iteration, wherever it waits."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:500]
