"""Kept verdicts never differ from judging again."""

import random

from agent.extender.choice import MOST_ALIKE
from agent.extender.fleet import BoundPod, LedgerNode
from agent.extender.free_capacity import HeldUnits, PodClaim
from agent.extender.verdicts import SHAPES, Verdicts
from agent.model.modes import Mode
from agent.model.placement import PlacementPolicy
from tests.bench import arrivals


async def test_kept_verdicts_follow_every_change() -> None:
    draw = random.Random(5)
    fleet = arrivals.fleet_of(6, 2)
    verdicts = Verdicts(fleet)
    names = list(fleet.nodes)
    demands = [arrivals.demand(size) for size in (5, 32, 47, 81, 100, 200)]
    for number in range(150):
        demand = draw.choice(demands)
        fitting, refused = await verdicts.judge(demand, names)
        fresh = {name: fleet.verdict(name, demand) for name in names}
        assert refused == {name: reason for name, reason in fresh.items() if reason}
        assert fitting == [name for name, reason in fresh.items() if not reason]
        worths = {
            name: found.worth
            for name in names
            if (found := fleet.pick(name, demand, PlacementPolicy.BINPACK))
        }
        scores = dict(zip(names, await verdicts.rank(demand, PlacementPolicy.BINPACK, names), strict=True))
        if worths:
            best = min(worths.values())
            assert {name for name, score in scores.items() if score == 10} == {
                name for name, worth in worths.items() if worth == best
            }
        assert all(score == 0 for name, score in scores.items() if name not in worths)
        if fitting and draw.random() < 0.7:
            node = draw.choice(fitting)
            found = fleet.pick(node, demand, PlacementPolicy.BINPACK)
            assert found is not None
            fleet.assume(f"u{number}", node, PodClaim(demand, chosen=found.chosen), 0)
        else:
            fleet.forget(f"u{draw.randrange(150)}")


async def test_a_new_shape_is_judged_by_nodes_as_they_are() -> None:
    """The figures kept of a node for all shapes end with its change, of any kind."""
    fleet = arrivals.fleet_of(3, 2)
    verdicts = Verdicts(fleet)
    names = list(fleet.nodes)
    half, large = arrivals.demand(50), arrivals.demand(80)
    assert await verdicts.judge(half, names) == (names, {})
    assert fleet.summaries.keys() == set(names)
    fleet.set_pod(BoundPod("held", names[0], PodClaim(half, chosen=((0,),))))
    fleet.set_pod(BoundPod("somewhere", names[0], PodClaim(half)))  # nobody knows on which of the two
    fleet.set_node(LedgerNode(names[1], arrivals.inventory(2, Mode.DRA), {}))
    fleet.drop_node(names[2])
    for demand in (large, half, arrivals.demand(100)):
        fitting, refused = await verdicts.judge(demand, names)
        fresh = {name: fleet.verdict(name, demand) for name in names}
        assert {**dict.fromkeys(fitting, ""), **refused} == fresh
    assert not fleet.summaries


async def test_no_more_shapes_are_kept_than_said() -> None:
    verdicts = Verdicts(arrivals.fleet_of(1))
    for size in range(1, SHAPES + 20):
        await verdicts.judge(arrivals.demand(size), ["node-00000"])
    assert len(verdicts._shapes) == SHAPES


async def test_what_is_found_for_nodes_that_are_alike_is_bounded() -> None:
    """A shape that is asked for all the time never leaves, and there are 100,000s of what a GPU has left."""
    fleet = arrivals.fleet_of(1, 1)
    verdicts = Verdicts(fleet)
    (name,), (gpu,) = fleet.nodes, arrivals.inventory(1).gpus
    asked, most = arrivals.demand(1), 0
    for number in range(10_000):
        held = HeldUnits(gpu.uuid, Mode.VGPU, 1 + number // 200, 1 + number % 200)
        fleet.set_pod(BoundPod("other", name, PodClaim(asked, (held,))))
        assert await verdicts.judge(asked, [name]) == ([name], {})
        most = max(most, len(verdicts._shapes[asked].alike))
    assert most == MOST_ALIKE
