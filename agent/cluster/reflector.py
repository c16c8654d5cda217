"""A local copy of some API objects, kept true by list and watch, for as long as the API server is there.

While it is away the last copy stays. Sources: Kubernetes API concepts (efficient detection of
changes, streaming lists, bookmarks, 410 Gone).
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, ApiStatus, ApiUnavailable, KubeApi
from agent.kit.tasks import Backoff, Cell
from agent.model.pod import Metadata

log = structlog.get_logger()

WATCH_SECONDS = 300  # the server ends a watch after this; less a random part, so that nodes differ
# A server sends a bookmark about once a minute. A connection that brings neither event nor bookmark for this
# long may be half open (a balancer forgot it): another one shows what was missed, from the version seen last.
SILENCE_SECONDS = 90.0
STEADY_SECONDS = 10.0  # a watch that held this long was well: the next failure is a new one
LONGEST_RETRY_AFTER_SECONDS = 120.0  # what a server may ask for; more would leave the node deaf
LIST_SECONDS = 30.0  # for one page
PAGE_ITEMS = 500
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


class ApiObject(Protocol):
    """The attributes that a reflector needs of an object's type."""

    @property
    def metadata(self) -> Metadata:
        """The object's metadata."""


Item = TypeVar("Item", bound=ApiObject)


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class PartialObject(msgspec.Struct, frozen=True):
    """Any object, of which the metadata are all that is looked at."""

    metadata: Metadata


