"""Exactness of what the scheduler allocates: every event of every claim is held against one rule.

No GPU is in two modes, none is whole twice, none has more shares than fit.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

from agent.model.modes import units
from tests.cluster.api import Object
from tests.cluster.claims_node import gpu_of
from tests.cluster.real_rig import RESOURCES
from tests.cluster.rig import Cluster

Result = Mapping[str, Any]
GpuUse = Mapping[str, int]
"""Allocations of one GPU by mode, and what they have of its capacities; 0 for all others."""
CAPACITY = ("cores", "memory", "clients")


def results_of(claim: Mapping[str, Any]) -> list[Result]:
    """The devices of a claim."""
    found: list[Result] = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
    return found


def use(results: Iterable[Result]) -> Mapping[tuple[str, str], GpuUse]:
    """Use of each GPU, by pool and GPU."""
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for each in results:
        gpu = found[each["pool"], gpu_of(each["device"])]
        gpu[each["device"].rpartition("-")[2]] += 1
        for name, amount in each.get("consumedCapacity", {}).items():
            gpu[name] += units(amount)
    return found


def faults(results: Iterable[Result], limits: Mapping[str, int]) -> list[str]:
    """Violations of the rule."""
    found = []
    for gpu, used in use(results).items():
        if used["whole"] > 1 or (used["whole"] and used["mps"]):
            found.append(f"{gpu} is sold twice: {dict(used)}")
        found += [f"{gpu} has {used[name]} {name}" for name in CAPACITY if used[name] > limits[name]]
    return found


class ClaimObserver(threading.Thread):
    """Follows all claims of a cluster from its start on; `broken` says what was seen."""

    def __init__(self, cluster: Cluster, limits: Mapping[str, int]) -> None:
        super().__init__(daemon=True)
        self.events = 0
        self.broken: list[str] = []
        self._limits = limits
        self._claims: dict[str, list[Result]] = {}
        path = cluster.api.path(RESOURCES, "ResourceClaim", None)
        listed: Object = cluster.api.get(path)
        for item in listed["items"]:
            self._claims[item["metadata"]["uid"]] = results_of(item)
        self._watch = cluster.api.watch(path, listed["metadata"]["resourceVersion"])

    def run(self) -> None:
        for kind, item in self._watch:
            self.events += 1
            if kind == "DELETED":
                self._claims.pop(item["metadata"]["uid"], None)
            else:
                self._claims[item["metadata"]["uid"]] = results_of(item)
            self.broken += faults((each for held in self._claims.values() for each in held), self._limits)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        self.join(10)
