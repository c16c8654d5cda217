"""The own Node object as the rooms above see it: what is read of it and written to it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from agent.kit.cell import Cell

Amounts = Mapping[str, tuple[int, int]]  # resource -> (capacity, allocatable)


class OwnCondition(NamedTuple):
    """A condition of the node, and since when its status has been so (RFC 3339)."""

    status: str
    reason: str
    message: str
    changed: str = ""


class NodeNotWritten(Exception):
    """A write to the Node object failed; the text says why."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused`: the API server said no. Else the write may have been carried out, or still be."""
        self.refused = refused
        super().__init__(message)


class OwnNode(Protocol):
    """Reads answer from the newest copy, which own writes are part of once they are answered.

    Every write raises NodeNotWritten.
    """

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""

    def labels(self) -> Mapping[str, str] | None:
        """The node's labels; None: not known yet."""

    def annotations(self) -> Mapping[str, str]:
        """The node's annotations."""

    def condition(self, kind: str) -> OwnCondition | None:
        """One of the node's conditions; None: it has none of that type, or is not known yet."""

    def amounts(self, resources: frozenset[str]) -> Amounts | None:
        """Capacity and allocatable in the node's status, 0 where absent; None: not known yet."""

    def tainted(self) -> bool | None:
        """Whether the node carries the agent's taint; None: not known yet."""

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        """Set labels and annotations; None removes one."""

    async def write_condition(self, kind: str, status: str, reason: str, message: str, changed: str) -> None:
        """Write one condition."""

    async def write_amounts(self, amounts: Amounts) -> None:
        """Write capacity and allocatable."""

    async def write_taint(self, *, present: bool) -> None:
        """Set or remove the agent's taint, keep those of others."""

    async def seen(self) -> None:
        """Return once the watch has shown the last write, too; bound it with a cancel scope."""

    def event(self, reason: str, message: str, warning: bool) -> None:
        """An event about the node; never waits."""
