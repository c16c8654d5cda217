"""Keeps the assignment of GPUs to modes true to what is wanted and to the inventory."""

import structlog

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.model.modes import Assignment, Mode
from agent.modes.planner import plan

log = structlog.get_logger()


class ModeSwitcher:
    """Owns the assignment that the plugins read."""

    def __init__(self, inventory: Cell[Snapshot], wanted: Mode) -> None:
        self._inventory = inventory
        self._wanted = wanted
        self.assignment: Cell[Assignment] = Cell(plan(inventory.value, wanted))

    async def run(self) -> None:
        """Follow the inventory for ever."""
        async for snapshot in self._inventory.values():
            before, after = self.assignment.value, plan(snapshot, self._wanted)
            if after == before:
                continue
            self.assignment.publish(after)
            for uuid, new in after.gpus.items():
                if new != before.of(uuid):
                    log.info("gpu_mode", gpu=uuid, mode=new.mode.value, reason=new.reason or None)
