"""Keeps the inventory true: opens NVML, enumerates GPUs, looks again every few seconds."""

import anyio

from agent.inventory.actor import Inventory
from agent.inventory.reducer import Scanned, Unavailable
from agent.inventory.snapshot import Unreadable
from agent.kit.supervise import FatalError
from agent.model.gpu import Driver, Gpu
from agent.nvml.errors import NvmlDriverMismatch, NvmlError
from agent.nvml.lane import Lane
from agent.nvml.port import NvmlPort

SCAN_SECONDS = 2.0
OPEN_RETRY_SECONDS = 2.0
OPEN_DEADLINE_SECONDS = 30.0  # a cold driver without persistence mode initialises each GPU in turn


class Scanner:
    """The task that learns of GPUs by asking."""

    def __init__(self, nvml: NvmlPort, lane: Lane, inventory: Inventory) -> None:
        self._nvml = nvml
        self._lane = lane
        self._inventory = inventory
        self._open = False

    async def run(self) -> None:
        """Scan for ever; raises FatalError when only a new process can help."""
        try:
            while True:
                pause = SCAN_SECONDS
                try:
                    driver = await self._lane.run(self._nvml.open, deadline=OPEN_DEADLINE_SECONDS)
                    self._open = True
                    while True:
                        await self._inventory.mailbox.post(await self._scan(driver))
                        await anyio.sleep(SCAN_SECONDS)
                except NvmlDriverMismatch as error:
                    await self._inventory.mailbox.post(Unavailable(str(error)))
                    raise FatalError(str(error)) from error
                except NvmlError as error:
                    await self._inventory.mailbox.post(Unavailable(str(error)))
                    pause = OPEN_RETRY_SECONDS
                await self._close()
                await anyio.sleep(pause)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _scan(self, driver: Driver) -> Scanned:
        count = await self._lane.run(self._nvml.count)
        gpus: list[Gpu] = []
        unreadable: list[Unreadable] = []
        for index in range(count):
            try:
                gpus.append(await self._lane.run(self._nvml.describe, index))
            except NvmlDriverMismatch:
                raise
            except NvmlError as error:
                unreadable.append(Unreadable(index, str(error)))
        return Scanned(driver, tuple(gpus), tuple(unreadable))

    async def _close(self) -> None:
        if self._open:
            self._open = False
            try:
                await self._lane.run(self._nvml.close)
            except NvmlError:
                return  # it is closed as far as it can be; the next open tells more
