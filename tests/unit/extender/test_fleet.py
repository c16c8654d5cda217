"""The cluster-wide ledger: what it answers, in which words, and that it believes the right source."""

import math

import pytest

from agent.extender.fleet import UNKNOWN_NODE, BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import HeldUnits, PodClaim
from agent.extender.pod_demand import WHOLE_GPU, Chosen, PodDemand, pod_demand
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import PlacementPolicy
from agent.model.pod import MPS, VGPU, Container
from tests.pods import a_pod

BLOCKS = 320


def gpus(count: int, mode: Mode = Mode.VGPU, **more: object) -> NodeInventory:
    return NodeInventory(
        tuple(GpuEntry(f"GPU-{n}", n, mode, 81920, **more) for n in range(count))  # type: ignore[arg-type]
    )


def asks(*shares: tuple[int, int], **whole: int) -> PodDemand:
    containers = [Container(f"c{n}", {VGPU.core: c, VGPU.memory: b}) for n, (c, b) in enumerate(shares)]
    if whole:
        containers.append(Container("whole", {WHOLE_GPU: whole["gpus"]}))
    return pod_demand(a_pod("default", "pod", tuple(containers)))


def mps(*shares: tuple[int, int]) -> PodDemand:
    containers = [Container(f"c{n}", {MPS.core: c, MPS.memory: b}) for n, (c, b) in enumerate(shares)]
    return pod_demand(a_pod("default", "pod", tuple(containers)))


def fleet(inventory: NodeInventory) -> Fleet:
    made = Fleet()
    made.set_node(LedgerNode("n", inventory, {}))
    return made


def bound(made: Fleet, uid: str, demand: PodDemand, chosen: Chosen | None) -> None:
    made.set_pod(BoundPod(uid, "n", PodClaim(demand, chosen=chosen)))


