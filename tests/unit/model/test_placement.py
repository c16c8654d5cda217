"""Where a share goes: the three policies, hints, whole GPUs, and the sentences of refusals."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.placement import Choice, FreeGpu, Hint, NoRoom, PlacementPolicy, hint_of, place, policy_of
from agent.model.pod import VGPU, Container, Demand, Pod, Stage
from tests.pods import a_pod

BLOCKS = 40


def rooms(*free: tuple[int, int]) -> dict[str, FreeGpu]:
    return {
        f"GPU-{n}": FreeGpu(f"GPU-{n}", n, cores, blocks, BLOCKS, untouched=(cores, blocks) == (100, BLOCKS))
        for n, (cores, blocks) in enumerate(free)
    }


def chosen(policy: PlacementPolicy, demand: Demand, *free: tuple[int, int]) -> str:
    return place(rooms(*free), demand, policy).gpus[0]


def test_binpack_takes_the_fullest_that_fits() -> None:
    assert chosen(PlacementPolicy.BINPACK, Demand(20, 10), (100, 40), (10, 40), (30, 12), (40, 10)) == "GPU-2"


def test_binpack_takes_the_lower_index_among_equals() -> None:
    assert chosen(PlacementPolicy.BINPACK, Demand(20, 10), (50, 20), (50, 20)) == "GPU-0"


def test_memory_alone_goes_where_no_cores_are_left() -> None:
    assert chosen(PlacementPolicy.BINPACK, Demand(0, 10), (100, 40), (0, 12), (5, 10)) == "GPU-1"


def test_spread_takes_the_emptiest() -> None:
    assert chosen(PlacementPolicy.SPREAD, Demand(20, 10), (30, 40), (90, 20), (90, 30)) == "GPU-2"


def test_fragmentation_keeps_the_remainder_useful() -> None:
    # On GPU 0 the rest still serves a half, on GPU 1 (the fullest, binpack's choice) a quarter is destroyed.
    assert chosen(PlacementPolicy.FRAGMENTATION, Demand(10, 4), (65, 26), (55, 22)) == "GPU-0"
    assert chosen(PlacementPolicy.BINPACK, Demand(10, 4), (65, 26), (55, 22)) == "GPU-1"


def test_a_hint_is_followed_where_it_fits() -> None:
    found = place(rooms((100, 40), (50, 20)), Demand(20, 10), hint=Hint((0,)))
    assert found == Choice(("GPU-0",))


def test_a_hint_that_does_not_fit_is_told_and_passed_over() -> None:
    found = place(rooms((10, 40), (50, 20)), Demand(20, 10), hint=Hint((0,)))
    assert found.gpus == ("GPU-1",)
    assert (
        "the scheduler chose GPU 0, which has no room for 20 cores and 10 memory blocks" in found.hint_ignored
    )


def test_whole_gpus_come_from_the_chooser_among_untouched_ones() -> None:
    asked: list[tuple[Sequence[str], Sequence[str], int]] = []

    def chooser(free: Sequence[str], must: Sequence[str], size: int) -> Sequence[str]:
        asked.append((free, must, size))
        return list(free)[::-1][:size]

    found = place(rooms((100, 40), (99, 40), (100, 40), (100, 40)), Demand(200, 0, whole=2), whole=chooser)
    assert asked == [(["GPU-0", "GPU-2", "GPU-3"], [], 2)]
    assert found.gpus == ("GPU-2", "GPU-3")


def test_whole_gpus_that_are_not_there() -> None:
    with pytest.raises(NoRoom, match="no 2 whole GPUs free: 1 of 2 GPUs are wholly free"):
        place(rooms((100, 40), (99, 40)), Demand(200, 0, whole=2))


def test_a_pair_that_fits_the_totals_but_no_gpu_is_refused_with_the_largest_free_share() -> None:
    with pytest.raises(NoRoom) as refusal:
        place(rooms((50, 25), (40, 40)), Demand(60, 30))
    assert "60 cores and 30 memory blocks do not fit on any single GPU" in str(refusal.value)
    assert "50 cores and 25 memory blocks, on GPU GPU-0 (index 0)" in str(refusal.value)


def test_a_tied_share_stays_or_is_refused() -> None:
    assert place(rooms((50, 20), (40, 40)), Demand(10, 1), tied=["GPU-1"]).gpus == ("GPU-1",)
    with pytest.raises(NoRoom, match="the GPU where the pod has units already"):
        place(rooms((50, 20), (100, 40)), Demand(60, 1), tied=["GPU-0"])
    with pytest.raises(NoRoom, match="must lie on one"):
        place(rooms((50, 20), (100, 40)), Demand(1, 1), tied=["GPU-0", "GPU-1"])


def test_no_gpu_at_all() -> None:
    with pytest.raises(NoRoom, match="no GPU of this node is offered in this mode now"):
        place({}, Demand(1, 1))


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, BLOCKS)), min_size=1, max_size=8),
    st.integers(0, 99),
    st.integers(1, BLOCKS),
    st.sampled_from(PlacementPolicy),
)
def test_every_policy_finds_room_exactly_where_there_is_some(
    free: list[tuple[int, int]], cores: int, blocks: int, policy: PlacementPolicy
) -> None:
    there = rooms(*free)
    fits = {room.gpu for room in there.values() if room.cores >= cores and room.blocks >= blocks}
    try:
        found = place(there, Demand(cores, blocks), policy)
    except NoRoom:
        assert not fits
    else:
        assert set(found.gpus) <= fits


def pod(**annotations: str) -> Pod:
    named = {key.replace("_", "-"): value for key, value in annotations.items()}
    return a_pod(
        "d",
        "p",
        (
            Container("init", {VGPU.core: 1}, Stage.INIT),
            Container("a", {VGPU.core: 1}),
            Container("b", {VGPU.core: 1}),
        ),
        annotations={f"tencent.com/{key}": value for key, value in named.items()},
    )


def test_hints_count_app_containers_alone() -> None:
    hinted = pod(predicate_gpu_idx_0="3", predicate_gpu_idx_1="1,2", gpu_assigned="false")
    assert hint_of(hinted, "a") == Hint((3,))
    assert hint_of(hinted, "b") == Hint((1, 2))
    assert hint_of(hinted, "init") is None


@pytest.mark.parametrize(
    "annotations",
    [
        {"predicate_gpu_idx_0": "3", "gpu_assigned": "true"},
        {"predicate_gpu_idx_0": "3", "predicate_node": "other"},
        {"predicate_gpu_idx_0": "first"},
        {"predicate_gpu_idx_0": ""},
        {},
    ],
)
def test_hints_that_are_used_up_foreign_or_broken_do_not_count(annotations: dict[str, str]) -> None:
    assert hint_of(pod(**annotations), "a", node="mine") is None


def test_a_pod_names_its_own_policy() -> None:
    asking = a_pod("d", "p", (), annotations={"gpu-node-agent.io/placement": "spread"})
    assert policy_of(asking, PlacementPolicy.BINPACK) is PlacementPolicy.SPREAD
    odd = a_pod("d", "p", (), annotations={"gpu-node-agent.io/placement": "random"})
    assert policy_of(odd, PlacementPolicy.FRAGMENTATION) is PlacementPolicy.FRAGMENTATION
    assert policy_of(None, PlacementPolicy.SPREAD) is PlacementPolicy.SPREAD


def test_an_init_container_goes_where_its_heir_is_to_go() -> None:
    init = Container("i", {VGPU.core: 10, VGPU.memory: 4}, Stage.INIT)
    heir = Container("a", {VGPU.core: 10, VGPU.memory: 4})
    pod = a_pod(
        "ns", "p", (init, Container("none"), heir), annotations={"tencent.com/predicate-gpu-idx-1": "3"}
    )
    assert hint_of(pod, "i", tied={"i", "a"}) == Hint((3,))
    assert hint_of(pod, "i") is None
    assert hint_of(pod, "none", tied={"i", "a"}) is None


def test_an_index_of_thousands_of_digits_is_no_choice() -> None:
    pod = a_pod("ns", "p", (Container("a"),), annotations={"tencent.com/predicate-gpu-idx-0": "9" * 5000})
    assert hint_of(pod, "a") is None
