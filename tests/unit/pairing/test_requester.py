"""Finding out who asks where that is in doubt: two readings, no API server, no records."""

import anyio
import pytest

from agent.kubelet.podresources import PodList, PodResourcesUnavailable
from agent.model.demand import Container, Pod, Stage
from agent.model.ledger import PairMember
from agent.pairing.pod_access import Cause, PairRefused
from tests.unit.pairing.asking import first, index
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share


async def test_one_list_for_each_container() -> None:
    kubelet = KubeletModel()
    for n in range(5):
        await kubelet.admit(pod(f"p{n}", share("main", 10, 5)))
    assert kubelet.lists == 5


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


async def test_gpu_only_init_phase_then_agent_restart() -> None:
    for seed in range(6):
        kubelet = KubeletModel(gpus=4, blocks=140, seed=seed)
        compiling = pod("a", share("prepare", 30, 40, Stage.INIT), Container("main", {}))
        await kubelet.admit(compiling)
        kubelet.api[compiling.key] = compiling  # its init container runs: the pod is Pending still
        kubelet.start_agent()
        await kubelet.admit(pod("b", share("main", 30, 40)))
        assert len(kubelet.gpus_of(("default", "b"), "main")) == 1


async def test_static_pod_gets_its_share() -> None:
    """It cannot: the API server shows a static pod once it was admitted. The refusal says so."""
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


async def test_a_pod_that_the_watch_brings_while_a_get_hangs_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An API server that takes seconds to answer; the kubelet hears of pods a moment before the agent."""
    monkeypatch.setattr("agent.pairing.resolver.MISS_SECONDS", 0.01)
    kubelet = KubeletModel()
    kubelet.cached = False

    async def hanging(namespace: str, name: str) -> Pod | None:
        kubelet.cached = True
        await anyio.sleep(10)
        return None

    kubelet.get = hanging  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 5)))
    assert len(kubelet.gpus_of(("default", "a"), "main")) == 1
