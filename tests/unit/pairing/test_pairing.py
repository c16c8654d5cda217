"""Pairing in cases that chance seldom brings: two readings, no API server, no records, late and odd calls."""

from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest

from agent.kubelet.podresources import PodList, PodResourcesUnavailable
from agent.model.demand import MPS, Container, Demand, Pod, Stage
from agent.model.ledger import PairMember
from agent.model.modes import Assignment, GpuMode, Mode, Sale
from agent.model.placement import ASSIGNED, Policy
from agent.pairing.ports import Cause, PairRefused, Recorder
from tests.unit.pairing.kubelet_model import Admission, AgentKilled, KubeletModel, pod, share, undisturbed

NOTHING: frozenset[str] = frozenset()
HINT = "tencent.com/predicate-gpu-idx-0"


class Told(Recorder):
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str]] = []
        self.ignored: list[tuple[str, str]] = []
        self.choices: list[tuple[str, str, list[int]]] = []

    def refused(self, pod: Pod, message: str) -> None:
        self.refusals.append((pod.name, message))

    def hint_ignored(self, pod: Pod, message: str) -> None:
        self.ignored.append((pod.name, message))

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        self.choices.append((pod.name, container, list(indices)))


def told(kubelet: KubeletModel) -> Told:
    recorder = Told()
    kubelet.pairing._recorder = recorder
    return recorder


def index(kubelet: KubeletModel, key: tuple[str, str], container: str = "main") -> list[int]:
    pools = kubelet.pairing.ledger.pools
    return sorted(pools[gpu].index for gpu in kubelet.gpus_of(key, container))


async def first_member(kubelet: KubeletModel, member: PairMember, size: int) -> list[str]:
    """The kubelet's two calls for one member, for whatever pod is taken up."""
    free = kubelet.listed(member) - kubelet.in_use(member)
    ids = list(await kubelet.pairing.prefer(member, size, sorted(free)))
    await kubelet.pairing.allocate(member, ids)
    return ids


async def test_one_list_for_each_container() -> None:
    kubelet = KubeletModel()
    for n in range(5):
        await kubelet.admit(pod(f"p{n}", share("main", 10, 5)))
    assert kubelet.lists == 5


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


async def test_a_pod_that_the_watch_missed_is_asked_for() -> None:
    kubelet = KubeletModel()
    kubelet.cached = False
    await kubelet.admit(pod("a", share("main", 10, 5), share("more", 20, 6)))
    assert len(kubelet.gpus_of(("default", "a"), "more")) == 1


async def test_a_namesake_of_a_finished_pod_is_asked_for() -> None:
    kubelet = KubeletModel()
    old = pod("a", share("main", 50, 5), phase="Succeeded", uid="old")
    new = pod("a", share("main", 10, 5))

    async def get(namespace: str, name: str) -> Pod | None:
        return new

    kubelet.get = get  # type: ignore[method-assign]
    kubelet.pods_on_node = lambda: [old]  # type: ignore[method-assign]
    await kubelet.admit(new)
    assert len(kubelet.gpus_of(("default", "a"), "main")) == 1


async def test_two_readings_are_refused_unless_they_come_to_the_same() -> None:
    kubelet = KubeletModel()
    lingering = pod("rejected", share("main", 10, 7))
    kubelet.api[lingering.key] = lingering
    kubelet.taken_up[lingering.key] = Admission(lingering)
    with pytest.raises(
        PairRefused, match="may be asked for by any of default/rejected, default/new"
    ) as refusal:
        await first(kubelet, pod("new", share("main", 10, 5)), PairMember.CORE)
    assert refusal.value.cause is Cause.UNAVAILABLE
    await first(kubelet, pod("same", share("main", 20, 7)), PairMember.CORE)


async def test_a_kubelet_too_slow_to_answer_in_time_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.pairing.resolver.PATIENCE_SECONDS", 0.05)
    kubelet = KubeletModel()

    async def late(deadline: float = 0.05) -> PodList:
        kubelet.lists += 1
        await anyio.sleep(deadline)
        raise PodResourcesUnavailable("no answer")

    kubelet.look = late  # type: ignore[method-assign]
    # Either may be asking, and it makes no difference: four questions would have used up the call's time.
    waiting = pod("next", share("main", 20, 7))
    kubelet.api[waiting.key] = waiting
    await first(kubelet, pod("same", share("main", 20, 7)), PairMember.CORE)
    assert kubelet.lists <= 2  # GetPreferredAllocation, Allocate