class Reflector(Generic[Item]):
    """Copies of the objects at `path` that match `selector`, by UID.

    `items` is published at each change; `synced` says whether it was complete at least once.
    """

    # Whether a plain list may come from the server's cache, which can be behind what others have written.
    from_cache = True

    def __init__(
        self, api: KubeApi, path: str, selector: Mapping[str, str], kind: type[Item], name: str
    ) -> None:
        self._api = api
        self._path = path
        self._selector = dict(selector)
        self._decoder = msgspec.json.Decoder(kind)
        self.name = name
        self._version = ""
        self._reached = "0"  # that a list from a cache must not be older than
        self._streaming_list = True
        self.items: Cell[Mapping[str, Item]] = Cell(MappingProxyType({}))
        self.synced = False
        self.problem: str | None = "not connected yet"
        self._logged_kind: str | None = None  # of the failure that was logged last
        self._silent = False  # the last watch ended for want of any event
        # When the server last showed that the complete copy is being kept true: an event, a bookmark or a
        # watch that it opened. On anyio's clock, in seconds; None: never.
        self.heard: float | None = None
        self.asked = float("-inf")  # when a list was last asked for, on the same clock
        self._watching: anyio.CancelScope | None = None
        # Called after each publication of `items`.
        self.on_change: Callable[[], None] | None = None

    async def run(self) -> None:
        """Keep the copy true until cancelled; the API server may come and go."""
        backoff = Backoff(first=0.2, longest=30.0, jitter=0.5)
        while True:
            started = anyio.current_time()
            asked = 0.0
            failure: Exception | None = None
            try:
                with anyio.CancelScope() as self._watching:
                    await self._watch()
            except (ApiError, msgspec.DecodeError) as error:
                failure = error
            if isinstance(failure, ApiRefused):
                if failure.status in (400, 422) and self._streaming_list and not self._version:
                    # Servers before 1.32, or with the gate off.
                    self._streaming_list = False
                    log.info("streaming_list_unsupported", of=self.name, answer=str(failure))
                    continue
                asked = min(failure.retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS)
            resumed = bool(self._version)
            if isinstance(failure, ApiRefused) and _is_outdated(failure):
                # What was seen once is not taken back by a server that is behind; one that was restored from
                # a backup never gets there.
                self._reached = (self._version or self._reached) if failure.status == 410 else "0"
                self._version = ""
            if resumed and _is_outdated(failure):
                self.problem = str(
                    failure
                )  # nobody's fault, but of the copy nothing is sure until a list has come
            elif failure is not None:
                self._failed(failure)
            steady = anyio.current_time() - started >= STEADY_SECONDS
            if steady:
                backoff.reset()
            # Whatever ends a watch at once would be called again without a breath, were it not for this.
            pause = 0.0 if steady and failure is None else backoff.next()
            await anyio.sleep(max(pause, asked))

    def list_again(self) -> None:
        """End the running watch and begin the next one with a list, none older than the copy."""
        self._reached, self._version = self._version or self._reached, ""
        if self._watching:
            self._watching.cancel()

    def _failed(self, error: Exception) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'status', '')}"
        if kind != self._logged_kind:
            log.warning("watch_interrupted", of=self.name, problem=str(error))
        self._logged_kind, self.problem = kind, str(error)

    async def _watch(self) -> None:
        """One watch, from where the last one ended or from the beginning."""
        seconds = int(WATCH_SECONDS * random.uniform(0.7, 1.0))  # noqa: S311  jitter, not a secret
        query = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        fresh: dict[str, Item] | None = None
        if not self._version:
            self.asked = anyio.current_time()
        if self._version:
            query["resourceVersion"] = self._version
        elif self._streaming_list:
            fresh = {}
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            await self._list()
            query["resourceVersion"] = self._version
        async with self._api.stream(self._path, query, 2 * SILENCE_SECONDS) as lines:
            if fresh is None:
                self._well()
            while True:
                with anyio.move_on_after(SILENCE_SECONDS) as silence:
                    line = await anext(lines, None)
                if silence.cancelled_caught:
                    self._fell_silent()
                    break
                if line is None:
                    break
                self._silent = False
                fresh = self._take(msgspec.json.decode(line, type=_Event), fresh)
                if fresh is None:
                    self.heard = anyio.current_time()
        if fresh is not None:
            raise ApiUnavailable(f"{self._path}: the server ended the list before it was complete")

    def _fell_silent(self) -> None:
        if not self._silent:
            log.info("watch_silent", of=self.name, seconds=SILENCE_SECONDS, action="it is opened again")
        self._silent = True

    def _take(self, event: _Event, fresh: dict[str, Item] | None) -> dict[str, Item] | None:
        """One event of a watch; answers the list under construction, None once it is complete."""
        if event.type == "ERROR":
            problem = msgspec.json.decode(event.object, type=ApiStatus)
            raise ApiRefused(problem.code, f"{self._path}: {problem.code} {problem.message}")
        if event.type == "BOOKMARK":
            mark = msgspec.json.decode(event.object, type=PartialObject).metadata
            if fresh is not None:
                if mark.annotations.get(INITIAL_EVENTS_END) != "true":
                    return fresh  # its version is no place to go on from: the copy is not complete
                self._publish(fresh)
                self._well()
            self._version = mark.resource_version
            return None
        item = self._decoded(event.object)
        if fresh is not None:
            if event.type == "DELETED":
                fresh.pop(item.metadata.uid, None)
            else:
                fresh[item.metadata.uid] = item
            return fresh
        self._version = item.metadata.resource_version
        self._changed(item, gone=event.type == "DELETED")
        return None

    def _decoded(self, raw: msgspec.Raw) -> Item:
        """As much of an object as is kept. Raises msgspec.DecodeError."""
        return self._decoder.decode(raw)

    def _changed(self, item: Item, *, gone: bool) -> None:
        items = dict(self.items.value)
        if gone:
            items.pop(item.metadata.uid, None)
        elif not self._is_older(item):
            items[item.metadata.uid] = item
        self._publish(items)

    def answered(self, item: Item) -> None:
        """Take up an object as the answer to a write shows it, ahead of the watch."""
        if item.metadata.uid in self.items.value and not self._is_older(item):
            self._publish({**self.items.value, item.metadata.uid: item})

    def _is_older(self, item: Item) -> bool:
        known = self.items.value.get(item.metadata.uid)
        return known is not None and is_newer(known.metadata.resource_version, item.metadata.resource_version)

    async def reached(self, version: str) -> None:
        """Return once the watch itself has shown `version` or a later one; bound it with a cancel scope."""
        while is_newer(version, self._version):
            await self.items.wait_change(self.items.version)

    async def _list(self) -> None:
        """A plain list, for servers without streaming lists; with a version it may be of the server's cache.

        Other lists come in pages: of the JSON of a whole cluster's pods no more than one is held at a time.
        """
        query = dict(self._selector)
        query |= {"resourceVersion": self._reached} if self.from_cache else {"limit": str(PAGE_ITEMS)}
        found: dict[str, Item] = {}
        version = ""
        async for page in self._api.pages(self._path, query, LIST_SECONDS):
            found |= {item.metadata.uid: item for item in map(self._decoded, page.items)}
            version = page.metadata.resource_version
        self._publish(found)
        self._version = version

    def _publish(self, items: dict[str, Item]) -> None:
        self.items.publish(MappingProxyType(items))
        if self.on_change:
            self.on_change()

    def _well(self) -> None:
        if self.problem is not None:
            log.info("watch_established", of=self.name)
        self.problem = self._logged_kind = None
        self.synced = True
        self.heard = anyio.current_time()


