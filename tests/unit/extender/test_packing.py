"""The one search: it finds what there is, alike for every policy, and never works for long."""

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.extender.fleet import BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import PodClaim
from agent.extender.packing import NODE_STEPS, SearchWork
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.extender.verdicts import NOT_REACHED, REQUEST_STEPS, Verdicts
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import PlacementPolicy
from agent.model.pod import CORES, VGPU, Container
from tests.bench import arrivals
from tests.pods import a_pod

BLOCKS = 320
Share = tuple[int, int]


def asks(shares: Sequence[Share]) -> PodDemand:
    containers = (Container(f"c{n}", {VGPU.core: c, VGPU.memory: b}) for n, (c, b) in enumerate(shares))
    return pod_demand(a_pod("ns", "p", tuple(containers)))


def node(held: Sequence[Share]) -> Fleet:
    """One node `n`; of each of its GPUs so much is held."""
    fleet = Fleet()
    gpus = tuple(GpuEntry(f"GPU-{n}", n, Mode.VGPU, 81920) for n in range(len(held)))
    fleet.set_node(LedgerNode("n", NodeInventory(gpus), {}))
    for number, share in enumerate(held):
        if any(share):
            claim = PodClaim(asks([share]), chosen=((number,),))
            fleet.set_pod(BoundPod(f"u{number}", "n", claim))
    return fleet


def fits_by_trying_all(held: Sequence[Share], wanted: Sequence[Share]) -> bool:
    for places in itertools.product(range(len(held)), repeat=len(wanted)):
        cores = [CORES - share[0] for share in held]
        blocks = [BLOCKS - share[1] for share in held]
        for place, (core, block) in zip(places, wanted, strict=True):
            cores[place] -= core
            blocks[place] -= block
        if min(cores) >= 0 and min(blocks) >= 0:
            return True
    return False


shares = st.tuples(st.integers(1, 99), st.integers(1, BLOCKS))


@given(st.lists(shares, min_size=1, max_size=3), st.lists(shares, min_size=1, max_size=4))
def test_a_packing_is_found_exactly_where_there_is_one(held: list[Share], wanted: list[Share]) -> None:
    fleet, demand = node(held), asks(wanted)
    possible = fits_by_trying_all(held, wanted)
    assert (fleet.verdict("n", demand) == "") == possible
    for policy in PlacementPolicy:
        found = fleet.pick("n", demand, policy)
        assert (found is not None) == possible
        if found:
            free = [[CORES - core, BLOCKS - block] for core, block in held]
            for slot, (index,) in zip(demand.slots, found.chosen, strict=True):
                free[index][0] -= slot.demand.cores
                free[index][1] -= slot.demand.blocks
            assert min(min(each) for each in free) >= 0


def test_filter_and_bind_agree_on_pods_of_many_containers() -> None:
    draw = random.Random(7)
    fitting = 0
    for _ in range(300):
        gpus = draw.choice([4, 8])
        held = [(draw.choice([0, 10, 20, 25, 30, 40, 50]), 16) for _ in range(gpus)]
        fleet = node([share if share[0] else (0, 0) for share in held])
        demand = asks([(draw.randrange(15, 75, 5), 16) for _ in range(draw.randint(3, 12))])
        reason = fleet.verdict("n", demand)
        fitting += not reason
        for policy in PlacementPolicy:
            assert (fleet.pick("n", demand, policy) is None) == bool(reason), (held, demand)
    assert 50 < fitting < 250


def test_a_pod_of_many_containers_takes_little_work() -> None:
    fleet = node([(0, 0)] * 8)
    for wanted in ([(60, 16)] * 9, [(40, 16)] * 17, [(60, 16)] * 6 + [(51, 16)] * 3, [(51, 16)] * 9):
        work = SearchWork()
        assert fleet.verdict("n", asks(wanted), work) != ""
        assert work.steps <= 4, "counting shows it"


def test_the_work_for_one_node_is_bounded() -> None:
    draw = random.Random(3)
    most = 0
    for _ in range(300):
        fleet = node([(draw.randint(1, 60), draw.randint(1, 200)) for _ in range(8)])
        demand = asks([(draw.randint(5, 60), draw.randint(1, 200)) for _ in range(12)])
        work = SearchWork()
        fleet.verdict("n", demand, work)
        most = max(most, work.steps)
    assert NODE_STEPS / 2 < most <= NODE_STEPS + 40


async def test_the_work_for_one_request_is_bounded_and_the_next_one_goes_on() -> None:
    draw = random.Random(5)
    hard = [(draw.randint(20, 45), draw.randint(60, 200)) for _ in range(14)]
    fleet = arrivals.fleet_of(400)
    for number, name in enumerate(list(fleet.nodes)):
        for gpu in range(8):
            share = (draw.randint(1, 40), draw.randint(1, 150))
            fleet.set_pod(BoundPod(f"{number}-{gpu}", name, PodClaim(asks([share]), chosen=((gpu,),))))
    verdicts, names, demand = Verdicts(fleet), list(fleet.nodes), asks(hard)
    reached = []
    for _ in range(60):
        _, refused = await verdicts.judge(demand, names)
        reached.append(len(names) - list(refused.values()).count(NOT_REACHED))
        if reached[-1] == len(names):
            break
    assert reached[-1] == len(names)
    assert reached == sorted(reached)
    if len(reached) > 1:
        assert reached[0] >= REQUEST_STEPS // (NODE_STEPS + 40)
