"""The API of a scheduler's extender beside nodes and pods: bindings, leases, and ConfigMaps of its own."""

import itertools

from aiohttp import web

from .api_server import Api
from .http_objects import Object, merge, status_text


class SchedulingApi:
    """Bindings carry annotations onto the pod in the write that binds it, as the API server has it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._leases: dict[str, Object] = {}
        self._maps: dict[str, dict[str, str]] = {}  # data by name
        self._versions = itertools.count(1)

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        maps = "/api/v1/namespaces/{namespace}/configmaps"
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        return [
            web.post("/api/v1/namespaces/{namespace}/pods/{name}/binding", self._bind),
            web.post(leases, self._new_lease),
            web.get(leases + "/{name}", self._lease),
            web.patch(leases + "/{name}", self._patch_lease),
            web.post(maps, self._new_map),
            web.get(maps + "/{name}", self._map),
            web.patch(maps + "/{name}", self._patch_map),
        ]

    async def _bind(self, request: web.Request) -> web.Response:
        body = await request.json()
        pod = self._api.pods.get((request.match_info["namespace"], request.match_info["name"]))
        if not self._api.reachable:
            return _status(503, "the server is away")
        if pod is None or pod.deleting or body["metadata"].get("uid", pod.api_uid) != pod.api_uid:
            return _status(409, "the pod is gone")
        if pod.node_name is not None:
            return _status(409, f"pod {pod.spec.name} is already assigned to node {pod.node_name!r}")
        pod.written |= body["metadata"].get("annotations", {})
        self._api.bind(pod)
        return _status(201, "bound")

    async def _lease(self, request: web.Request) -> web.Response:
        found = self._leases.get(request.match_info["name"])
        return web.json_response(found) if found and self._api.reachable else _status(404, "no such lease")

    async def _new_lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self._leases:
            return _status(409, f"leases.coordination.k8s.io {name!r} already exists")
        return self._written(name, body["spec"])

    async def _patch_lease(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        known = self._leases.get(name)
        if known is None or body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return self._written(name, known["spec"] | body["spec"])

    def _written(self, name: str, spec: Object) -> web.Response:
        if not self._api.reachable:
            return _status(503, "the server is away")
        metadata = {"name": name, "resourceVersion": str(next(self._versions))}
        self._leases[name] = {"metadata": metadata, "spec": spec}
        return web.json_response(self._leases[name])

    async def _map(self, request: web.Request) -> web.Response:
        return self._map_answer(request.match_info["name"])

    async def _new_map(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if self._api.reachable:
            self._maps.setdefault(name, body.get("data", {}))
        return self._map_answer(name)

    async def _patch_map(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        if self._api.reachable and name in self._maps:
            merge(self._maps[name], body.get("data", {}))
        return self._map_answer(name)

    def _map_answer(self, name: str) -> web.Response:
        if not self._api.reachable:
            return _status(503, "the server is away")
        if name not in self._maps:
            return _status(404, f'configmaps "{name}" not found')
        return web.json_response({"metadata": {"name": name}, "data": self._maps[name]})


def _status(code: int, message: str) -> web.Response:
    return web.Response(text=status_text(code, message), status=code, content_type="application/json")