def is_newer(version: str, than: str) -> bool:
    """Whether a resource version is known to be later than another of the same resource.

    They are decimal numbers that grow (Kubernetes API concepts, resource versions: promised since 1.35, and
    so in every version before). Of any others nothing is known.
    """
    return version.isdecimal() and than.isdecimal() and int(version) > int(than)


def _is_outdated(error: Exception | None) -> bool:
    """The version to watch from is gone (410), or the server does not know it: too large (504).

    The latter passes by itself where the server is behind, and never where it was restored from a backup.
    """
    return isinstance(error, ApiRefused) and error.status in (410, 504)


# List and watch for many objects: each is turned into something small at once and passed on one by one.
#
# A `Reflector` keeps whole copies and publishes a new mapping for each change, which is right for one node's
# pods. For a cluster's it would copy a hundred thousand entries per event.

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Kept(NamedTuple, Generic[T]):
    """The part of an object that is kept while a list is being read."""

    metadata: Metadata
    value: T


class Listener(Protocol[T_contra]):
    """The receiver, by UID."""

    def replaced(self, values: Mapping[str, T_contra]) -> None:
        """The complete list of objects; any other is gone."""

    def changed(self, uid: str, value: T_contra) -> None:
        """One is new or different."""

    def removed(self, uid: str, value: T_contra) -> None:
        """One is gone."""


class DeltaReflector(Reflector[Kept[T]], Generic[T]):
    """`read` makes metadata and a small value of an object's JSON; nothing else of it is kept."""

    # A new leader must see all that the former one bound: streaming lists are never older than their request.
    from_cache = False

    def __init__(
        self,
        api: KubeApi,
        path: str,
        selector: Mapping[str, str],
        read: Callable[[bytes], tuple[Metadata, T]],
        listener: Listener[T],
        name: str,
    ) -> None:
        super().__init__(api, path, selector, Kept, name)
        self._read = read
        self._listener = listener

    def _decoded(self, raw: msgspec.Raw) -> Kept[T]:
        metadata, value = self._read(raw)
        return Kept(Metadata(uid=metadata.uid, resource_version=metadata.resource_version), value)

    def _publish(self, items: dict[str, Kept[T]]) -> None:
        self._listener.replaced({uid: kept.value for uid, kept in items.items()})

    def _well(self) -> None:
        super()._well()
        if self.on_change:
            self.on_change()

    def _changed(self, item: Kept[T], *, gone: bool) -> None:
        pass_on = self._listener.removed if gone else self._listener.changed
        pass_on(item.metadata.uid, item.value)