def test_containers_of_a_pod_may_lie_on_different_gpus() -> None:
    made = fleet(gpus(2))
    bound(made, "a", asks((60, 10)), ((0,),))
    found = made.pick("n", asks((60, 10), (40, 10)), PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ((1,), (0,))


def test_the_search_goes_back_where_the_first_choice_leaves_no_room() -> None:
    made = fleet(gpus(2))
    # The fullest GPU for the larger share has all the memory that the smaller one needs.
    bound(made, "a", asks((50, 1)), ((0,),))
    bound(made, "b", asks((1, 250)), ((1,),))
    demand = asks((50, 10), (40, 300))
    found = made.pick("n", demand, PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ((1,), (0,))
    assert made.verdict("n", demand) == ""


@pytest.mark.parametrize(
    ("inventory", "held", "demand", "says"),
    [
        (gpus(2), [(60, 10), (70, 10)], asks((60, 10)), "largest free share 40 of 60 cores"),
        (gpus(1), [(10, 310)], asks((10, 20)), "largest free memory 10 of 20 blocks beside 10 cores"),
        (gpus(1, trouble="Xid 79"), [], asks((10, 20)), "GPU 0 unhealthy"),
        (gpus(2, offered=False), [], asks((10, 20)), "GPU 0 draining and 1 more"),
        (gpus(2), [(10, 10)], asks((200, 0)), "1 of 2 GPUs wholly free"),
        (gpus(2, Mode.MPS), [], asks((10, 20)), "no GPU offered as vGPU"),
        (gpus(2), [], asks(gpus=1), "no GPU offered as pgpu"),
        (gpus(2, Mode.PGPU), [], asks(gpus=3), "2 of 3 GPUs free"),
        (gpus(1), [], asks((60, 10), (60, 10)), "room for each, not for all 2 containers together"),
        (gpus(1, Mode.MPS, clients=1), [], mps((10, 1), (10, 1)), "room for each, not for all 2 containers"),
    ],
)
def test_refusals_are_told_in_a_few_words(
    inventory: NodeInventory, held: list[tuple[int, int]], demand: PodDemand, says: str
) -> None:
    made = fleet(inventory)
    for number, one in enumerate(held):
        bound(made, f"u{number}", asks(one), ((number,),))
    assert made.verdict("n", demand).startswith(says)
    assert made.pick("n", demand, PlacementPolicy.BINPACK) is None


def test_the_ceiling_of_mps_clients_is_kept() -> None:
    made = fleet(gpus(1, Mode.MPS, clients=2))
    bound(made, "a", mps((10, 1)), ((0,),))
    assert made.verdict("n", mps((10, 1))) == ""
    bound(made, "b", mps((10, 1)), ((0,),))
    assert "client ceiling" in made.verdict("n", mps((10, 1)))


def test_a_gpu_with_grown_cores_is_not_wholly_free_though_its_pod_is_gone() -> None:
    made = fleet(gpus(1, grown_cores=10))
    assert made.verdict("n", asks((90, 10))) == ""
    assert made.verdict("n", asks((91, 10)))
    assert made.verdict("n", asks((100, 0))) == "0 of 1 GPUs wholly free"


def test_whole_gpus_are_the_best_linked_ones() -> None:
    links = [0] * 6
    links[4] = 400  # 1-3
    inventory = NodeInventory(gpus(4).gpus, tuple(links))
    found = fleet(inventory).pick("n", asks((200, 0)), PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ((1, 3),)


def test_a_pod_whose_gpus_nobody_told_counts_on_all_it_may_be_on() -> None:
    made = fleet(gpus(2))
    bound(made, "a", asks((60, 10)), None)
    assert made.verdict("n", asks((40, 10))) == ""
    assert made.verdict("n", asks((50, 10))) == "GPUs of 1 bound pod not known yet"
    bound(made, "a", asks((60, 10)), ((0,),))
    assert made.verdict("n", asks((50, 10))) == ""


def test_the_kubelets_records_win_over_a_forged_annotation() -> None:
    made = fleet(gpus(2))
    demand = asks((90, 10))
    held = (HeldUnits("GPU-0", Mode.VGPU, 90, 10),)
    made.set_pod(BoundPod("a", "n", PodClaim(demand, held=held, chosen=((1,),)), confirmed=True))
    found = made.pick("n", demand, PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ((1,),)


def test_our_own_choice_wins_over_an_annotation_that_no_agent_wrote() -> None:
    made = fleet(gpus(2))
    demand = asks((90, 10))
    made.assume("a", "n", PodClaim(demand, chosen=((0,),)), 10)
    bound(made, "a", demand, ((1,),))
    assert [room.cores for room in made.free("n").gpus] == [10, 100]


def test_the_agents_choice_wins_over_ours() -> None:
    made = fleet(gpus(2))
    demand = asks((90, 10))
    made.assume("a", "n", PodClaim(demand, chosen=((0,),)), 10)
    made.set_pod(BoundPod("a", "n", PodClaim(demand, chosen=((1,),)), confirmed=True))
    assert [room.cores for room in made.free("n").gpus] == [100, 10]


def test_a_choice_that_the_watch_does_not_show_is_dropped_in_time() -> None:
    made = fleet(gpus(1))
    made.assume("a", "n", PodClaim(asks((90, 10)), chosen=((0,),)), 10)
    assert made.expire(9.9) == []
    assert made.expire(10) == ["a"]
    assert made.verdict("n", asks((90, 10))) == ""


def test_a_choice_without_an_answer_outlasts_a_silent_watch() -> None:
    made = fleet(gpus(1))
    made.assume("a", "n", PodClaim(asks((90, 10)), chosen=((0,),)), 10)
    made.assume("kept", "n", PodClaim(asks((5, 10)), chosen=((0,),)), 10, "ns/gang")
    # What is only kept for a gang was never written: no watch can show it.
    assert made.expire(80, heard=9.9) == ["kept"]
    assert made.verdict("n", asks((90, 10))) == "largest free share 10 of 90 cores"
    assert made.expire(80, heard=10.0) == ["a"]


def test_a_confirmed_choice_stays_until_a_list_that_is_newer() -> None:
    made = fleet(gpus(1))
    made.assume("a", "n", PodClaim(asks((90, 10)), chosen=((0,),)), 10)
    made.confirm("a", 2.0)
    assert made.expire(1e9) == []
    assert made.unshown_since() == 2.0
    made.unlisted((), asked=2.0)  # this one may be older than the binding
    made.unlisted(("a",), asked=3.0)
    assert made.verdict("n", asks((90, 10))) != ""
    made.unlisted(("b",), asked=3.0)
    assert made.verdict("n", asks((90, 10))) == ""
    assert made.unshown_since() == math.inf


def test_an_answer_after_the_watch_has_shown_the_pod_changes_nothing() -> None:
    made = fleet(gpus(1))
    made.assume("a", "n", PodClaim(asks((90, 10)), chosen=((0,),)), 10)
    bound(made, "a", asks((90, 10)), None)
    made.confirm("a", 2.0)
    assert made.unshown_since() == math.inf
    made.drop_pod("a")
    made.confirm("a", 3.0)
    assert made.unshown_since() == math.inf
    assert made.verdict("n", asks((90, 10))) == ""


def test_a_choice_that_the_watch_showed_stays() -> None:
    made = fleet(gpus(1))
    made.assume("a", "n", PodClaim(asks((90, 10)), chosen=((0,),)), 10)
    bound(made, "a", asks((90, 10)), None)
    assert made.expire(1e9) == []
    assert made.verdict("n", asks((90, 10))) != ""


def test_a_node_without_inventory_is_judged_by_totals_and_says_so() -> None:
    made = Fleet()
    made.set_node(LedgerNode("n", None, {VGPU.core: 200, VGPU.memory: 640}))
    bound(made, "a", asks((90, 10)), None)
    assert made.verdict("n", asks((60, 10))) == ""
    assert made.verdict("n", asks((99, 10), (99, 10))) == (
        "110 of 198 tencent.com/vcuda-core free by totals (no inventory)"
    )
    found = made.pick("n", asks((60, 10)), PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ()


def test_a_node_that_nobody_told_of_takes_nothing() -> None:
    assert Fleet().verdict("x", asks((1, 1))) == "node not known to the extender"


def test_policies_differ() -> None:
    made = fleet(gpus(3))
    bound(made, "a", asks((40, 100)), ((0,),))
    bound(made, "b", asks((50, 100)), ((1,),))
    # Five cores less on GPU 1 would leave no room for 47, which many ask for.
    chosen = {policy: made.pick("n", asks((5, 5)), policy) for policy in PlacementPolicy}
    assert {policy: found.chosen for policy, found in chosen.items() if found} == {
        PlacementPolicy.BINPACK: ((1,),),
        PlacementPolicy.SPREAD: ((2,),),
        PlacementPolicy.FRAGMENTATION: ((0,),),
    }


def test_nothing_is_kept_of_nodes_that_went() -> None:
    made = Fleet()
    for number in range(100):
        made.set_node(LedgerNode(f"n{number}", gpus(1), {}))
        made.drop_node(f"n{number}")
        assert made.verdict(f"n{number}", asks((60, 10))) == UNKNOWN_NODE
    assert not made.nodes
    # Of one whose pods have not gone yet those are known until they have.
    made.set_node(LedgerNode("n", gpus(1), {}))
    bound(made, "a", asks((60, 10)), ((0,),))
    made.drop_node("n")
    assert list(made.claims("n")) == ["a"]
    made.drop_pod("a")
    assert (made._nodes, made._pods, made._claims, made._free) == ({}, {}, {}, {})


def test_a_choice_that_is_made_again_elsewhere_counts_once() -> None:
    made = Fleet()
    for name in ("a", "b"):
        made.set_node(LedgerNode(name, gpus(1), {}))
        made.assume("u", name, PodClaim(asks((60, 10)), chosen=((0,),)), 10)
    assert made.verdict("a", asks((60, 10))) == ""
    assert made.verdict("b", asks((60, 10))) != ""


def test_a_node_that_offers_mig_instances_as_whole_gpus_is_judged_by_totals() -> None:
    made = Fleet()
    made.set_node(LedgerNode("n", gpus(2, Mode.MIG), {WHOLE_GPU: 14}))
    assert made.verdict("n", asks(gpus=14)) == ""
    found = made.pick("n", asks(gpus=1), PlacementPolicy.BINPACK)
    assert found is not None
    assert found.chosen == ()
    bound(made, "a", asks(gpus=13), None)
    assert made.verdict("n", asks(gpus=2)) == "1 of 2 nvidia.com/gpu free by totals"
    assert made.pick("n", asks(gpus=2), PlacementPolicy.BINPACK) is None
    # A share is on no instance, nor beside one.
    assert made.verdict("n", asks((10, 10))) == "no GPU offered as vGPU"
    assert made.verdict("n", asks((10, 10), gpus=1)) != ""


def test_time_slices_by_another_name_are_for_those_who_ask_for_it() -> None:
    made = Fleet()
    made.set_node(LedgerNode("n", gpus(1, Mode.PGPU, replicas=2), {"nvidia.com/gpu.shared": 2}))
    plain = asks(gpus=1)
    assert made.verdict("n", plain) == "its GPUs are offered as nvidia.com/gpu.shared"
    assert made.pick("n", plain, PlacementPolicy.BINPACK) is None
    shared = pod_demand(a_pod("default", "pod", (Container("main", {"nvidia.com/gpu.shared": 1}),)))
    assert made.verdict("n", shared) == ""
    for uid in ("a", "b"):
        bound(made, uid, shared, None)
    assert made.verdict("n", shared) == "0 of 1 GPUs free"
