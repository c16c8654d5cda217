"""Keeps the newest PodResources list at hand for whoever reports on pods; decisions ask anew."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time

import anyio
import anyio.to_thread
import structlog

from agent.kit.cell import Cell
from agent.kubelet import checkpoint
from agent.kubelet.podresources import Holding, PodList, PodResources, PodResourcesUnavailable
from agent.model.ids import SEPARATOR, BadDeviceId, Unit, parse
from agent.model.modes import Mode

log = structlog.get_logger()

REFRESH_SECONDS = 5.0
# While it cannot be read the agent is not ready, and a kubelet that restarts is back within a second or two.
RETRY_SECONDS = 0.5
# After an Allocate: the kubelet records it some milliseconds later, and pods seldom come alone. It is also
# the shortest time between two reads, for the socket's rate limit is everybody's on the node.
SOON_SECONDS = 0.5
BURST_SECONDS = 3.0
# A kubelet that has just started lists no pods before the API server has named them to it, while they run on.
# It is given so long from its start, or from the end of an outage of the API server.
NEW_KUBELET_SECONDS = 30.0

MODE_OF_UNIT: Mapping[Unit, Mode] = {
    Unit.WHOLE: Mode.PGPU,
    Unit.REPLICA: Mode.PGPU,
    Unit.VGPU_CORE: Mode.VGPU,
    Unit.VGPU_MEMORY: Mode.VGPU,
    Unit.MPS_CORE: Mode.MPS,
    Unit.MPS_MEMORY: Mode.MPS,
}


@dataclass(frozen=True, slots=True)
class Holder:
    """A container that holds units of a GPU, and in which mode it got them."""

    mode: Mode
    replica: bool  # of a time-sliced GPU
    holding: Holding

    @property
    def pod(self) -> str:
        """namespace/name of the pod."""
        return f"{self.holding.namespace}/{self.holding.pod}"


def holders_by_gpu(pods: PodList) -> dict[str, list[Holder]]:
    """Who holds what of each GPU, by UUID. Resources of other plugins are passed over."""
    found: dict[str, list[Holder]] = {}
    for holding in pods.holdings:
        # A container may hold hundreds of units: one of each kind and GPU is looked at.
        kinds: dict[str, str] = {}
        for text in holding.ids:
            kinds.setdefault(text.rstrip("0123456789") if SEPARATOR in text else text, text)
        shares: dict[tuple[str, Mode, bool], None] = {}
        for text in kinds.values():
            try:
                device = parse(text)
            except BadDeviceId:
                continue
            shares[device.gpu, MODE_OF_UNIT[device.unit], device.unit is Unit.REPLICA] = None
        for gpu, mode, replica in shares:
            found.setdefault(gpu, []).append(Holder(mode, replica, holding))
    return found


class HoldingsWatch:
    """A cell with who holds what, refreshed soon after each Allocate, and on a timer.

    The kubelet tells nobody when a pod frees devices.
    """

    def __init__(self, client: PodResources, checkpoints: Path | None = None) -> None:
        """`checkpoints`: the folder of the kubelet's checkpoint; None: a new kubelet is believed at once."""
        self.client = client
        self._checkpoints = checkpoints
        self._known: tuple[int, int] | None = None  # the socket of a kubelet that is believed
        # Whether the pod of a UID is known to have ended: the checkpoint goes on naming it until it is
        # written anew, which takes until the next pod comes.
        self.ended: Callable[[str], bool] = lambda _: False
        # Whether the API server does not answer: a new kubelet then knows the pods of its own files only,
        # which it lists as NAME-NODE.
        self.api_away: Callable[[], bool] = lambda: False
        self.node = ""
        self._blind_until = -math.inf  # on the event loop's clock
        self.cell: Cell[PodList | None] = Cell(None)  # None: never read, or not readable now
        self.problem: str | None = "PodResources has not been read yet"
        self._allocations: Cell[int] = Cell(0)

    def allocated(self) -> None:
        """The kubelet was handed devices: read soon who has got them."""
        self._allocations.publish(self._allocations.value + 1)

    async def run(self) -> None:
        """Refresh for ever."""
        seen = self._allocations.version
        with self.client.keeping_connection():
            while True:
                await self.refresh()
                pause = RETRY_SECONDS if self.problem else REFRESH_SECONDS
                with anyio.move_on_after(pause) as waited:
                    seen = await self._allocations.wait_change(seen)
                if not waited.cancelled_caught:
                    seen = await self._until_they_pause(seen)

    async def _until_they_pause(self, seen: int) -> int:
        """Pods come in bursts, and a read in the middle holds theirs up: wait for the end, within reason."""
        with anyio.move_on_after(BURST_SECONDS):
            while True:
                with anyio.move_on_after(SOON_SECONDS) as pause:
                    seen = await self._allocations.wait_change(seen)
                if pause.cancelled_caught:
                    break
        return seen

    async def refresh(self) -> PodList | None:
        """Read anew now; None: not readable, `problem` says why."""
        holdings: PodList | None
        try:
            holdings = listed = await self.client.list()
        except PodResourcesUnavailable as error:
            self._told(str(error))
            holdings = None
        else:
            if missing := await self._unlisted(listed):
                text = f"the kubelet has just started and does not list {missing} devices in use yet"
                self._told(text + ("; the API server is away" if self.api_away() else ""))
                return None
            self._told(None)
        if holdings != self.cell.value:
            self.cell.publish(holdings)
        return holdings

    async def _unlisted(self, found: PodList) -> int:
        """How many devices are held by the checkpoint of a kubelet that is new and does not list them yet.

        Whoever took its list for the truth would sell GPUs that are in use.
        """
        if self._checkpoints is None:
            return 0
        try:
            stat = await anyio.Path(self.client.path).stat()
        except OSError:
            return 0
        kubelet = (stat.st_ino, stat.st_ctime_ns)
        if kubelet == self._known:
            return 0
        if self.api_away() and not self._lists_api_pods(found):
            self._blind_until = anyio.current_time() + NEW_KUBELET_SECONDS
        young = time() - stat.st_ctime < NEW_KUBELET_SECONDS
        if young or anyio.current_time() < self._blind_until:
            # Read each time: entries of pods that have ended go when it is written anew.
            recorded = await anyio.to_thread.run_sync(checkpoint.read, self._checkpoints)
            listed = {text for holding in found.holdings for text in holding.ids}
            held = {
                text
                for (uid, _, _), ids in recorded.items()
                if not self.ended(uid)
                for text in ids
                if text.startswith("GPU-")
            }
            if missing := len(held - listed):
                return missing
        self._known = kubelet
        return 0

    def _lists_api_pods(self, found: PodList) -> bool:
        """Whether the kubelet has heard of its pods: the API server names them all at once."""
        return any(not pod.endswith(f"-{self.node}") for _, pod, _ in found.containers)

    def _told(self, problem: str | None) -> None:
        if problem != self.problem:
            if problem:
                log.warning("pod_resources_unavailable", problem=problem)
            else:
                log.info("pod_resources_readable")
            self.problem = problem
