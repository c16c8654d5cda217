"""List and watch for many objects: each is turned into something small at once and passed on one by one.

A `Reflector` keeps whole copies and publishes a new mapping for each change, which is right for one node's
pods. For a cluster's it would copy a hundred thousand entries per event.
"""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from agent.cluster.api import KubeApi
from agent.cluster.reflector import Reflector
from agent.model.pod import Metadata

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


class _Decoder(Generic[T]):
    def __init__(self, read: Callable[[bytes], tuple[Metadata, T]]) -> None:
        self._read = read

    def decode(self, raw: bytes) -> Kept[T]:
        metadata, value = self._read(raw)
        return Kept(Metadata(uid=metadata.uid, resource_version=metadata.resource_version), value)


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
        # `decode` is all that is used of a decoder.
        self._decoder = _Decoder(read)  # type: ignore[assignment]
        self._listener = listener

    def _publish(self, items: dict[str, Kept[T]]) -> None:
        self._listener.replaced({uid: kept.value for uid, kept in items.items()})

    def _well(self) -> None:
        super()._well()
        if self.on_change:
            self.on_change()

    def _changed(self, item: Kept[T], *, gone: bool) -> None:
        pass_on = self._listener.removed if gone else self._listener.changed
        pass_on(item.metadata.uid, item.value)
