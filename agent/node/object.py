"""The own Node object over the cluster room: the one implementation of `agent.cluster.own_node.OwnNode`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agent.cluster.api import ApiError, ApiRefused
from agent.cluster.event_recorder import EventRecorder
from agent.cluster.node import NodeObject
from agent.cluster.own_node import Amounts, NodeNotWritten, OwnCondition
from agent.kit.cell import Cell
from agent.kit.timestamps import now
from agent.model.units import units
from agent.node.taint import EFFECT, TAINT

SERVER_ERROR = 500


class ClusterNode:
    """See `agent.cluster.own_node.OwnNode`."""

    def __init__(self, node: NodeObject, events: EventRecorder) -> None:
        self._node = node
        self._events = events

    @property
    def changes(self) -> Cell[Any]:
        return self._node.reflector.items

    def labels(self) -> Mapping[str, str] | None:
        node = self._node.value
        return None if node is None else node.metadata.labels

    def annotations(self) -> Mapping[str, str]:
        node = self._node.value
        return {} if node is None else node.metadata.annotations

    def condition(self, kind: str) -> OwnCondition | None:
        node = self._node.value
        found = next((each for each in node.status.conditions if each.type == kind), None) if node else None
        if found is None:
            return None
        return OwnCondition(found.status, found.reason, found.message, found.last_transition_time or "")

    def amounts(self, resources: frozenset[str]) -> Amounts | None:
        node = self._node.value
        if node is None:
            return None
        capacity, allocatable = node.status.capacity, node.status.allocatable
        return {name: (_count(capacity.get(name)), _count(allocatable.get(name))) for name in resources}

    def tainted(self) -> bool | None:
        node = self._node.value
        return None if node is None else any(each.get("key") == TAINT for each in node.spec.taints)

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        with _translated():
            await self._node.patch_metadata(labels, dict(annotations))

    async def write_condition(self, kind: str, status: str, reason: str, message: str, changed: str) -> None:
        with _translated():
            await self._node.patch_condition(kind, status, reason, message, changed, now())

    async def write_amounts(self, amounts: Amounts) -> None:
        with _translated():
            await self._node.patch_resources(amounts)

    async def write_taint(self, *, present: bool) -> None:
        with _translated():
            await self._node.set_taint(TAINT, EFFECT, present=present)

    async def seen(self) -> None:
        await self._node.seen()

    def event(self, reason: str, message: str, warning: bool) -> None:
        self._events.node(reason, message, warning)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ApiRefused as error:
        raise NodeNotWritten(str(error), refused=error.status < SERVER_ERROR) from error
    except ApiError as error:
        raise NodeNotWritten(str(error)) from error


def _count(quantity: str | None) -> int:
    """Units of an extended resource; -1: the quantity cannot be understood."""
    try:
        return units(quantity or "0")
    except ValueError:
        return -1
