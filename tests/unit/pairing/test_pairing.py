"""Pairing in cases that chance seldom brings: two readings, no API server, no records, late and odd calls."""

from collections.abc import Sequence

import anyio
import pytest

from agent.kubelet.api import PreferenceRequest, Reason, Refused
from agent.kubelet.podresources import PodList, PodResourcesUnavailable
from agent.model.demand import MPS, Pod, Stage
from agent.model.ledger import Half
from agent.model.modes import Assignment, GpuMode, Mode, Sale
from agent.model.placement import Policy
from tests.unit.pairing.kubelet_model import Admission, AgentKilled, KubeletModel, pod, share, undisturbed

HINT = "tencent.com/predicate-gpu-idx-0"


class Told:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str]] = []
        self.ignored: list[tuple[str, str]] = []
        self.choices: list[tuple[str, str, list[int]]] = []

    def refused(self, pod: Pod, message: str) -> None:
        self.refusals.append((pod.name, message))

    def hint_ignored(self, pod: Pod, message: str) -> None:
        self.ignored.append((pod.name, message))

    def chosen(self, pod: Pod, container: str, indices: Sequence[int]) -> None:
        self.choices.append((pod.name, container, list(indices)))


def told(kubelet: KubeletModel) -> Told:
    recorder = Told()
    kubelet.pairing._recorder = recorder
    return recorder


def index(kubelet: KubeletModel, key: tuple[str, str], container: str = "main") -> list[int]:
    stocks = kubelet.pairing.view.ledger.stocks
    return sorted(stocks[gpu].index for gpu in kubelet.gpus_of(key, container))


async def first_half(kubelet: KubeletModel, half: Half, size: int) -> list[str]:
    """The kubelet's two calls for one half, for whatever pod is taken up."""
    free = kubelet.listed(half) - kubelet.in_use(half)
    ids = list(await kubelet.pairing.prefer(half, PreferenceRequest(tuple(sorted(free)), (), size)))
    await kubelet.pairing.allocate(half, ids)
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
    with pytest.raises(Refused, match="the largest free share is 50 cores and 30 memory blocks") as refusal:
        await kubelet.admit(pod("c", share("main", 80, 10)))
    assert refusal.value.reason is Reason.EXHAUSTED
    assert [name for name, _ in recorder.refusals] == ["c"]
    await kubelet.admit(pod("d", share("main", 50, 10)))


async def test_impossible_requests_say_why() -> None:
    kubelet = KubeletModel()
    with pytest.raises(Refused, match="must be a multiple of 100") as refusal:
        await kubelet.admit(pod("a", share("main", 150, 1)))
    assert refusal.value.reason is Reason.INVALID
    with pytest.raises(Refused, match=r"without tencent\.com/vcuda-memory: add"):
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
    with pytest.raises(Refused, match="may be asked for by any of default/rejected, default/new") as refusal:
        await first(kubelet, pod("new", share("main", 10, 5)), Half.CORE)
    assert refusal.value.reason is Reason.UNAVAILABLE
    await first(kubelet, pod("same", share("main", 20, 7)), Half.CORE)


async def test_a_kubelet_too_slow_to_answer_in_time_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.pairing.facts.LIST_SECONDS", 0.05)
    kubelet = KubeletModel()

    async def late(deadline: float = 0.05) -> PodList:
        kubelet.lists += 1
        await anyio.sleep(deadline)
        raise PodResourcesUnavailable("no answer")

    kubelet.list = late  # type: ignore[method-assign]
    # Either may be asking, and it makes no difference: four questions would have used up the call's time.
    waiting = pod("next", share("main", 20, 7))
    kubelet.api[waiting.key] = waiting
    await first(kubelet, pod("same", share("main", 20, 7)), Half.CORE)
    assert kubelet.lists <= 2  # GetPreferredAllocation, Allocate


async def first(kubelet: KubeletModel, new: Pod, half: Half) -> None:
    """Take a pod up and make the calls for one half of its only container."""
    kubelet.api[new.key] = new
    kubelet.taken_up[new.key] = Admission(new)
    await first_half(kubelet, half, new.containers[0].limits[kubelet.kind.core])


async def test_without_specs_the_order_of_calls_decides() -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    for n in range(6):
        await kubelet.admit(pod(f"p{n}", share("main", 30, 10)))
        assert len(kubelet.gpus_of(("default", f"p{n}"), "main")) == 1
        # What was admitted keeps waiting for nothing: only an open half may be continued.
        kubelet.now += 60.0
    assert kubelet.pairing.stats.serial == 12
    for n in range(6):
        kubelet.end(("default", f"p{n}"))
    await kubelet.admit(pod("whole", share("main", 200, 3)))
    assert len(kubelet.gpus_of(("default", "whole"), "main")) == 2


