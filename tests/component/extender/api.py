"""An API server in memory with what the extender needs: nodes, pods, bindings, leases, and watches."""

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agent.cluster.api import KubeApi
from agent.kit.tasks import Cell
from agent.model.modes import Mode
from agent.model.node_inventory import INVENTORY, GpuEntry, NodeInventory, encode
from agent.model.pod import VGPU
from agent.simulator.kubelet.http_serving import serving
from tests.component.cluster.server import END, client

Object = dict[str, Any]


@dataclass
class ClusterApi:
    """Objects by kind and name. `refuse` answers the next bindings with that status; `hang`: not at all."""

    nodes: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    leases: dict[str, Object] = field(default_factory=dict)
    config_maps: dict[str, Object] = field(default_factory=dict)
    config_maps_answer: int = 0  # that status to every call; 0: as an API server does
    bindings: list[Object] = field(default_factory=list)
    labels_work: bool = True
    label_writes: list[tuple[str, Object]] = field(default_factory=list)  # pod, and the labels it is to get
    events: dict[str, Object] = field(default_factory=dict)  # of pods, by name
    refuse: int = 0
    lose_answers: bool = False  # bind, and answer 500
    leases_work: bool = True
    pods_listed: Cell[bool] = field(default_factory=lambda: Cell(True))  # False: their list is not answered
    bound_shown: Cell[bool] = field(default_factory=lambda: Cell(True))  # False: their watch is late
    url: str = ""
    _events: list[tuple[str, Object]] = field(default_factory=list)
    _changed: Cell[int] = field(default_factory=lambda: Cell(0))
    _version: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    # Objects

    def node(self, name: str, *gpus: GpuEntry, text: str | None = None, **allocatable: int) -> None:
        """A node with an inventory of these GPUs, or with `text` as it, or without."""
        inventory = text if text is not None else encode(NodeInventory(gpus)) if gpus else None
        annotations = {} if inventory is None else {INVENTORY: inventory}
        self._put(
            "nodes",
            self.nodes,
            {
                "metadata": {"name": name, "uid": name, "annotations": annotations},
                "status": {"allocatable": {k: str(v) for k, v in allocatable.items()}},
            },
        )

    def pod(self, name: str, cores: int, blocks: int, node: str = "", **more: Any) -> Object:
        """A pod of one container; its UID is its name."""
        limits = {VGPU.core: str(cores), VGPU.memory: str(blocks)}
        made = {
            "metadata": {"name": name, "namespace": "ns", "uid": name, "annotations": {}} | more,
            "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]},
            "status": {"phase": "Pending"},
        }
        self._put("pods", self.pods, made)
        return made

    def update(self, pod: Object) -> None:
        """Announce a pod that was changed in place."""
        self._put("pods", self.pods, pod, "MODIFIED")

    def end(self, name: str) -> None:
        """A pod is gone."""
        self._tell("DELETED", "pods", self.pods.pop(name))

    def _put(self, kind: str, to: dict[str, Object], item: Object, event: str = "ADDED") -> None:
        item["metadata"]["resourceVersion"] = str(next(self._version))
        to[item["metadata"]["name"]] = item
        self._tell(event, kind, item)

    def _tell(self, event: str, kind: str, item: Object) -> None:
        self._events.append((kind, {"type": event, "object": json.loads(json.dumps(item))}))
        self._changed.publish(0)

    # HTTP

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2]
        if kind == "pods":
            await self.pods_listed.wait_for(bool)
        bound_only = "spec.nodeName!=" in request.query.get("fieldSelector", "")
        unbound_only = "spec.nodeName=," in request.query.get("fieldSelector", "")
        items = list((self.nodes if kind == "nodes" else self.pods).values())
        begin = len(self._events)
        if request.query.get("watch") != "true":
            wanted = {True} if bound_only else {False} if unbound_only else {True, False}
            kept = [one for one in items if kind == "nodes" or bool(one["spec"]["nodeName"]) in wanted]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": kept})
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(event: Mapping[str, Any]) -> None:
            if unbound_only and event["type"] != "BOOKMARK" and event["object"]["spec"]["nodeName"]:
                # As a watch says it of what its selector lets go: with the object as it was before.
                spec = {**event["object"]["spec"], "nodeName": ""}
                event = {"type": "DELETED", "object": {**event["object"], "spec": spec}}
            if not bound_only or event["type"] == "BOOKMARK" or event["object"]["spec"]["nodeName"]:
                await response.write(json.dumps(event).encode() + b"\n")

        for one in items:
            # What its selector never held a watch does not show.
            if not (unbound_only and one["spec"]["nodeName"]):
                await send({"type": "ADDED", "object": one})
        end = {"metadata": {"resourceVersion": "1", "annotations": END}}
        await send({"type": "BOOKMARK", "object": end})
        while True:
            if bound_only:
                await self.bound_shown.wait_for(bool)
            seen = self._changed.version
            for told, event in self._events[begin:]:
                if told == kind:
                    await send(event)
            begin = len(self._events)
            await self._changed.wait_change(seen)

    async def _replicas(self, request: web.Request) -> web.StreamResponse:
        """Pods by labels that a selector asks for."""
        asked = request.query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in asked.split(",") if part).items()
        found = [pod for pod in self.pods.values() if wanted <= pod["metadata"].get("labels", {}).items()]
        return web.json_response({"items": found})

    async def _label(self, request: web.Request) -> web.StreamResponse:
        if not self.labels_work:
            return _status(403, "the policy forbids it")
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "no such pod")
        changed = (await request.json())["metadata"]["labels"]
        labels = pod["metadata"].get("labels", {}) | changed
        pod["metadata"]["labels"] = {key: value for key, value in labels.items() if value is not None}
        self.label_writes.append((pod["metadata"]["name"], changed))
        self.update(pod)
        return web.json_response(pod)

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        found = self.pods.get(request.match_info["name"])
        return web.json_response(found) if found else _status(404, "no such pod")

    async def _bind(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuse:
            return _status(self.refuse, "refused")
        pod = self.pods.get(request.match_info["name"])
        if pod is None or pod["metadata"]["uid"] != body["metadata"]["uid"]:
            return _status(409, "another UID")
        if pod["spec"]["nodeName"]:
            return _status(409, f"pod {pod['metadata']['name']} is already assigned to node")
        self.bindings.append(body)
        pod["spec"]["nodeName"] = body["target"]["name"]
        pod["metadata"]["annotations"] |= body["metadata"]["annotations"]
        self.update(pod)
        return _status(500, "the answer was lost") if self.lose_answers else _status(201, "")

    async def _event(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.events:
            return _status(409, f"events {name} already exists")
        self.events[name] = body
        return web.json_response(body, status=201)

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        if not self.leases_work:
            return _status(503, "no storage")
        name = request.match_info.get("name", "")
        if request.method == "GET":
            return web.json_response(self.leases[name]) if name in self.leases else _status(404, "none")
        body = await request.json()
        known = self.leases.get(name)
        if request.method == "POST":
            name = body["metadata"]["name"]
            if name in self.leases:
                return _status(409, "exists")
        elif known is None or body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            return _status(409, "changed meanwhile")
        spec = (known or {}).get("spec", {}) | body["spec"]
        version = {"name": name, "resourceVersion": str(next(self._version))}
        self.leases[name] = {"metadata": version, "spec": spec}
        return web.json_response(self.leases[name])

    async def _config_map(self, request: web.Request) -> web.StreamResponse:
        if self.config_maps_answer:
            return _status(self.config_maps_answer, "no ConfigMaps today")
        body = await request.json() if request.can_read_body else {}
        name = request.match_info.get("name") or body["metadata"]["name"]
        if request.method == "POST":
            self.config_maps[name] = body
        elif name not in self.config_maps:
            return _status(404, "none")
        elif request.method == "PATCH":
            data = {**(self.config_maps[name].get("data") or {}), **body["data"]}
            self.config_maps[name]["data"] = {key: text for key, text in data.items() if text is not None}
        return web.json_response(self.config_maps[name])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on loopback; the URL."""
        app = web.Application()
        pod = "/api/v1/namespaces/ns/pods/{name}"
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.router.add_get("/api/v1/nodes", self._watch)
        app.router.add_get("/api/v1/pods", self._watch)
        app.router.add_get("/api/v1/namespaces/ns/pods", self._replicas)
        app.router.add_get(pod, self._pod)
        app.router.add_patch(pod, self._label)
        app.router.add_post(pod + "/binding", self._bind)
        app.router.add_post("/api/v1/namespaces/{namespace}/events", self._event)
        config_maps = "/api/v1/namespaces/{namespace}/configmaps"
        app.router.add_post(config_maps, self._config_map)
        app.router.add_route("*", config_maps + "/{name}", self._config_map)
        app.router.add_post(leases, self._lease)
        app.router.add_route("*", leases + "/{name}", self._lease)
        async with serving(app) as bound:
            self.url = f"http://127.0.0.1:{bound}"
            yield self.url

    @asynccontextmanager
    async def client(self) -> AsyncIterator[KubeApi]:
        """The lean client, pointed here."""
        async with client(self.url) as api:
            yield api


def gpus(count: int, mode: Mode = Mode.VGPU) -> tuple[GpuEntry, ...]:
    """GPUs of 80 GiB."""
    return tuple(GpuEntry(f"GPU-{n}", n, mode, 81920) for n in range(count))


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message, "code": code}, status=code)
