"""The DRA door of the node: GPUs as devices of DRA, with its tasks and all that is known of it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Self

import anyio
import anyio.to_thread
import structlog

from agent.cluster.nudges import PodNudges
from agent.cluster.reach import ClusterAccess
from agent.dra.driver import ClaimPreparer
from agent.dra.ledger import ClaimLedger
from agent.dra.offers import Offers
from agent.dra.publisher import SlicePublisher
from agent.dra.reports import ClusterClaimReports
from agent.holdings import claim_checkpoint
from agent.kit.tasks import Cell, follow
from agent.kubelet.claim_service import ClaimEndpoint
from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.modes.desired import ClaimRequests
from agent.modes.planner import SwitchState
from agent.modes.wing import Node, Task, Wing
from agent.telemetry import definitions as d
from agent.telemetry.series import Series

log = structlog.get_logger()

LOOK_SECONDS = 5.0  # how often the kubelet's record of claims is read
FIRST_SECONDS = 2.0  # how long it is waited for what slices of before list
STOPPING_SECONDS = 1.0


class DraDoor:
    """One per agent; `build` makes it."""

    def __init__(
        self, node: Node, cluster: ClusterAccess, wings: Mapping[Mode, Wing], switch: Cell[SwitchState]
    ) -> None:
        """See `build`."""
        configured = node.settings.dra
        self._root = Path(node.settings.kubelet.root)
        self._node = node
        self.requests = ClaimRequests(
            tuple(mode for mode in (WHOLE_GPUS, SHARES) if getattr(node.settings.modes, mode.value))
        )
        self._offers = Offers(
            node.name,
            node.snapshot,
            node.assignment,
            switch,
            self.requests,
            wings,
            configured.reserve_whole,
            node.settings.mps.most_clients,
            node.injector.looked,
        )
        self.ledger = ClaimLedger(self.requests, self._offers.sizes, configured.keep_daemon_seconds)
        self._reports = ClusterClaimReports(cluster.api, cluster.events)
        self.preparer = ClaimPreparer(
            node.name,
            cluster.api,
            node.pods,
            wings,
            node.snapshot,
            node.assignment,
            switch,
            self.ledger,
            self._reports,
            node.holdings.allocated,
        )
        self.endpoint = ClaimEndpoint(self.preparer, self._root)
        self.publisher = SlicePublisher(
            cluster.api,
            node.name,
            lambda: (cluster.node.uid, _kubelet(cluster)),
            self._offers,
            self.requests.listed,
            self.endpoint.service.registered,
            partial(node.event, warning=True),
            Path(node.settings.host.sysfs),
        )
        asked = self.preparer.asked_pods
        self._nudges = PodNudges(cluster.api, cluster.pods, asked, self.ledger.held)
        self._nudges_wanted = configured.nudge_pods
        self._unreadable = ""

    @classmethod
    async def build(
        cls, node: Node, cluster: ClusterAccess, wings: Mapping[Mode, Wing], switch: Cell[SwitchState]
    ) -> Self:
        """Make it, and read who has devices from before; starts no task."""
        door = cls(node, cluster, wings, switch)
        record = node.holdings.cell.value
        if not await door._read() and record:
            door.ledger.adopt(record.holdings)
        return door

    async def taken_up(self) -> None:
        """Return once it is known what slices of before list, or that this takes long. Its tasks must run."""
        await self.publisher.wait_listed(FIRST_SECONDS)

    def tasks(self) -> Sequence[Task]:
        found = [
            Task("dra slices", self.publisher.run),
            Task("dra endpoint", self.endpoint.run),
            Task("dra claims", self._keep),
            Task("dra health", self._tell_health),
            Task("dra reports", self._reports.run),
        ]
        return [*found, Task("dra nudges", self._nudges.run)] if self._nudges_wanted else found

    async def closed(self, until: float) -> None:
        """Return once no more claims come to devices whose agent stops; bounded in time.

        `until`: by when at the latest, by the clock of the loop; what is over by then gets no time.
        """
        if self.requests.listed.value:
            await self.publisher.tainted(min(STOPPING_SECONDS, until - anyio.current_time()))

    async def _keep(self) -> None:
        """Keep the ledger true to the kubelet's record, for ever, however often claims come and go."""
        due = anyio.current_time() + LOOK_SECONDS
        while True:
            pause, seen = self.ledger.cool(), self.ledger.held.version
            left = due - anyio.current_time()
            with anyio.move_on_after(left if pause is None else min(left, pause)):
                await self.ledger.held.wait_change(seen)
            if anyio.current_time() >= due:
                await self._read()
                due = anyio.current_time() + LOOK_SECONDS

    async def _read(self) -> bool:
        """Whether there is a record to read."""
        began, unreadable = monotonic(), ""
        try:
            found = await anyio.to_thread.run_sync(claim_checkpoint.read, self._root)
        except claim_checkpoint.ClaimsUnreadable as error:
            found, unreadable = None, str(error)
            if unreadable != self._unreadable:
                log.warning("claims_unreadable", problem=unreadable)
        self._unreadable = unreadable
        if found is not None:
            self.ledger.read(found, began)
        return found is not None

    async def _tell_health(self) -> None:
        def tell() -> None:
            verdicts = self._offers.verdicts()
            if verdicts != self.preparer.health.value:
                self.preparer.health.publish(verdicts)

        await follow(tell, self._node.snapshot)

    def remarks(self) -> list[str]:
        """Degradations, each in a sentence."""
        wanted = bool(self._offers.now())
        found = self.publisher.remarks() if wanted or self.requests.listed.value else []
        found += self._offers.remarks()
        if wanted and (blocker := self.endpoint.blocker):
            found.append(blocker)
        return found + ([self._unreadable] if self._unreadable else [])

    def metrics(self) -> Iterator[Series]:
        stats = self.preparer.stats
        yield d.DRA_OPEN, self.publisher.open and self.endpoint.blocker is None, ()
        yield d.DRA_CLAIMS, len(self.ledger.held.value), ()
        for outcome, count in stats.prepares.items():
            yield d.DRA_PREPARES, count, (outcome,)
        yield d.DRA_PREPARE_SECONDS, stats.seconds, ()
        yield d.DRA_SLICE_WRITES, self.publisher.writes, ("ok",)
        yield d.DRA_SLICE_WRITES, self.publisher.failures, ("failed",)
        yield d.DRA_NUDGES, self._nudges.nudges, ()


def _kubelet(cluster: ClusterAccess) -> str:
    value = cluster.node.value
    return value.status.node_info.kubelet_version if value else ""