async def test_without_specs_two_readings_are_refused() -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    await kubelet.admit(pod("memory", share("main", 0, 10)))
    with pytest.raises(Refused, match="nothing is guessed; restore the connection to the API server"):
        await first(kubelet, pod("other", share("main", 10, 10)), Half.CORE)


async def test_without_records_one_waiting_pod_is_enough() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = False
    await kubelet.admit(pod("a", share("main", 10, 5)))
    assert len(kubelet.gpus_of(("default", "a"), "main")) == 1
    queued = pod("queued", share("main", 10, 6))
    kubelet.api[queued.key] = queued
    with pytest.raises(Refused, match="nothing is guessed"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_with_nothing_readable_nothing_is_given() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = kubelet.specs_readable = False
    with pytest.raises(Refused, match="no pod of this node is known to wait"):
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
    assert len(kubelet.pairing.view.ledger.reservations) == 1
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
    listed = kubelet.list

    async def stuck(deadline: float = 1.0) -> None:
        await anyio.sleep(10)

    kubelet.list = stuck  # type: ignore[method-assign, assignment]
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        await kubelet.admit(pod("a", share("main", 10, 5)))
    kubelet.taken_up.clear()
    kubelet.api.clear()
    kubelet.list = listed  # type: ignore[method-assign]
    await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_ids_against_the_promise_are_refused() -> None:
    kubelet = KubeletModel(gpus=2)
    waiting = pod("a", share("main", 10, 5))
    await first(kubelet, waiting, Half.CORE)
    other = sorted(each for each in kubelet.listed(Half.MEMORY) if each.startswith("GPU-00000001"))[:5]
    with pytest.raises(Refused):
        await kubelet.pairing.allocate(Half.MEMORY, other)
    with pytest.raises(Refused, match=r"is not a unit of tencent\.com/vcuda-memory"):
        await kubelet.pairing.allocate(
            Half.MEMORY, [other[0], "GPU-00000001-0000-0000-0000-000000000000::m999"]
        )
    with pytest.raises(Refused, match="is not known on this node"):
        await kubelet.pairing.allocate(Half.MEMORY, ["GPU-none::m1"])


async def test_a_draining_gpu_keeps_its_promise_and_sells_nothing_more() -> None:
    kubelet = KubeletModel(gpus=1)
    gpu = kubelet.inventory.value.gpus[0].uuid

    def drain(step: int) -> None:
        if step == 1:
            kubelet.modes.publish(Assignment({gpu: GpuMode(Mode.VGPU, Sale.CLOSED)}))
            kubelet.shares.restock()

    kubelet.listed = kubelet.pairing.view.ledger.stocks[gpu].id_set  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 5)), drain)
    with pytest.raises(Refused, match="no GPU of this node is sold in this mode now"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_mps_pairs_are_told_apart_by_the_same_code() -> None:
    kubelet = KubeletModel(
        gpus=2, blocks=41, kind=MPS, mode=Mode.MPS
    )  # 10.25 GiB: 9 blocks beside the reserve
    await kubelet.admit(pod("a", share("main", 100, 4, kind=MPS)))
    await kubelet.admit(pod("b", share("main", 30, 9, kind=MPS)))
    assert index(kubelet, ("default", "b")) == [1]
    with pytest.raises(Refused, match=r"add nvidia\.com/mps-core"):
        await kubelet.admit(pod("c", share("main", 0, 1, kind=MPS)))


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


async def test_units_of_init_containers_are_known_again_after_a_restart() -> None:
    kubelet = KubeletModel(gpus=1)
    both = pod("both", share("init", 60, 30, Stage.INIT), share("main", 10, 5))
    await kubelet.admit(both)
    held = {
        (both.uid, name, resource): ids for (name, resource), ids in kubelet.taken_up[both.key].held.items()
    }
    kubelet.start_agent()
    assert await kubelet.pairing.recall({**held, ("gone", "init", kubelet.kind.core): frozenset({"x"})})
    await kubelet.pairing.reconcile()
    view = kubelet.pairing.view
    assert view.ledger.held_ids | view.hidden == kubelet.in_use(Half.CORE) | kubelet.in_use(Half.MEMORY)
    kubelet.end(both.key)
    await kubelet.pairing.reconcile()
    assert kubelet.pairing.view.hidden == frozenset()


async def test_nothing_is_recalled_before_pods_are_known() -> None:
    kubelet = KubeletModel()
    assert not await kubelet.pairing.recall({("u", "init", kubelet.kind.core): frozenset({"x"})})
