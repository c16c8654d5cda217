"""A pod's whole demand, and how a choice goes into annotations and comes back."""

import pytest

from agent.extender.pod_demand import WHOLE_GPU, Slot, annotations_of, chosen_in, pod_demand
from agent.model.modes import Mode
from agent.model.pod import MPS, VGPU, Container, Demand, Impossible, Pod, Stage
from tests.pods import a_pod


def share(name: str, cores: int, blocks: int, stage: Stage = Stage.APP) -> Container:
    return Container(name, {VGPU.core: cores, VGPU.memory: blocks}, stage)


def pod(*containers: Container) -> Pod:
    return a_pod("default", "pod", containers)


def test_every_container_is_a_slot_large_ones_first() -> None:
    found = pod_demand(pod(share("a", 20, 4), Container("none"), share("b", 200, 0)))
    assert found.slots == (
        Slot(Mode.VGPU, Demand(200, 0, whole=2), 1, (2,)),
        Slot(Mode.VGPU, Demand(20, 4), 1, (0,)),
    )
    assert dict(found.totals) == {VGPU.core: 220, VGPU.memory: 4}


def test_containers_tied_by_an_init_container_share_a_slot() -> None:
    found = pod_demand(pod(share("init", 40, 10, Stage.INIT), share("a", 30, 8), share("b", 30, 8)))
    assert found.slots == (Slot(Mode.VGPU, Demand(60, 16), 3, (0, 1, 2)),)


def test_a_sidecar_counts_beside_the_app_containers() -> None:
    found = pod_demand(pod(share("side", 40, 10, Stage.SIDECAR), share("a", 30, 8)))
    assert [slot.demand for slot in found.slots] == [Demand(40, 10), Demand(30, 8)]
    assert found.slots[0].places == (1,)


def test_mps_containers_count_as_clients() -> None:
    limits = {MPS.core: 30, MPS.memory: 4}
    found = pod_demand(pod(Container("i", limits, Stage.INIT), Container("a", limits)))
    assert found.slots == (Slot(Mode.MPS, Demand(30, 4), 2, (0, 1)),)


def test_whole_gpus_are_counted_as_the_kubelet_hands_them_out() -> None:
    found = pod_demand(
        pod(Container("i", {WHOLE_GPU: 2}, Stage.INIT), *(Container(n, {WHOLE_GPU: 1}) for n in "abc"))
    )
    assert found.gpus == 3
    assert found.slots == ()


def test_kube_schedulers_count_is_the_most_of_both_phases() -> None:
    found = pod_demand(
        pod(share("s", 10, 2, Stage.SIDECAR), share("i", 50, 1, Stage.INIT), share("a", 20, 4))
    )
    assert dict(found.totals) == {VGPU.core: 60, VGPU.memory: 6}


def test_what_no_node_can_grant_is_said() -> None:
    with pytest.raises(Impossible, match="multiple of 100"):
        pod_demand(pod(share("a", 150, 4)))


def test_a_pod_without_gpus_asks_for_nothing() -> None:
    assert pod_demand(pod(Container("a", {"example.com/x": 1}))).nothing


def test_a_choice_survives_the_annotations() -> None:
    demand = pod_demand(pod(share("a", 20, 4), share("b", 200, 0)))
    written = annotations_of(demand, ((3, 5), (1,)))
    assert written == {
        "tencent.com/predicate-gpu-idx-1": "3,5",
        "tencent.com/predicate-gpu-idx-0": "1",
        "tencent.com/gpu-assigned": "false",
    }
    assert chosen_in(demand, written) == ((3, 5), (1,))


@pytest.mark.parametrize("text", ["", "x", "1,2", "-1", "1,", "9" * 5000, "²"])
def test_a_choice_that_makes_no_sense_is_none(text: str) -> None:
    demand = pod_demand(pod(share("a", 20, 4)))
    assert chosen_in(demand, {"tencent.com/predicate-gpu-idx-0": text}) is None