async def test_a_kubelet_that_takes_seconds_to_answer_costs_no_pod() -> None:
    kubelet = KubeletModel()
    look = kubelet.look

    async def slow(deadline: float = 1.0) -> PodList:
        if deadline < 10:
            raise PodResourcesUnavailable("no answer within the deadline")
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]
    # Without the kubelet's answer either may be asking.
    waiting = pod("next", share("main", 20, 9))
    kubelet.api[waiting.key] = waiting
    await kubelet.admit(pod("asks", share("main", 20, 7)))
    assert kubelet.gpus_of(("default", "asks"), "main")


async def first(kubelet: KubeletModel, new: Pod, member: PairMember) -> None:
    """Take a pod up and make the calls for one member of its only container."""
    kubelet.api[new.key] = new
    kubelet.taken_up[new.key] = Admission(new)
    await first_member(kubelet, member, new.containers[0].limits[kubelet.pair.core])


async def test_without_specs_nothing_is_guessed() -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    with pytest.raises(PairRefused, match="restore the connection to the API server") as refusal:
        await kubelet.admit(pod("p", share("main", 30, 10)))
    assert "default/p" in str(refusal.value)
    assert refusal.value.cause is Cause.UNAVAILABLE


async def test_without_records_one_waiting_pod_is_enough() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = False
    await kubelet.admit(pod("a", share("main", 10, 5)))
    assert len(kubelet.gpus_of(("default", "a"), "main")) == 1
    queued = pod("queued", share("main", 10, 6))
    kubelet.api[queued.key] = queued
    with pytest.raises(PairRefused, match="nothing is guessed"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_with_nothing_readable_nothing_is_given() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = kubelet.specs_readable = False
    with pytest.raises(PairRefused, match="no pod of this node is known to wait"):
        await kubelet.admit(pod("a", share("main", 10, 5)))


async def test_an_agent_killed_between_the_halves_ends_on_one_gpu() -> None:
    for at in range(4):
        kubelet = KubeletModel(gpus=3, seed=at)
        await kubelet.admit(pod("a", share("main", 60, 30)))

        def killed(step: int, at: int = at, kubelet: KubeletModel = kubelet) -> None:
            if step == at:
                kubelet.start_agent()

        await kubelet.admit(pod("b", share("main", 50, 20)), killed)
        assert index(kubelet, ("default", "b")) == [1]


async def test_half_pairs_expire() -> None:
    kubelet = KubeletModel(gpus=1)

    def broken(step: int) -> None:
        if step == 2:
            raise AgentKilled("no")

    with pytest.raises(AgentKilled):
        await kubelet.admit(pod("a", share("main", 60, 30)), broken)
    assert len(kubelet.pairing.ledger.reservations) == 1
    kubelet.now += 11.0
    await kubelet.admit(pod("b", share("main", 60, 30)))
    assert kubelet.pairing.stats.expired == 1


async def test_two_allocates_at_once_are_served_one_after_the_other() -> None:
    kubelet = KubeletModel(gpus=2)
    granted: list[str] = []

    async def one(name: str, size: int) -> None:
        await kubelet.admit(pod(name, share("main", size, size)))
        granted.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(one, "a", 15)
        group.start_soon(one, "b", 16)
    assert sorted(granted) == ["a", "b"]
    assert all(len(kubelet.gpus_of(("default", name), "main")) == 1 for name in granted)


async def test_a_call_that_is_given_up_leaves_the_next_one_well() -> None:
    kubelet = KubeletModel()
    listed = kubelet.look

    async def stuck(deadline: float = 1.0) -> None:
        await anyio.sleep(10)

    kubelet.look = stuck  # type: ignore[method-assign, assignment]
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        await kubelet.admit(pod("a", share("main", 10, 5)))
    kubelet.taken_up.clear()
    kubelet.api.clear()
    kubelet.look = listed  # type: ignore[method-assign]
    await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_ids_against_the_promise_are_refused() -> None:
    kubelet = KubeletModel(gpus=2)
    waiting = pod("a", share("main", 10, 5))
    await first(kubelet, waiting, PairMember.CORE)
    other = sorted(each for each in kubelet.listed(PairMember.MEMORY) if each.startswith("GPU-00000001"))[:5]
    with pytest.raises(PairRefused):
        await kubelet.pairing.allocate(PairMember.MEMORY, other)
    with pytest.raises(PairRefused, match=r"is not a unit of tencent\.com/vcuda-memory"):
        await kubelet.pairing.allocate(
            PairMember.MEMORY, [other[0], "GPU-00000001-0000-0000-0000-000000000000::m999"]
        )
    with pytest.raises(PairRefused, match="is not known on this node"):
        await kubelet.pairing.allocate(PairMember.MEMORY, ["GPU-none::m1"])


async def test_a_draining_gpu_keeps_its_promise_and_sells_nothing_more() -> None:
    kubelet = KubeletModel(gpus=1)
    gpu = kubelet.inventory.value.gpus[0].uuid

    def drain(step: int) -> None:
        if step == 1:
            kubelet.modes.publish(Assignment({gpu: GpuMode(Mode.VGPU, Sale.CLOSED)}))
            kubelet.shares.restock()

    kubelet.listed = kubelet.pairing.ledger.pools[gpu].id_set  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 5)), drain)
    with pytest.raises(PairRefused, match="no GPU of this node is sold in this mode now"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


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
    kubelet.policy = Policy.SPREAD
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
    assert kubelet.pairing.ledger.held_ids == kubelet.in_use(PairMember.CORE) | kubelet.in_use(
        PairMember.MEMORY
    )
    kubelet.end(both.key)
    await kubelet.refresh()
    assert not kubelet.pairing.ledger.held_ids


async def test_held_units_are_never_handed_out_again() -> None:
    for seed in range(20):
        kubelet = KubeletModel(gpus=2, seed=seed)
        await kubelet.admit(pod("a", share("main", 30, 10)))
        kubelet.offers_held = True
        await kubelet.admit(pod("b", share("main", 30, 10)))
        units = [NOTHING.union(*each.held.values()) for each in kubelet.taken_up.values()]
        assert not units[0] & units[1]
        # The kubelet may pass over what is preferred: then the Allocate itself is refused.
        held = sorted(each for each in kubelet.in_use(PairMember.CORE))[:30]
        waiting = pod("c", share("main", 30, 10))
        kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
        with pytest.raises(PairRefused, match=r"is held by default/[ab], container main") as refusal:
            await kubelet.pairing.allocate(PairMember.CORE, held)
        assert refusal.value.cause is Cause.UNAVAILABLE
        assert refusal.value.pod is not None


async def test_mps_recalls_init_held_units() -> None:
    for seed in range(20):
        kubelet = KubeletModel(gpus=2, blocks=141 * 4, seed=seed, pair=MPS, mode=Mode.MPS)
        init = share("prepare", 10, 100, Stage.INIT, pair=MPS)
        await kubelet.admit(pod("a", init, share("main", 5, 5, pair=MPS)))
        kubelet.start_agent()
        await kubelet.admit(pod("b", share("main", 30, 60, pair=MPS)))
        assert index(kubelet, ("default", "b")) == [1]


async def test_gpu_only_init_phase_then_agent_restart() -> None:
    for seed in range(6):
        kubelet = KubeletModel(gpus=4, blocks=140, seed=seed)
        compiling = pod("a", share("prepare", 30, 40, Stage.INIT), Container("main", {}))
        await kubelet.admit(compiling)
        kubelet.api[compiling.key] = compiling  # its init container runs: the pod is Pending still
        kubelet.start_agent()
        await kubelet.admit(pod("b", share("main", 30, 40)))
        assert len(kubelet.gpus_of(("default", "b"), "main")) == 1


async def test_second_container_follows_the_choice() -> None:
    hints = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/predicate-gpu-idx-1": "2"}
    two = pod("a", share("one", 30, 10), share("two", 60, 10), annotations={**hints, ASSIGNED: "false"})
    kubelet = KubeletModel(gpus=4)

    class Written(Told):
        """The choice stands in the pod's annotations before the next container asks."""

        def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
            super().chosen(pod, container, indices, last=last)
            mine = {"tencent.com/predicate-gpu-idx-0": "1"} | ({ASSIGNED: "true"} if last else {})
            kubelet.api[pod.key] = replace(pod, annotations={**pod.annotations, **mine})

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


async def test_static_pod_gets_its_share() -> None:
    """It cannot: the API server tells of a static pod once it was admitted. The refusal says so."""
    kubelet = KubeletModel(gpus=4)
    static = pod("etcd-node1", share("main", 30, 40))

    async def get(namespace: str, name: str) -> Pod | None:
        return None

    kubelet.get = get  # type: ignore[method-assign]
    kubelet.pods_on_node = list  # type: ignore[method-assign]
    with pytest.raises(PairRefused, match="static pod cannot have a share") as refusal:
        await kubelet.admit(static)
    assert "default/etcd-node1" in str(refusal.value)


async def test_pod_refused_once_may_come_back() -> None:
    kubelet = KubeletModel(gpus=1)
    await kubelet.admit(pod("a", share("main", 80, 10)))
    again = pod("p", share("main", 30, 10))
    with pytest.raises(PairRefused):
        await kubelet.admit(again)
    kubelet.end(("default", "a"))
    # The same pod, which the kubelet asks for again from a pod worker.
    await kubelet.admit(again)
    assert index(kubelet, again.key) == [0]
    # While others ask it is not taken for the one that does.
    kubelet.end(again.key)
    kubelet = KubeletModel(gpus=2)
    for name in ("a", "b"):
        await kubelet.admit(pod(name, share("main", 60, 10)))
    lingering = pod("q", share("main", 50, 20))
    with pytest.raises(PairRefused):
        await kubelet.admit(lingering)
    kubelet.api[lingering.key], kubelet.taken_up[lingering.key] = lingering, Admission(lingering)
    kubelet.end(("default", "a"))
    await kubelet.admit(pod("r", share("main", 50, 10)))


async def test_kubelet_restart_with_init_only_units_stays_known() -> None:
    kubelet = KubeletModel(gpus=2)
    compiling = pod("a", share("prepare", 60, 30, Stage.INIT), Container("main", {}))
    await kubelet.admit(compiling)
    await kubelet.refresh()
    before = kubelet.pairing.ledger.held_ids
    kubelet.heard = set()
    await kubelet.refresh()
    assert kubelet.pairing.ledger.held_ids == before
    await kubelet.admit(pod("b", share("main", 60, 30)))
    assert index(kubelet, ("default", "b")) == [1]


async def test_a_grant_says_who_got_what() -> None:
    kubelet = KubeletModel(gpus=2)
    await kubelet.admit(pod("a", share("main", 30, 10), share("more", 5, 1)))
    first, second = kubelet.grants[:2]
    assert (first.pod.uid, first.container, first.demand) == ("uid-a", "main", Demand(30, 10))
    assert {len(first.ids), len(second.ids)} == {30, 10}
    assert [first.complete, second.complete] == [False, True]
    assert [grant.last for grant in kubelet.grants] == [False, False, True, True]
    assert {each.partition("::")[0] for each in first.ids | second.ids} == set(first.gpus)


async def test_units_that_stand_twice_or_lie_on_two_gpus_are_refused() -> None:
    kubelet = KubeletModel(gpus=2)
    first, second = (pool.cores for pool in kubelet.pairing.ledger.pools.values())
    waiting = pod("a", share("main", 2, 5))
    kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    for ids, told_as in (([first[0], first[0]], "stands twice"), ([first[0], second[0]], "lie on 2 GPUs")):
        with pytest.raises(PairRefused, match=told_as) as refusal:
            await kubelet.pairing.allocate(PairMember.CORE, ids)
        assert refusal.value.cause is Cause.INVALID


async def test_units_are_set_aside_only_where_nobody_has_or_will_have_them() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("a", share("main", 10, 10)))
    gpu = next(iter(kubelet.pairing.ledger.pools))
    taken: list[tuple[str, ...]] = []

    async def keep(ids: tuple[str, ...]) -> None:
        taken.append(ids)

    with pytest.raises(PairRefused, match=r"30 free units of .*, 31 more are asked for"):
        await kubelet.pairing.set_aside(gpu, 31, keep)
    with pytest.raises(PairRefused, match="0 free units"):
        await kubelet.pairing.set_aside("GPU-unknown", 1, keep)
    assert not taken
    await kubelet.pairing.set_aside(gpu, 30, keep)
    (ids,) = taken
    assert len(set(ids)) == 30
    assert not set(ids) & kubelet.pairing.ledger.kept_ids


async def test_units_of_a_pair_whose_second_half_is_to_come_are_not_set_aside() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await first(kubelet, pod("a", share("main", 10, 25)), PairMember.CORE)
    gpu = next(iter(kubelet.pairing.ledger.pools))

    async def keep(ids: tuple[str, ...]) -> None:
        raise AssertionError(ids)

    with pytest.raises(PairRefused, match="15 free units"):
        await kubelet.pairing.set_aside(gpu, 16, keep)
