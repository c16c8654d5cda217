"""The embedded node's API over HTTP, as much of it as the agent speaks: so that its real client is at work.

Nodes and pods by GET, LIST and WATCH (with streaming lists), merge patches of node, node status and pod
metadata, events by POST and PATCH. Plain HTTP on loopback, no authentication: everybody has
every right. No history: a watch that asks for an old version gets 410.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from aiohttp import web

from .api_server import Api, Pod
from .http_objects import (
    Object,
    claims_of_spec,
    claims_of_status,
    container,
    line,
    merge,
    missing_text,
    namespace,
    status_text,
    without_version,
)
from .http_resources import ResourcesApi
from .http_scheduling import SchedulingApi
from .http_serving import serving
from .pod_specs import Phase

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Interference = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
INITIAL_EVENTS_END = "k8s.io/initial-events-end"
BOOKMARK_SECONDS = 60.0
JSON_PATCH = "application/json-patch+json"


class HttpApi:
    """Serves one node's `Api`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.labels: dict[str, str] = {}
        self.annotations: dict[str, str] = {}
        self.events: list[Object] = []
        self.conditions: dict[str, Object] = {}
        self.namespaces: dict[str, dict[str, str]] = {}  # those with labels, which they are asked for by
        self.resources = ResourcesApi(api, self._collection)
        self.port = 0
        # Faults: what is awaited in place of each request's handler; collections ("nodes", "pods") whose
        # watches stay open and bring nothing.
        self.interfere: Interference | None = None
        self.silent: set[str] = set()

    @asynccontextmanager
    async def serving(self, path: Path | None = None) -> AsyncIterator["HttpApi"]:
        """Serve on a free port of loopback, or on a unix socket, while the context is open."""
        app = web.Application(middlewares=[self._interfered])
        pods = "/api/v1/namespaces/{namespace}/pods/{name}"
        events = "/api/v1/namespaces/{namespace}/events"
        app.add_routes(
            [
                web.get("/api/v1/pods", self._pods),
                web.get("/api/v1/namespaces/{namespace}/pods", self._pods),
                web.get(pods, self._pod),
                web.patch(pods, self._patch_pod),
                web.get("/api/v1/namespaces", self._namespaces),
                web.get("/api/v1/nodes", self._nodes),
                web.get("/api/v1/nodes/{name}", self._node),
                web.patch("/api/v1/nodes/{name}", self._patch_node),
                web.patch("/api/v1/nodes/{name}/status", self._patch_status),
                web.get(events, self._listed_events),
                web.post(events, self._post_event),
                web.patch(events + "/{name}", self._patch_event),
                web.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review),
                *SchedulingApi(self._api).routes(),
                *self.resources.routes(),
            ]
        )
        async with serving(app, path) as self.port:
            yield self

    @property
    def reachable(self) -> bool:
        """False: every call fails, open watches end."""
        return self._api.reachable

    @reachable.setter
    def reachable(self, value: bool) -> None:
        self._api.reachable = value
        self._api.changed()

    def write_kubeconfig(self, path: Path) -> None:
        """A kubeconfig for this server. Blocks."""
        name = "embedded"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path.write_text(json.dumps(config), encoding="utf-8")

    def set_label(self, key: str, value: str | None) -> None:
        """Set or remove a label of the node."""
        if value is None:
            self.labels.pop(key, None)
        else:
            self.labels[key] = value
        self._api.changed()

    def set_annotation(self, key: str, value: str) -> None:
        """Set an annotation of the node."""
        self.annotations[key] = value
        self._api.changed()

    # Objects

    @property
    def _version(self) -> str:
        return str(self._api.changes.version + 1)

    def _node_object(self) -> Object:
        def amounts(counts: Mapping[str, int]) -> dict[str, str]:
            return {resource: str(count) for resource, count in counts.items()}

        name = self._api.node_name
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "uid": f"uid-of-{name}",
                "resourceVersion": self._version,
                "labels": dict(self.labels),
                "annotations": dict(self.annotations),
            },
            "spec": {"taints": list(self._api.taints)} if self._api.taints else {},
            "status": {
                "capacity": amounts(self._api.capacity),
                "allocatable": amounts(self._api.allocatable),
                "conditions": list(self.conditions.values()),
                "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.1.9"},
            },
        }

    def pod_object(self, pod: Pod) -> Object:
        """The pod as every answer has it."""
        spec = pod.spec
        metadata: Object = {
            "name": spec.name,
            "namespace": spec.namespace,
            "uid": pod.api_uid,
            "resourceVersion": self._version,
            "annotations": pod.annotations,
        }
        if spec.static:  # a mirror: the kubelet makes its Node the owner (`pod/mirror_client.go`)
            node = self._node_object()
            owner = {"apiVersion": "v1", "kind": "Node", "name": self._api.node_name, "controller": True}
            metadata["ownerReferences"] = [{**owner, "uid": node["metadata"]["uid"]}]
        if pod.deleting:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "nodeName": pod.node_name or "",
                "hostPID": spec.host_pid,
                "initContainers": [container(each) for each in spec.init_containers],
                "containers": [container(each) for each in spec.containers],
                **claims_of_spec(spec),
            },
            "status": {
                "phase": str(pod.phase),
                "startTime": "2026-01-01T00:00:00Z" if pod.admitted or pod.phase.finished else None,
                "reason": pod.reason,
                "message": pod.message,
                "containerStatuses": [
                    {
                        "name": each.name,
                        "containerID": f"containerd://{pod.container_id(each.name)}",
                        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    }
                    for each in (spec.containers if pod.phase is Phase.RUNNING else ())
                ],
                **claims_of_status(pod.claims),
            },
        }

    def _find(self, request: web.Request) -> Pod:
        self._check()
        key = (request.match_info["namespace"], request.match_info["name"])
        pod = self._api.pods.get(key)
        if pod is None:
            raise web.HTTPNotFound(text=missing_text("pods", key[1]), content_type="application/json")
        return pod

    def _check(self) -> None:
        if not self.reachable:
            raise web.HTTPServiceUnavailable(
                text=status_text(503, "the server is away"), content_type="application/json"
            )

    @web.middleware
    async def _interfered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return await (self.interfere(request, handler) if self.interfere else handler(request))

    # Reading

    async def _pod(self, request: web.Request) -> web.Response:
        return web.json_response(self.pod_object(self._find(request)))

    async def _node(self, request: web.Request) -> web.Response:  # noqa: ARG002  aiohttp's signature
        self._check()
        return web.json_response(self._node_object())

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        return await self._collection(request, lambda: iter((self._node_object(),)))

    async def _namespaces(self, request: web.Request) -> web.StreamResponse:
        return await self._collection(
            request, lambda: (namespace(name, labels) for name, labels in self.namespaces.items())
        )

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        selector = request.query.get("fieldSelector", "")
        if selector.startswith("spec.nodeName=,"):
            waiting = [pod for pod in self._api.pods.values() if pod.node_name is None]
            return await self._collection(request, lambda: map(self.pod_object, waiting))
        unfinished = "status.phase!=Succeeded" in selector
        if "spec.nodeName" not in selector:
            space = request.match_info.get("namespace")
            everything = [
                pod
                for pod in self._api.pods.values()
                if space in (None, pod.spec.namespace) and not (unfinished and pod.phase.finished)
            ]
            return await self._collection(request, lambda: map(self.pod_object, everything))

        def bound() -> Iterator[Object]:
            pods = self._api.bound_pods()
            return map(self.pod_object, (pod for pod in pods if not (unfinished and pod.phase.finished)))

        return await self._collection(request, bound)

    async def _collection(
        self, request: web.Request, objects: Callable[[], Iterator[Object]]
    ) -> web.StreamResponse:
        self._check()
        if request.query.get("watch") != "true":
            kind = f"{request.path.rpartition('/')[2].capitalize().removesuffix('s')}List"
            page = {"metadata": {"resourceVersion": self._version}, "items": list(objects())}
            return web.json_response({"kind": kind, **page})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if "resourceVersion" in request.query and request.query["resourceVersion"] != self._version:
            gone = {"type": "ERROR", "object": {"code": 410, "message": "no history is kept"}}
            await response.write(line(gone))
            return response
        initial = request.query.get("sendInitialEvents") == "true"
        await self._watch(request.path.rpartition("/")[2], response, objects, initial)
        return response

    async def _watch(
        self,
        collection: str,
        response: web.StreamResponse,
        objects: Callable[[], Iterator[Object]],
        initial: bool,
    ) -> None:
        seen = self._api.changes.version
        known = {each["metadata"]["uid"]: each for each in objects()}
        if initial:
            for each in known.values():
                await response.write(line({"type": "ADDED", "object": each}))
            mark = {"resourceVersion": self._version, "annotations": {INITIAL_EVENTS_END: "true"}}
            await response.write(line({"type": "BOOKMARK", "object": {"metadata": mark}}))
        while self.reachable:
            with anyio.move_on_after(BOOKMARK_SECONDS) as idle:
                seen = await self._api.changes.wait_change(seen)
            if idle.cancelled_caught and collection not in self.silent:
                mark = {"resourceVersion": self._version}
                await response.write(line({"type": "BOOKMARK", "object": {"metadata": mark}}))
                continue
            if collection in self.silent:
                continue
            present = {each["metadata"]["uid"]: each for each in objects()}
            for uid, each in present.items():
                if uid not in known:
                    await response.write(line({"type": "ADDED", "object": each}))
                elif without_version(each) != without_version(known[uid]):
                    await response.write(line({"type": "MODIFIED", "object": each}))
            for uid in known.keys() - present.keys():
                await response.write(line({"type": "DELETED", "object": known[uid]}))
            known = present

    # Writing

    async def _patch_pod(self, request: web.Request) -> web.Response:
        pod = self._find(request)
        metadata = (await request.json()).get("metadata", {})
        if metadata.get("uid", pod.api_uid) != pod.api_uid:
            raise web.HTTPConflict(
                text=status_text(409, "another pod of that name"), content_type="application/json"
            )
        merge(pod.written, metadata.get("annotations", {}))
        self._api.changed()
        return web.json_response(self.pod_object(pod))

    async def _patch_node(self, request: web.Request) -> web.Response:
        self._check()
        patch = await request.json()
        if request.content_type == JSON_PATCH:
            self._patch_taints(patch)
            self._api.changed()
            return web.json_response(self._node_object())
        metadata = patch.get("metadata", {})
        merge(self.labels, metadata.get("labels", {}))
        merge(self.annotations, metadata.get("annotations", {}))
        self._api.changed()
        return web.json_response(self._node_object())

    def _patch_taints(self, operations: list[Object]) -> None:
        """A JSON patch of the taints, as whole lists: all that the agent sends."""
        taints = self._api.taints
        for each in operations:
            kind, path, value = each["op"], each["path"], each["value"]
            if path != "/spec/taints" or (kind == "test" and value != (taints or None)):
                raise web.HTTPUnprocessableEntity(
                    text=status_text(422, f"{kind} of {path} failed"), content_type="application/json"
                )
            if kind == "add":
                taints = value
        self._api.taints = taints

    async def _patch_status(self, request: web.Request) -> web.Response:
        self._check()
        status = (await request.json()).get("status", {})
        capacity, allocatable = (
            {key: int(value) for key, value in status.get(part, {}).items()}
            for part in ("capacity", "allocatable")
        )
        for each in status.get("conditions", []):
            if each.get("$patch") == "delete":
                self.conditions.pop(each["type"], None)
            else:
                self.conditions[each["type"]] = each
        self._api.set_node_status(self._api.capacity | capacity, self._api.allocatable | allocatable)
        self._api.changed()
        return web.json_response(self._node_object())

    async def _listed_events(self, request: web.Request) -> web.Response:
        self._check()
        space = request.match_info["namespace"]
        found = [each for each in self.events if each["metadata"]["namespace"] == space]
        return web.json_response({"items": found})

    async def _post_event(self, request: web.Request) -> web.Response:
        self._check()
        event = await request.json()
        self.events.append(event)
        return web.json_response(event, status=201)

    async def _patch_event(self, request: web.Request) -> web.Response:
        self._check()
        for event in self.events:
            if event["metadata"]["name"] == request.match_info["name"]:
                event.update(await request.json())
                return web.json_response(event)
        raise web.HTTPNotFound(text=status_text(404, "no such event"), content_type="application/json")

    async def _review(self, request: web.Request) -> web.Response:
        self._check()
        return web.json_response({**await request.json(), "status": {"allowed": True}}, status=201)
