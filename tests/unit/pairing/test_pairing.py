"""Pairing in cases that chance seldom brings: odd requests, hints, policies, init containers, a restart."""

from collections.abc import Sequence

import pytest

from agent.model.holding import PairMember
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.placement import ASSIGNED, PlacementPolicy
from agent.model.pod import MPS, Container, Pod, Stage
from agent.pairing.resolver import Cause, PairRefused
from tests.pods import changed
from tests.unit.pairing.asking import Told, index, told
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share, undisturbed

HINT = "tencent.com/predicate-gpu-idx-0"


async def test_equal_cores_different_memory_are_never_swapped() -> None:
    kubelet = KubeletModel(gpus=2, blocks=40)
    await kubelet.admit(pod("filler", share("main", 10, 30)))
    await kubelet.admit(pod("small", share("main", 20, 5)))
    await kubelet.admit(pod("large", share("main", 20, 38)))
    assert index(kubelet, ("default", "small")) == [0]
    assert index(kubelet, ("default", "large")) == [1]


async def test_a_pair_that_fits_no_gpu_is_refused_with_the_largest_free_share() -> None:
    kubelet = KubeletModel(gpus=2, blocks=40)
    recorder = told(kubelet)
    await kubelet.admit(pod("a", share("main", 60, 10)))
    await kubelet.admit(pod("b", share("main", 50, 10)))
    with pytest.raises(
        PairRefused, match="the largest free share is 50 cores and 30 memory blocks"
    ) as refusal:
        await kubelet.admit(pod("c", share("main", 80, 10)))
    assert refusal.value.cause is Cause.EXHAUSTED
    assert [name for name, _ in recorder.refusals] == ["c"]
    await kubelet.admit(pod("d", share("main", 50, 10)))


async def test_impossible_requests_say_why() -> None:
    kubelet = KubeletModel()
    with pytest.raises(PairRefused, match="must be a multiple of 100") as refusal:
        await kubelet.admit(pod("a", share("main", 150, 1)))
    assert refusal.value.cause is Cause.INVALID
    with pytest.raises(PairRefused, match=r"without tencent\.com/vcuda-memory: add"):
        await kubelet.admit(pod("b", share("main", 50, 0)))


async def test_hints_are_followed_or_told() -> None:
    kubelet = KubeletModel(gpus=3)
    recorder = told(kubelet)
    await kubelet.admit(pod("a", share("main", 60, 10), annotations={HINT: "2"}))
    assert index(kubelet, ("default", "a")) == [2]
    assert recorder.choices == [("a", "main", [2])]
    await kubelet.admit(pod("b", share("main", 60, 10), annotations={HINT: "2"}))
    assert index(kubelet, ("default", "b")) == [0]
    assert [name for name, _ in recorder.ignored] == ["b"]


async def test_a_pods_own_policy_wins() -> None:
    kubelet = KubeletModel(gpus=2)
    await kubelet.admit(pod("a", share("main", 10, 5)))
    await kubelet.admit(pod("b", share("main", 10, 5), annotations={"gpu-node-agent.io/placement": "spread"}))
    assert index(kubelet, ("default", "b")) == [1]


