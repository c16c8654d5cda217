"""Keeps the newest PodResources list at hand for whoever reports on pods; decisions ask anew."""

import anyio
import structlog

from agent.kit.cell import Cell
from agent.kubelet.podresources import PodList, PodResources, PodResourcesUnavailable

log = structlog.get_logger()

REFRESH_SECONDS = 5.0


class HoldingsWatch:
    """A cell with who holds what, refreshed on a timer: the kubelet tells nobody when a pod frees devices."""

    def __init__(self, client: PodResources) -> None:
        self._client = client
        self.cell: Cell[PodList | None] = Cell(None)  # None: never read, or not readable now
        self.problem: str | None = "PodResources has not been read yet"

    async def run(self) -> None:
        """Refresh for ever."""
        while True:
            try:
                holdings = await self._client.list()
            except PodResourcesUnavailable as error:
                self._told(str(error))
                holdings = None
            else:
                self._told(None)
            if holdings != self.cell.value:
                self.cell.publish(holdings)
            await anyio.sleep(REFRESH_SECONDS)

    def _told(self, problem: str | None) -> None:
        if problem != self.problem:
            if problem:
                log.warning("pod_resources_unavailable", problem=problem)
            else:
                log.info("pod_resources_readable")
            self.problem = problem
