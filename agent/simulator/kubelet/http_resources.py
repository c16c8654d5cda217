"""The API group `resource.k8s.io` over HTTP: slices, classes and claims by every verb that a driver uses."""

from collections.abc import Awaitable, Callable, Iterator, Mapping

from aiohttp import web

from .api_server import Api
from .http_objects import Object, status_text
from .resource_objects import CLAIMS, CLASSES, GROUP, SLICES, Key, WriteRefused

Listing = Callable[[web.Request, Callable[[], Iterator[Object]]], Awaitable[web.StreamResponse]]


class ResourcesApi:
    """`listing` answers LIST and WATCH of a collection."""

    def __init__(self, api: Api, listing: Listing) -> None:
        self._api = api
        self._listing = listing
        self.version = "v1.37.2"

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        base = f"/apis/{GROUP}"
        routes = [
            web.get("/version", self._version),
            web.get(f"{base}/{{collection:{CLAIMS}}}", self._list),
            web.put(
                f"{base}/namespaces/{{namespace}}/{{collection:{CLAIMS}}}/{{name}}/status", self._put_status
            ),
        ]
        for path in (
            f"{base}/{{collection:{SLICES}|{CLASSES}}}",
            f"{base}/namespaces/{{namespace}}/{{collection:{CLAIMS}}}",
        ):
            routes += [
                web.get(path, self._list),
                web.post(path, self._post),
                web.get(f"{path}/{{name}}", self._get),
                web.put(f"{path}/{{name}}", self._put),
                web.delete(f"{path}/{{name}}", self._delete),
            ]
        return routes

    async def _version(self, request: web.Request) -> web.Response:  # noqa: ARG002  aiohttp's signature
        major, minor, _ = self.version.removeprefix("v").split(".", 2)
        return web.json_response({"major": major, "minor": minor, "gitVersion": self.version})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        wanted = dict(
            term.split("=", 1) for term in request.query.get("fieldSelector", "").split(",") if "=" in term
        )
        namespace = request.match_info.get("namespace")

        def chosen() -> Iterator[Object]:
            for item in self._api.resources.of(request.match_info["collection"]):
                if namespace in (None, item["metadata"].get("namespace", "")) and all(
                    _field(item, path) == value for path, value in wanted.items()
                ):
                    yield item

        return await self._listing(request, chosen)

    async def _get(self, request: web.Request) -> web.Response:
        return self._answer(lambda: self._api.resources.get(*_place(request)))

    async def _post(self, request: web.Request) -> web.Response:
        item = _placed(request, await request.json())
        trial = request.query.get("dryRun") == "All"
        return self._answer(lambda: self._api.resources.create(_place(request)[0], item, trial=trial), 201)

    async def _put(self, request: web.Request) -> web.Response:
        item = _placed(request, await request.json())
        return self._answer(lambda: self._api.resources.replace(_place(request)[0], item))

    async def _put_status(self, request: web.Request) -> web.Response:
        item = await request.json()

        def write() -> Object:
            known = self._api.resources.get(*_place(request))
            given = {"resourceVersion": item["metadata"].get("resourceVersion", "")}
            metadata = {**known["metadata"], **{key: value for key, value in given.items() if value}}
            return self._api.resources.replace(
                CLAIMS, {**known, "metadata": metadata, "status": item.get("status", {})}
            )

        return self._answer(write)

    async def _delete(self, request: web.Request) -> web.Response:
        return self._answer(lambda: self._api.resources.delete(*_place(request)))

    def _answer(self, call: Callable[[], Object], code: int = 200) -> web.Response:
        try:
            if not self._api.reachable:
                raise WriteRefused(503, "the server is away")
            return web.json_response(call(), status=code)
        except WriteRefused as error:
            text = status_text(error.code, str(error))
            return web.Response(text=text, status=error.code, content_type="application/json")


def _place(request: web.Request) -> tuple[str, Key]:
    found = request.match_info
    return found["collection"], (found.get("namespace", ""), found.get("name", ""))


def _placed(request: web.Request, item: Mapping[str, Object]) -> Object:
    namespace = request.match_info.get("namespace")
    metadata = {**item["metadata"], **({"namespace": namespace} if namespace else {})}
    return {**item, "metadata": metadata}


def _field(item: Object, path: str) -> object:
    found: object = item
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