async def test_a_draining_gpu_keeps_its_promise_and_sells_nothing_more() -> None:
    kubelet = KubeletModel(gpus=1)
    gpu = kubelet.inventory.value.gpus[0].uuid

    def drain(step: int) -> None:
        if step == 1:
            kubelet.modes.publish(Assignment({gpu: GpuMode(Mode.VGPU, Offering.CLOSED)}))
            kubelet.shares.restock()

    kubelet.listed = kubelet.pairing.ledger.pools[gpu].id_set  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 5)), drain)
    with pytest.raises(PairRefused, match="no GPU of this node is offered in this mode now"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_a_gpu_that_begins_to_drain_between_two_containers_still_serves_the_heir() -> None:
    for seed in range(6):
        kubelet = KubeletModel(gpus=2, seed=seed)
        gpu = kubelet.inventory.value.gpus[0].uuid

        def drain(step: int, gpu: str = gpu, kubelet: KubeletModel = kubelet) -> None:
            if step == 4:  # the init container has both members
                closed = GpuMode(Mode.VGPU, Offering.CLOSED)
                kubelet.modes.publish(Assignment({**kubelet.modes.value.gpus, gpu: closed}))
                kubelet.shares.restock()

        both = pod("both", share("init", 20, 5, Stage.INIT), share("main", 10, 5))
        await kubelet.admit(both, drain)
        assert index(kubelet, both.key) == index(kubelet, both.key, "init") == [0]
        # Nobody else is served of it, and one that leaves the mode serves nobody.
        await kubelet.admit(pod("other", share("main", 10, 5)))
        assert index(kubelet, ("default", "other")) == [1]
        kubelet.modes.publish(Assignment({}))
        kubelet.shares.restock()
        with pytest.raises(PairRefused):
            await kubelet.pairing.allocate(PairMember.CORE, [f"{gpu}::c50"])


async def test_mps_pairs_are_told_apart_by_the_same_code() -> None:
    kubelet = KubeletModel(
        gpus=2, blocks=41, pair=MPS, mode=Mode.MPS
    )  # 10.25 GiB: 9 blocks beside the reserve
    await kubelet.admit(pod("a", share("main", 100, 4, pair=MPS)))
    await kubelet.admit(pod("b", share("main", 30, 9, pair=MPS)))
    assert index(kubelet, ("default", "b")) == [1]
    with pytest.raises(PairRefused, match=r"add nvidia\.com/mps-core"):
        await kubelet.admit(pod("c", share("main", 0, 1, pair=MPS)))


async def test_spread_is_a_policy_of_the_node_too() -> None:
    kubelet = KubeletModel(gpus=2)
    kubelet.policy = PlacementPolicy.SPREAD
    kubelet.start_agent()
    for name in ("a", "b"):
        await kubelet.admit(pod(name, share("main", 10, 5)), undisturbed)
    assert index(kubelet, ("default", "a")) != index(kubelet, ("default", "b"))


async def test_init_and_app_containers_share_one_gpu_sized_for_their_peak() -> None:
    for seed in range(20):
        kubelet = KubeletModel(gpus=2, seed=seed)
        await kubelet.admit(pod("filler", share("main", 50, 10)))
        # Binpack would put the init container beside the filler, where its heir would not fit.
        both = pod("both", share("init", 10, 5, Stage.INIT), share("main", 60, 20))
        await kubelet.admit(both)
        assert index(kubelet, both.key) == index(kubelet, both.key, "init") == [1]


async def test_units_of_init_containers_are_known_after_a_restart() -> None:
    kubelet = KubeletModel(gpus=1)
    both = pod("both", share("init", 60, 30, Stage.INIT), share("main", 10, 5))
    await kubelet.admit(both)
    kubelet.start_agent()
    await kubelet.refresh()
    assert kubelet.pairing.ledger.held.ids == kubelet.in_use(PairMember.CORE) | kubelet.in_use(
        PairMember.MEMORY
    )
    kubelet.end(both.key)
    await kubelet.refresh()
    assert not kubelet.pairing.ledger.held.ids


async def test_mps_recalls_init_held_units() -> None:
    for seed in range(20):
        kubelet = KubeletModel(gpus=2, blocks=141 * 4, seed=seed, pair=MPS, mode=Mode.MPS)
        init = share("prepare", 10, 100, Stage.INIT, pair=MPS)
        await kubelet.admit(pod("a", init, share("main", 5, 5, pair=MPS)))
        kubelet.start_agent()
        await kubelet.admit(pod("b", share("main", 30, 60, pair=MPS)))
        assert index(kubelet, ("default", "b")) == [1]


async def test_second_container_follows_the_choice() -> None:
    hints = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/predicate-gpu-idx-1": "2"}
    two = pod("a", share("one", 30, 10), share("two", 60, 10), annotations={**hints, ASSIGNED: "false"})
    kubelet = KubeletModel(gpus=4)

    class Written(Told):
        """The choice stands in the pod's annotations before the next container asks."""

        def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
            super().chosen(pod, container, indices, last=last)
            mine = {"tencent.com/predicate-gpu-idx-0": "1"} | ({ASSIGNED: "true"} if last else {})
            kubelet.api[pod.key] = changed(pod, annotations={**pod.annotations, **mine})

    recorder = kubelet.pairing._recorder = Written()
    await kubelet.admit(two)
    assert recorder.choices == [("a", "one", [1]), ("a", "two", [2])]
    assert recorder.ignored == []


async def test_sidecars_and_init_containers_alone_have_a_choice() -> None:
    # Numbers of annotations: app containers first, then the others in their order.
    hints = {"tencent.com/predicate-gpu-idx-0": "3", "tencent.com/predicate-gpu-idx-1": "2"}
    for stage in (Stage.SIDECAR, Stage.INIT):
        kubelet = KubeletModel(gpus=4)
        recorder = told(kubelet)
        one = pod("a", share("first", 30, 10, stage), Container("main", {}), annotations=hints)
        await kubelet.admit(one)
        assert recorder.choices == [("a", "first", [2])]
        assert [grant.last for grant in kubelet.grants if grant.complete] == [True]


async def test_kubelet_restart_with_init_only_units_stays_known() -> None:
    kubelet = KubeletModel(gpus=2)
    compiling = pod("a", share("prepare", 60, 30, Stage.INIT), Container("main", {}))
    await kubelet.admit(compiling)
    await kubelet.refresh()
    before = kubelet.pairing.ledger.held.ids
    kubelet.heard = set()
    await kubelet.refresh()
    assert kubelet.pairing.ledger.held.ids == before
    await kubelet.admit(pod("b", share("main", 60, 30)))
    assert index(kubelet, ("default", "b")) == [1]


async def test_a_draining_gpu_is_given_to_no_new_pod_that_the_kubelet_chose_for() -> None:
    """The kubelet's own choice, or a preference older than a second, on a GPU that is closed by now."""
    kubelet = KubeletModel(gpus=2)
    new = pod("new", share("main", 30, 10))
    kubelet.api[new.key] = new
    kubelet.taken_up[new.key] = Admission(new)
    free = sorted(kubelet.listed(PairMember.CORE))
    ids = await kubelet.pairing.prefer(PairMember.CORE, 30, free)
    gpu = ids[0].partition("::")[0]
    # its last holder left a process: it is withheld at once
    kubelet.modes.publish(
        Assignment(
            {**kubelet.modes.value.gpus, gpu: GpuMode(Mode.VGPU, Offering.CLOSED, "a process has stayed")}
        )
    )
    kubelet.shares.restock()
    kubelet.now += 1.5  # a kubelet, or an agent, that is slow
    with pytest.raises(PairRefused):
        await kubelet.pairing.allocate(PairMember.CORE, ids)
