"""The own Node object as the mode room needs it: one adapter over the cluster room."""

from collections.abc import Mapping
from typing import Any

from agent.cluster.api import ApiError
from agent.cluster.events import EventRecorder
from agent.cluster.node import NodeObject
from agent.kit.cell import Cell
from agent.node.capacity import Figures, FiguresFailed
from agent.node.conditions import ReportFailed, now
from agent.node.taint import EFFECT, TAINT, HoldFailed


class OwnNode:
    """Implements what sources, figures and report each ask for."""

    def __init__(self, node: NodeObject, events: EventRecorder) -> None:
        self._node = node
        self._events = events

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""
        return self._node.reflector.items

    def labels(self) -> Mapping[str, str] | None:
        """The node's labels; None: not known yet."""
        node = self._node.value
        return None if node is None else node.metadata.labels

    def annotations(self) -> Mapping[str, str]:
        """The node's annotations."""
        node = self._node.value
        return {} if node is None else node.metadata.annotations

    def figures(self, resources: frozenset[str]) -> Figures | None:
        """Capacity and allocatable as the node's status has them; None: not known now."""
        node = self._node.value
        if node is None or self._node.reflector.problem:
            return None
        capacity, allocatable = node.status.capacity, node.status.allocatable
        return {name: (_count(capacity.get(name)), _count(allocatable.get(name))) for name in resources}

    async def patch_resources(self, figures: Figures) -> None:
        """Write capacity and allocatable. Raises FiguresFailed."""
        try:
            await self._node.patch_resources(figures)
        except ApiError as error:
            raise FiguresFailed(str(error)) from error

    def held(self) -> bool:
        """Whether the node carries our taint, as last seen."""
        node = self._node.value
        return node is not None and any(each.get("key") == TAINT for each in node.spec.taints)

    async def hold(self, *, held: bool) -> None:
        """Set or remove our taint. Raises HoldFailed."""
        try:
            await self._node.set_taint(TAINT, EFFECT, present=held)
        except ApiError as error:
            raise HoldFailed(str(error)) from error

    async def write_metadata(self, labels: Mapping[str, str | None], annotations: Mapping[str, str]) -> None:
        """Set labels (None removes one) and annotations. Raises ReportFailed."""
        try:
            await self._node.patch_metadata(labels, dict(annotations))
        except ApiError as error:
            raise ReportFailed(str(error)) from error

    async def write_condition(self, kind: str, status: str, reason: str, message: str, changed: str) -> None:
        """Write one condition. Raises ReportFailed."""
        try:
            await self._node.patch_condition(kind, status, reason, message, changed, now())
        except ApiError as error:
            raise ReportFailed(str(error)) from error

    def event(self, reason: str, message: str, warning: bool) -> None:
        """An event about the node; never waits."""
        self._events.node(reason, message, warning)


def _count(quantity: str | None) -> int:
    """A quantity of an extended resource: those are whole numbers, written plain or with a decimal suffix."""
    if not quantity:
        return 0
    factors = {"k": 10**3, "M": 10**6, "G": 10**9}
    if quantity[-1] in factors and quantity[:-1].isdigit():
        return int(quantity[:-1]) * factors[quantity[-1]]
    return int(quantity) if quantity.isdigit() else -1
