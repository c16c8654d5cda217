"""Filter and prioritize over a whole cluster in milliseconds: a node is judged again only when it changes.

Pods come in a few shapes. For each shape the verdict on every node is kept until that node changes.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import anyio.lowlevel

from agent.extender.choice import Worth
from agent.extender.fleet import UNKNOWN_NODE, Fleet
from agent.extender.free_capacity import Summary
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import PodDemand
from agent.model.placement import PlacementPolicy

SHAPES = 32
BEST = 10  # kube-scheduler's MaxExtenderPriority
# Work for one request, in steps of `packing` (about 5 us each), and after how much of it others run. Nodes
# that are left over are looked at with the next request for a pod of the same shape.
REQUEST_STEPS = 3000
PAUSE_STEPS = 400
NODES_AT_ONCE = 2048
PICK_STEPS = 8  # of a choice with its worth, whatever the search takes
NOT_REACHED = "not reached: containers of such sizes take long to place; the next attempt goes on from here"


@dataclass(slots=True)
class _Shape:
    """Answers for one demand that still hold."""

    verdicts: dict[str, str] = field(default_factory=dict)  # by node
    alike: dict[Summary, str] = field(default_factory=dict)
    worths: dict[PlacementPolicy, dict[str, Worth]] = field(
        default_factory=lambda: {each: {} for each in PlacementPolicy}
    )


class Verdicts:
    """Answers for one ledger; takes its `on_change`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._shapes: OrderedDict[PodDemand, _Shape] = OrderedDict()  # the one that was used last is last
        fleet.on_change = self._changed

    async def judge(
        self, demand: PodDemand, names: Iterable[str], most_steps: int = REQUEST_STEPS
    ) -> tuple[list[str], dict[str, str]]:
        """Nodes that a demand fits on, and the others with the reason."""
        shape = self._shape(demand)
        known, alike = shape.verdicts, shape.alike
        fitting: list[str] = []
        refused: dict[str, str] = {}
        verdict = self.fleet.verdict
        # Most nodes are like one that was judged before, which two look-ups tell.
        summaries = self.fleet.summaries if demand.by_summary else {}
        work, pause = SearchWork(), _Pause()
        for name in names:
            reason = known.get(name)
            if reason is None and (summary := summaries.get(name)) and summary in alike:
                reason = known[name] = alike[summary]
            if reason is None:
                if work.steps >= most_steps:
                    refused[name] = NOT_REACHED
                    continue
                reason = verdict(name, demand, work, alike)
                if reason != UNKNOWN_NODE:  # the ledger announces no change of it
                    known[name] = reason
                if pause.due(work):
                    await anyio.lowlevel.checkpoint()
            if reason:
                refused[name] = reason
            else:
                fitting.append(name)
        return fitting, refused

    async def rank(
        self, demand: PodDemand, policy: PlacementPolicy, names: Sequence[str], owner: str = ""
    ) -> list[int]:
        """0 to 10 for each node: 10 for the best, 9 for the next in worth, and so on.

        A score in proportion would let the ten best of a thousand nodes look alike. Of nodes with replicas of
        `owner` those with the fewest alone count, by the replicas that would share a GPU before all else.
        """
        replicas = self.fleet.replicas(owner)
        fewest = min((replicas.get(name, 0) for name in names), default=0) if replicas else 0
        # What is known of a node holds for pods that have no replicas there.
        known: dict[str, Worth] = {} if fewest else self._shape(demand).worths[policy]
        pick = self.fleet.pick
        work, pause = SearchWork(), _Pause()
        worths: list[Worth | None] = []
        for name in names:
            if replicas.get(name, 0) > fewest:
                worths.append(None)
            elif name not in known:
                if work.steps >= REQUEST_STEPS:
                    worths.append(None)
                    continue
                work.steps += PICK_STEPS
                found = pick(name, demand, policy, work, owner if fewest else "")
                worths.append(found.worth if found else None)
                if found:  # a node that does not fit is not asked about, and it may be unknown
                    known[name] = found.worth
                if pause.due(work):
                    await anyio.lowlevel.checkpoint()
            else:
                worths.append(known[name])
        distinct = {worth for worth in worths if worth is not None and worth[0] != float("inf")}
        scores = {worth: BEST - place for place, worth in enumerate(heapq.nsmallest(BEST, distinct))}
        return [0 if worth is None else scores.get(worth, 0) for worth in worths]

    def _shape(self, demand: PodDemand) -> _Shape:
        shape = self._shapes.setdefault(demand, _Shape())
        self._shapes.move_to_end(demand)
        if len(self._shapes) > SHAPES:
            self._shapes.popitem(last=False)
        return shape

    def _changed(self, name: str) -> None:
        for shape in self._shapes.values():
            shape.verdicts.pop(name, None)
            for worths in shape.worths.values():
                worths.pop(name, None)


class _Pause:
    """Says when other tasks should run: leases and bindings must not wait for a pod that is hard to place."""

    def __init__(self) -> None:
        self._nodes = 0
        self._steps = 0

    def due(self, work: SearchWork) -> bool:
        self._nodes += 1
        if self._nodes % NODES_AT_ONCE and work.steps - self._steps < PAUSE_STEPS:
            return False
        self._steps = work.steps
        return True
