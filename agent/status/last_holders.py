"""Who held what when the kubelet's records could last be read."""

from time import monotonic

from agent.kit.cell import Cell
from agent.model.holding import Record


class LastHolders:
    def __init__(self, cell: Cell[Record | None]) -> None:
        self._cell = cell
        self._last: Record | None = None
        self._lost: float | None = None  # since when there is nothing newer

    async def run(self) -> None:
        """Follow the record, for ever."""
        async for found in self._cell.values():
            self._take(found)

    def known(self) -> tuple[Record | None, float | None]:
        """The record, and its age in seconds; no age: it is of now, or there never was one."""
        self._take(self._cell.value)
        return self._last, None if self._lost is None or self._last is None else monotonic() - self._lost

    def _take(self, found: Record | None) -> None:
        if found is not None:
            self._last, self._lost = found, None
        elif self._lost is None:
            self._lost = monotonic()
