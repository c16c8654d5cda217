"""A local copy of some API objects, kept true by list and watch, for as long as the API server is there.

While it is away the last copy stays. Sources: Kubernetes API concepts (efficient detection of
changes, streaming lists, bookmarks, 410 Gone).
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell

log = structlog.get_logger()

WATCH_SECONDS = 300  # the server ends a watch after this; less a random part, so that nodes differ
SILENCE_MARGIN_SECONDS = 15.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    """ObjectMeta, as far as it is used."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    deletion_timestamp: str | None = None


class ApiObject(Protocol):
    """What a reflector needs of an object's type."""

    @property
    def metadata(self) -> Metadata:
        """The object's metadata."""


Item = TypeVar("Item", bound=ApiObject)


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _Problem(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Relist(Exception):
    """The copy can no longer be kept true by watching: begin anew."""


class Reflector(Generic[Item]):
    """Copies of the objects at `path` that match `selector`, by UID.

    `items` is published once per change; `synced` tells whether it was complete at least once.
    """

    def __init__(
        self, api: KubeApi, path: str, selector: Mapping[str, str], kind: type[Item], name: str
    ) -> None:
        self._api = api
        self._path = path
        self._selector = dict(selector)
        self._decoder = msgspec.json.Decoder(kind)
        self._name = name
        self._version = ""
        self._streaming_list = True
        self.items: Cell[Mapping[str, Item]] = Cell(MappingProxyType({}))
        self.synced = False
        self.problem: str | None = "not connected yet"
        # Called for every object as it comes, before `items` is published.
        self.on_change: Callable[[], None] | None = None

    async def run(self) -> None:
        """Keep the copy true until cancelled; the API server may come and go."""
        backoff = Backoff(first=0.2, longest=30.0, jitter=0.5)
        while True:
            pause = 0.0
            try:
                await self._watch()
                backoff.reset()
            except _Relist:
                self._version = ""
            except ApiRefused as error:
                if error.status in (400, 422) and self._streaming_list and not self._version:
                    # Servers before 1.32, or with the gate off: watch from a version that may be old.
                    self._streaming_list = False
                    continue
                pause = self._failed(error, backoff, error.retry_after)
                if error.status == 410:
                    self._version = ""
            except (ApiError, msgspec.DecodeError) as error:
                pause = self._failed(error, backoff, None)
            await anyio.sleep(pause)

    def _failed(self, error: Exception, backoff: Backoff, retry_after: float | None) -> float:
        if self.problem is None or not self.synced:
            log.warning("watch_interrupted", of=self._name, problem=str(error))
        self.problem = str(error)
        return max(backoff.next(), retry_after or 0.0)

    async def _watch(self) -> None:
        """One watch, from where the last one ended or from the beginning."""
        seconds = int(WATCH_SECONDS * random.uniform(0.7, 1.0))  # noqa: S311  jitter, not a secret
        query = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        fresh: dict[str, Item] | None = None
        if self._version:
            query["resourceVersion"] = self._version
        elif self._streaming_list:
            fresh = {}
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            await self._list()
            query["resourceVersion"] = self._version
        async with self._api.stream(self._path, query, seconds + SILENCE_MARGIN_SECONDS) as lines:
            if fresh is None:
                self._well()
            async for line in lines:
                fresh = self._take(msgspec.json.decode(line, type=_Event), fresh)
        if fresh is not None:
            raise ApiUnavailable(f"{self._path}: the server ended the list before it was complete")

    def _take(self, event: _Event, fresh: dict[str, Item] | None) -> dict[str, Item] | None:
        """One event of a watch; answers the list under construction, None once it is complete."""
        if event.type == "ERROR":
            problem = msgspec.json.decode(event.object, type=_Problem)
            if problem.code in (410, 504):  # gone, or the server does not know that version (yet)
                raise _Relist
            raise ApiRefused(problem.code, f"{self._path}: {problem.message}")
        if event.type == "BOOKMARK":
            mark = msgspec.json.decode(event.object, type=_Bookmark).metadata
            self._version = mark.resource_version
            if fresh is not None and mark.annotations.get(INITIAL_EVENTS_END) == "true":
                self._publish(fresh)
                self._well()
                return None
            return fresh
        item = self._decoder.decode(event.object)
        if fresh is not None:
            fresh[item.metadata.uid] = item
            return fresh
        self._version = item.metadata.resource_version
        items = dict(self.items.value)
        if event.type == "DELETED":
            items.pop(item.metadata.uid, None)
        else:
            items[item.metadata.uid] = item
        self._publish(items)
        return None

    async def _list(self) -> None:
        """A plain list, for servers without streaming lists; version 0 comes from the server's cache."""
        data = await self._api.get(self._path, self._selector | {"resourceVersion": "0"}, deadline=30.0)

        class Page(msgspec.Struct):
            metadata: Metadata
            items: list[msgspec.Raw] = msgspec.field(default_factory=list)

        page = msgspec.json.decode(data, type=Page)
        found = [self._decoder.decode(raw) for raw in page.items]
        self._publish({item.metadata.uid: item for item in found})
        self._version = page.metadata.resource_version

    def _publish(self, items: dict[str, Item]) -> None:
        self.items.publish(MappingProxyType(items))
        if self.on_change:
            self.on_change()

    def _well(self) -> None:
        if self.problem is not None:
            log.info("watch_established", of=self._name)
        self.problem = None
        self.synced = True
