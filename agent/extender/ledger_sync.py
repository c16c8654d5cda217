"""Keeps the ledger true: one watch for the nodes, one for the bound pods that have not ended."""

from collections.abc import Callable, Mapping

import anyio
import structlog

from agent.cluster.api import KubeApi
from agent.cluster.reflector import DeltaReflector
from agent.extender.fleet import BoundPod, Fleet, LedgerNode
from agent.extender.objects import read_node, read_pod
from agent.extender.settings import DEAD_WATCH_SECONDS, UNSHOWN_SECONDS
from agent.kit.tasks import Cell, Supervisor

log = structlog.get_logger()

BOUND = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
EXPIRY_SECONDS = 1.0


class _Nodes:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def replaced(self, values: Mapping[str, LedgerNode]) -> None:
        for name in self._fleet.nodes.keys() - {node.name for node in values.values()}:
            self._fleet.drop_node(name)
        for node in values.values():
            self._fleet.set_node(node)

    def changed(self, uid: str, value: LedgerNode) -> None:
        del uid
        self._fleet.set_node(value)

    def removed(self, uid: str, value: LedgerNode) -> None:
        del uid
        self._fleet.drop_node(value.name)


class _Pods:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.asked: Callable[[], float] = anyio.current_time  # when the list that comes was asked for

    def replaced(self, values: Mapping[str, BoundPod | None]) -> None:
        self._fleet.unlisted(values.keys(), self.asked())
        for uid in self._fleet.bound.keys() - values.keys():
            self._fleet.drop_pod(uid)
        for uid, pod in values.items():
            self.changed(uid, pod)

    def changed(self, uid: str, value: BoundPod | None) -> None:
        if value is not None:
            self._fleet.set_pod(value)
        elif self._fleet.where(uid):  # it no longer asks for a GPU
            self._fleet.drop_pod(uid)

    def removed(self, uid: str, value: BoundPod | None) -> None:
        del value
        self._fleet.drop_pod(uid)


class LedgerSync:
    """Two watches into one ledger. It starts from nothing, with lists that are not older than its start."""

    def __init__(
        self,
        api: KubeApi,
        fleet: Fleet,
        supervisor: Supervisor,
        expired: Callable[[int], None] = lambda _: None,
        gap: Callable[[], str] = str,
    ) -> None:
        """`expired` is called with the number of choices that were just dropped.

        `gap`: why the ledger lacks something that no watch of its own shows; empty: it does not.
        """
        self.fleet = fleet
        self._gap = gap
        self._supervisor = supervisor
        self._expired = expired
        self.nodes = DeltaReflector(api, "/api/v1/nodes", {}, read_node, _Nodes(fleet), "nodes")
        pods = _Pods(fleet)
        self.pods = DeltaReflector(
            api, "/api/v1/pods", {"fieldSelector": BOUND}, read_pod, pods, "bound pods"
        )
        pods.asked = lambda: self.pods.asked
        self._heard = float("-inf")  # life of the watch of pods that was there a look ago
        self._listed = float("-inf")  # when a list of pods was asked for, for bindings that were not shown
        self.complete: Cell[bool] = Cell(False)
        self.nodes.on_change = self.pods.on_change = self.look

    @property
    def ages(self) -> Mapping[str, float]:
        """Seconds since each watch last showed a sign of life, by resource; without those that never did."""
        now = anyio.current_time()
        watches = (("nodes", self.nodes), ("pods", self.pods))
        return {name: now - watch.heard for name, watch in watches if watch.heard is not None}

    @property
    def waits_for(self) -> str:
        """Gaps of the ledger, in words; empty: none."""
        missing = [one.name for one in (self.nodes, self.pods) if not one.synced]
        if missing:
            return f"the list of {' and '.join(missing)} is not complete yet"
        return self._gap() or "; ".join(
            f"the watch of {name} has been dead for {age:.0f} s"
            for name, age in self.ages.items()
            if age > DEAD_WATCH_SECONDS
        )

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._supervisor.restarting, "node watch", self.nodes.run)
            group.start_soon(self._supervisor.restarting, "pod watch", self.pods.run)
            while True:
                await anyio.sleep(EXPIRY_SECONDS)
                self.look()
                self._let_go(anyio.current_time())

    def _let_go(self, now: float) -> None:
        """Drop choices whose time is over, or ask for a list that shows their end."""
        # While the watch is down nothing can show a pod as bound: its choice must stay.
        if self.pods.problem is not None:
            return
        self._expired(len(self.fleet.expire(now, self._heard)))
        # A watch that was opened again shows life before what it had missed: that counts a look later.
        self._heard = self._heard if self.pods.heard is None else self.pods.heard
        # A pod that ended between its Binding and a list that was asked for before the answer came would
        # otherwise hold its GPUs until some other list.
        if now - max(self.fleet.unshown_since(), self._listed) > UNSHOWN_SECONDS:
            self._listed = now
            log.warning("binding_not_shown", action="the bound pods are listed again")
            self.pods.list_again()

    def look(self) -> None:
        """Publish `complete`: both lists are known, and both watches have shown life lately."""
        complete = not self.waits_for
        if complete != self.complete.value:
            self.complete.publish(complete)
