"""The part of the record that concerns one pair, over several readings."""

from dataclasses import replace

from agent.kubelet.podresources import Holding, PodList
from agent.model.demand import VGPU
from agent.model.ledger import Held, Holder, PairMember
from agent.pairing.requester import PairRecords

CORES = Holding("default", "a", "main", VGPU.core, ("GPU-a::c0",))
BLOCKS = Holding("default", "a", "main", VGPU.memory, ("GPU-a::m0", "GPU-a::m1"))
WHOLE = Holding("default", "b", "main", "nvidia.com/gpu", ("GPU-b",))
NAMELESS = Holding("", "pod with UID 1", "main", VGPU.core, ("GPU-a::c1",), listed=False)
LISTED = (("default", "a", "main"), ("default", "b", "main"))


def test_only_units_of_the_pair_and_of_pods_with_names_count() -> None:
    found = PairRecords(VGPU).of(PodList((CORES, BLOCKS, WHOLE, NAMELESS), LISTED, began=3.0))
    holder = Holder("default", "a", "main")
    assert found.held.entries == (
        Held(holder, PairMember.CORE, frozenset(CORES.ids)),
        Held(holder, PairMember.MEMORY, frozenset(BLOCKS.ids)),
    )
    assert found.pods == {("default", "a"), ("default", "b")}
    assert found.began == 3.0


def test_what_did_not_change_is_the_same_object() -> None:
    records = PairRecords(VGPU)
    first = records.of(PodList((CORES, BLOCKS), LISTED))
    again = records.of(PodList((CORES, BLOCKS), LISTED[:1]))
    assert again.held is first.held
    assert again.pods == {("default", "a")}
    fewer = records.of(PodList((BLOCKS,), LISTED))
    assert [each.member for each in fewer.held] == [PairMember.MEMORY]
    assert fewer.held.entries[0] is first.held.entries[1]


def test_a_holding_that_changed_is_read_again() -> None:
    records = PairRecords(VGPU)
    records.of(PodList((CORES,), LISTED))
    more = replace(CORES, ids=("GPU-a::c0", "GPU-a::c7"))
    assert records.of(PodList((more,), LISTED)).held.ids == {"GPU-a::c0", "GPU-a::c7"}
    init = replace(CORES, listed=False)
    assert [each.init for each in records.of(PodList((init,), LISTED)).held] == [True]
    # All objects are others, as after a restart of the kubelet: nothing of an earlier reading comes back.
    for number in range(50):
        fresh = replace(CORES, ids=(f"GPU-a::c{number}",))
        assert records.of(PodList((fresh,), LISTED)).held.ids == {f"GPU-a::c{number}"}
