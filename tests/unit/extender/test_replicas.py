"""Replicas of one owner keep off each other's nodes and GPUs, where there is room; others pack as before."""

import json
from typing import Any

import pytest

from agent.extender.fleet import BoundPod, Fleet
from agent.extender.free_capacity import HeldUnits, PodClaim
from agent.extender.objects import decode_pod, owner_of
from agent.extender.verdicts import Verdicts
from agent.model.modes import Mode
from agent.model.placement import POLICY, PlacementPolicy
from tests.bench import arrivals

SIZE = 25
WANT = arrivals.demand(SIZE)
DEFAULT = PlacementPolicy.FRAGMENTATION


class Placing:
    """Pods that go where the extender ranks first."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.fleet = arrivals.fleet_of(nodes, gpus)
        self._verdicts = Verdicts(self.fleet)
        self._number = 0

    async def place(
        self, owner: str, size: int = SIZE, policy: PlacementPolicy = DEFAULT
    ) -> tuple[str, tuple[int, ...]]:
        demand = arrivals.demand(size)
        fitting, _ = await self._verdicts.judge(demand, list(self.fleet.nodes))
        scores = await self._verdicts.rank(demand, policy, fitting, owner)
        _, best = max(zip(scores, fitting, strict=True))
        found = self.fleet.pick(best, demand, policy, owner=owner)
        assert found is not None
        self._number += 1
        claim = PodClaim(demand, chosen=found.chosen, owner=owner)
        self.fleet.assume(f"u{self._number}", best, claim, 0)
        return best, found.chosen[0]


async def test_replicas_go_to_nodes_and_then_to_gpus_of_their_own() -> None:
    placing = Placing(4, 2)
    places = [await placing.place("ns/web") for _ in range(8)]
    assert len({node for node, _ in places[:4]}) == 4
    assert len(set(places)) == 8
    # Now each GPU has one: the rest has to go beside others, as long as there is room.
    again = [await placing.place("ns/web") for _ in range(8 * (100 // SIZE - 1))]
    assert {places.count(each) + again.count(each) for each in set(places)} == {100 // SIZE}


async def test_pods_of_different_owners_pack() -> None:
    placing = Placing(4, 2)
    places = [await placing.place(owner) for owner in ("ns/a", "ns/b", "", "")]
    assert len(set(places)) == 1


async def test_a_gpu_that_others_opened_is_taken_before_an_untouched_one() -> None:
    placing = Placing(2, 4)
    node, gpus = await placing.place("ns/other")
    first, second = [await placing.place("ns/web") for _ in range(2)]
    assert first == (node, gpus)
    assert second[0] != node


async def test_whole_gpus_of_replicas_go_to_different_nodes() -> None:
    placing = Placing(3, 4)
    assert len({(await placing.place("ns/web", 200))[0] for _ in range(3)}) == 3


@pytest.mark.parametrize("policy", PlacementPolicy)
async def test_every_default_policy_spreads_them(policy: PlacementPolicy) -> None:
    placing = Placing(2, 2)
    assert len({await placing.place("ns/web", policy=policy) for _ in range(4)}) == 4


def test_replicas_are_counted_wherever_they_came_from() -> None:
    fleet = arrivals.fleet_of(1, 3)
    held = (HeldUnits(arrivals.inventory(3).gpus[2].uuid, Mode.VGPU, SIZE, 10),)
    fleet.set_pod(BoundPod("shown", "node-00000", PodClaim(WANT, held=held, chosen=((0,),), owner="ns/web")))
    fleet.assume("assumed", "node-00000", PodClaim(WANT, chosen=((0,),), owner="ns/web"), 0)
    fleet.set_pod(BoundPod("unknown", "node-00000", PodClaim(WANT, owner="ns/web")))
    assert fleet.replicas("ns/web") == {"node-00000": 3}
    found = fleet.pick("node-00000", WANT, DEFAULT, owner="ns/web")
    assert found is not None
    assert found.chosen == ((1,),)
    fleet.set_pod(BoundPod("shown", "elsewhere", PodClaim(WANT, owner="ns/other")))
    fleet.forget("assumed")
    assert fleet.replicas("ns/web") == {"node-00000": 1}
    fleet.drop_pod("unknown")
    fleet.drop_pod("shown")
    assert not fleet._replicas


def test_no_owner_is_known_of_an_empty_ledger() -> None:
    assert Fleet().replicas("ns/web") == {}
    assert Fleet().replicas("") == {}


OWNER = {"kind": "ReplicaSet", "uid": "rs", "controller": True, "name": "web", "apiVersion": "apps/v1"}


@pytest.mark.parametrize(
    ("metadata", "spec", "expected"),
    [
        ({"ownerReferences": [OWNER]}, {}, "ns/rs"),
        ({"ownerReferences": [OWNER | {"kind": "StatefulSet"}]}, {}, "ns/rs"),
        ({"ownerReferences": [OWNER | {"kind": "Job"}]}, {}, ""),
        ({"ownerReferences": [OWNER | {"controller": False}]}, {}, ""),
        ({}, {}, ""),
        ({"ownerReferences": [OWNER], "annotations": {POLICY: "binpack"}}, {}, ""),
        ({"ownerReferences": [OWNER], "annotations": {POLICY: "no such policy"}}, {}, "ns/rs"),
        ({"ownerReferences": [OWNER]}, {"schedulingGroup": {"podGroupName": "g"}}, ""),
    ],
)
def test_whose_replicas_spread(metadata: dict[str, Any], spec: dict[str, Any], expected: str) -> None:
    pod = {"metadata": {"name": "p", "namespace": "ns", "uid": "u", **metadata}, "spec": spec}
    assert owner_of(decode_pod(json.dumps(pod).encode())) == expected
