"""Filter and prioritize over a whole cluster in milliseconds: what was judged once is judged again on change.

Pods come in a few shapes. For each shape the verdict on every node is kept until that node changes.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from agent.extender.fleet import Fleet
from agent.extender.fleet_choice import Worth
from agent.extender.pod_demand import PodDemand
from agent.model.placement import Policy

SHAPES = 32
BEST = 10  # kube-scheduler's MaxExtenderPriority

K = TypeVar("K")
V = TypeVar("V")


class Verdicts:
    """Answers for one ledger; takes its `on_change`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._verdicts: OrderedDict[PodDemand, dict[str, str]] = OrderedDict()
        self._worths: OrderedDict[tuple[PodDemand, Policy], dict[str, Worth | None]] = OrderedDict()
        fleet.on_change = self._changed

    def judge(self, demand: PodDemand, names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Nodes that a demand fits on, and the others with the reason."""
        known = _shape(self._verdicts, demand)
        fitting: list[str] = []
        refused: dict[str, str] = {}
        verdict = self._fleet.verdict
        for name in names:
            reason = known.get(name)
            if reason is None:
                reason = known[name] = verdict(name, demand)
            if reason:
                refused[name] = reason
            else:
                fitting.append(name)
        return fitting, refused

    def rank(self, demand: PodDemand, policy: Policy, names: Sequence[str]) -> list[int]:
        """0 to 10 for each node: 10 for the best, 9 for the next in worth, and so on.

        A score in proportion would let the ten best of a thousand nodes look alike.
        """
        known = _shape(self._worths, (demand, policy))
        pick = self._fleet.pick
        for name in names:
            if name not in known:
                found = pick(name, demand, policy)
                known[name] = found.worth if found else None
        worths = [known[name] for name in names]
        distinct = {worth for worth in worths if worth is not None and worth[0] != float("inf")}
        scores = {worth: BEST - place for place, worth in enumerate(heapq.nsmallest(BEST, distinct))}
        return [0 if worth is None else scores.get(worth, 0) for worth in worths]

    def _changed(self, name: str) -> None:
        for verdicts in self._verdicts.values():
            verdicts.pop(name, None)
        for worths in self._worths.values():
            worths.pop(name, None)


def _shape(cache: OrderedDict[K, dict[str, V]], key: K) -> dict[str, V]:
    found = cache.get(key)
    if found is None:
        found = cache[key] = {}
        if len(cache) > SHAPES:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return found
