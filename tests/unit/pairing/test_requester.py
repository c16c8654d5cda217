"""Finding out who asks where that is in doubt: two readings, no API server, no records."""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import anyio
import pytest

from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.holding import PairMember, Record
from agent.model.pod import Container, Pod, Stage
from agent.pairing.pairing import PROMPT_SECONDS
from agent.pairing.pod_source import PodsUnavailable
from agent.pairing.resolver import (
    DOUBT_SECONDS,
    DOUBT_SHARE,
    DOUBT_TOTAL_SECONDS,
    Cause,
    PairRefused,
)
from tests.pods import changed
from tests.unit.pairing.asking import InOrder, first, index
from tests.unit.pairing.kubelet_model import Admission, AgentKilled, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


async def test_one_list_for_each_member() -> None:
    """The Allocate directly after a preference uses its reading again."""
    kubelet = KubeletModel()
    for n in range(5):
        await kubelet.admit(pod(f"p{n}", share("main", 10, 5)))
    assert kubelet.lists == 10


@pytest.mark.parametrize("between", ["a moment", "another preference", "another Allocate"])
async def test_a_reading_is_used_again_by_the_next_call_alone(between: str) -> None:
    kubelet = KubeletModel()
    waiting = pod("a", share("main", 10, 5))
    kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    pool = next(iter(kubelet.pairing.ledger.pools.values()))
    ids = await kubelet.pairing.prefer(PairMember.CORE, 10, pool.cores)
    if between == "a moment":
        kubelet.now += PROMPT_SECONDS + 0.1
    elif between == "another preference":
        await kubelet.pairing.prefer(PairMember.MEMORY, 5, pool.blocks)
    else:
        with pytest.raises(PairRefused, match="stands twice"):
            await kubelet.pairing.allocate(PairMember.CORE, [ids[0], ids[0]])
    before = kubelet.lists
    await kubelet.pairing.allocate(PairMember.CORE, ids)
    assert kubelet.lists == before + 1


@pytest.mark.parametrize("orders", list(itertools.product(PairMember, PairMember)))
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("cores", [60, 10])
async def test_rejected_pod_lends_its_name_to_nobody(
    orders: tuple[PairMember, PairMember], gpus: int, cores: int
) -> None:
    """Another plugin, or a third resource, ends a pod between its halves; the next one is like it in size."""
    kubelet = KubeletModel(gpus=gpus)
    rejected = pod("a", share("main", 60, 30), namespace="lenient")
    good = pod("b", share("main", cores, 30), namespace="strict")
    kubelet.api[good.key] = good  # both are bound; the kubelet admits one after the other

    def another_plugin_refuses(step: int) -> None:
        if step == 2:
            raise AgentKilled("the agent hears nothing of it")

    first, second = orders
    kubelet.random = InOrder([first, first.other], [second, second.other])
    with pytest.raises(AgentKilled):
        await kubelet.admit(rejected, another_plugin_refuses)
    kubelet.api[rejected.key] = rejected  # the API server does not know yet
    kubelet.now += 0.05
    granted = len(kubelet.grants)
    await kubelet.admit(good)
    assert [(each.pod.uid, each.demand.cores) for each in kubelet.grants[granted:]] == [("uid-b", cores)] * 2
    assert kubelet.grants[-1].complete
    assert {each.pod.uid for each in kubelet.pairing.ledger.reservations} == {"uid-b"}


@pytest.mark.parametrize("hint", [{}, {"tencent.com/predicate-gpu-idx-0": "1"}])
@in_virtual_time
async def test_same_size_in_two_namespaces(hint: dict[str, str]) -> None:
    """The one was rejected a moment ago, and kubelets before 1.34 list it until the API server knows."""
    kubelet = KubeletModel(gpus=2)
    rejected = pod("a", share("main", 20, 10), namespace="lenient")
    good = pod("b", share("main", 20, 10), namespace="strict", annotations=hint)
    kubelet.api[rejected.key], kubelet.taken_up[rejected.key] = rejected, Admission(rejected)

    async def end_is_shown() -> None:
        await anyio.sleep(2.0)
        kubelet.api[rejected.key] = changed(rejected, phase="Failed")

    async with anyio.create_task_group() as group:
        group.start_soon(end_is_shown)
        await kubelet.admit(good)
    assert [each.pod.uid for each in kubelet.grants] == ["uid-b", "uid-b"]
    assert index(kubelet, good.key) == [1 if hint else 0]


async def test_a_promise_ends_with_the_first_evidence_of_its_pods_end() -> None:
    for evidence in ("it is listed no more", "the API server calls it failed", "both, by a call"):
        kubelet = KubeletModel(gpus=1)
        waiting = pod("a", share("main", 60, 30), share("more", 10, 5))
        await first(kubelet, changed(waiting, containers=waiting.containers[:1]), PairMember.CORE)
        kubelet.now += 0.1
        if evidence != "the API server calls it failed":
            del kubelet.taken_up[waiting.key]
        if evidence != "it is listed no more":
            kubelet.api[waiting.key] = changed(waiting, phase="Failed")
        if evidence == "both, by a call":
            await kubelet.admit(pod("b", share("main", 60, 30)))
        else:
            await kubelet.refresh()
        assert waiting.uid not in {each.pod.uid for each in kubelet.pairing.ledger.reservations}, evidence


async def test_no_later_container_is_waited_for_once_its_pod_is_gone() -> None:
    kubelet = KubeletModel(gpus=1)

    def another_plugin_refuses(step: int) -> None:
        if step == 4:
            raise AgentKilled("the agent hears nothing of it")

    with pytest.raises(AgentKilled):
        await kubelet.admit(pod("a", share("main", 60, 30), share("more", 10, 5)), another_plugin_refuses)
    assert kubelet.pairing.continuing()
    kubelet.now += 0.1
    await kubelet.refresh()
    assert not kubelet.pairing.continuing()


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


@in_virtual_time
async def test_two_readings_are_refused() -> None:
    kubelet = KubeletModel()
    lingering = pod("rejected", share("main", 10, 7))
    kubelet.api[lingering.key] = lingering
    kubelet.taken_up[lingering.key] = Admission(lingering)
    with pytest.raises(
        PairRefused, match="may be asked for by any of default/rejected, default/new"
    ) as refusal:
        await first(kubelet, pod("new", share("main", 10, 5)), PairMember.CORE)
    assert refusal.value.cause is Cause.UNAVAILABLE
    assert DOUBT_SECONDS <= anyio.current_time() < DOUBT_SECONDS + 1  # the evidence was waited for


@in_virtual_time
async def test_a_refusal_names_no_pod_of_another_namespace(logs: Any) -> None:
    kubelet = KubeletModel()
    lingering = pod("rejected", share("main", 10, 7), namespace="other")
    kubelet.api[lingering.key] = lingering
    kubelet.taken_up[lingering.key] = Admission(lingering)
    with pytest.raises(PairRefused, match="any of 2 pods of several namespaces") as refusal:
        await first(kubelet, pod("new", share("main", 10, 5)), PairMember.CORE)
    assert "rejected" not in str(refusal.value)
    told = [each["pods"] for each in logs if each["event"] == "asker_doubtful"]
    assert told == [["other/rejected", "default/new"]]


@in_virtual_time
async def test_a_pod_that_was_admitted_without_its_resource_holds_nobody_up() -> None:
    """In mode pgpu the kubelet knows no shares, admits who asks for some, and asks nobody."""
    kubelet = KubeletModel()
    squatter = pod("squatter", share("main", 30, 7), namespace="other", started=True)
    kubelet.api[squatter.key] = squatter
    kubelet.taken_up[squatter.key] = Admission(squatter)
    victim = pod("victim", share("main", 30, 5))
    await kubelet.admit(victim)
    assert len(kubelet.gpus_of(victim.key, "main")) == 1
    assert anyio.current_time() < 1
    # The next kubelet knows the resource when it admits its pods again.
    free = sorted(kubelet.listed(PairMember.CORE) - kubelet.in_use(PairMember.CORE))
    await kubelet.pairing.prefer(PairMember.CORE, 30, free)


@in_virtual_time
async def test_whoever_asks_beside_an_admission_is_not_taken_for_the_admitted_one() -> None:
    """A container starts whose pod was admitted without its resource: it asks beside the sync loop."""
    kubelet = KubeletModel()
    for new in (pod("squatter", share("main", 30, 7), started=True), pod("victim", share("main", 30, 5))):
        kubelet.api[new.key], kubelet.taken_up[new.key] = new, Admission(new)
    free = sorted(kubelet.listed(PairMember.CORE))
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            with pytest.raises(PairRefused, match="may be asked for by any of"):
                await kubelet.pairing.prefer(PairMember.CORE, 30, free)
            group.cancel_scope.cancel()

        group.start_soon(ask)
        await anyio.sleep(0.05)
        group.start_soon(kubelet.pairing.prefer, PairMember.CORE, 30, free)


@in_virtual_time
async def test_doubt_holds_admissions_up_for_a_part_of_the_time_alone() -> None:
    kubelet = KubeletModel()
    for name in ("rejected", "new"):
        waiting = pod(name, share("main", 10, 7))
        kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    free = sorted(kubelet.listed(PairMember.CORE))
    for hours in (0, 1):
        await anyio.sleep(3600 * hours)
        began, waits = anyio.current_time(), list[float]()
        while (since := anyio.current_time()) < began + 600:
            with pytest.raises(PairRefused, match="may be asked for by any of"):
                await kubelet.pairing.prefer(PairMember.CORE, 10, free)
            waits.append(anyio.current_time() - since)
            await anyio.sleep(5)
        assert waits[0] >= DOUBT_SECONDS
        assert sum(waits) < DOUBT_TOTAL_SECONDS + 600 * (DOUBT_SHARE + 0.05)


async def test_a_kubelet_too_slow_to_answer_in_time_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.pairing.resolver.PATIENCE_SECONDS", 0.05)
    kubelet = KubeletModel()

    async def late(deadline: float = 0.05) -> Record:
        kubelet.lists += 1
        await anyio.sleep(deadline)
        raise PodResourcesUnavailable("no answer")

    kubelet.look = late  # type: ignore[method-assign]
    # Either may be asking: more questions would have used up the call's time.
    waiting = pod("next", share("main", 20, 7))
    kubelet.api[waiting.key] = waiting
    with pytest.raises(PairRefused, match="may be asked for by any of default/next, default/same"):
        await first(kubelet, pod("same", share("main", 20, 7)), PairMember.CORE)
    assert kubelet.lists == 1


async def test_a_kubelet_that_takes_seconds_to_answer_costs_no_pod() -> None:
    kubelet = KubeletModel()
    look = kubelet.look

    async def slow(deadline: float = 1.0) -> Record:
        if deadline < 10:
            raise PodResourcesUnavailable("no answer within the deadline")
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]
    # Without the kubelet's answer either may be asking.
    waiting = pod("next", share("main", 20, 9))
    kubelet.api[waiting.key] = waiting
    await kubelet.admit(pod("asks", share("main", 20, 7)))
    assert kubelet.gpus_of(("default", "asks"), "main")


@in_virtual_time
async def test_an_api_server_that_answers_in_a_moment_costs_no_pod() -> None:
    """One that refuses calls, or restarts, while the kubelet admits a pod that the watch has not shown."""
    kubelet = KubeletModel()
    kubelet.cached, usual = False, kubelet.get

    async def refuses(namespace: str, name: str) -> Pod | None:
        if anyio.current_time() < back:
            raise PodsUnavailable("503")
        return await usual(namespace, name)

    kubelet.get = refuses  # type: ignore[method-assign]
    back = anyio.current_time() + DOUBT_SECONDS / 2
    await kubelet.admit(pod("a", share("main", 30, 10)))
    assert kubelet.gpus_of(("default", "a"), "main")
    # It is not waited for without end, and not at all where there is none.
    back = math.inf
    for kubelet.answers, longest in ((True, DOUBT_SECONDS + 1), (False, 2.0)):
        began = anyio.current_time()
        with pytest.raises(PairRefused, match="restore the connection to the API server"):
            await kubelet.admit(pod("b", share("main", 30, 10)))
        assert anyio.current_time() - began < longest


async def test_share_of_a_pod_that_ended_while_its_kubelet_was_away_is_free_once_it_was_asked_after() -> None:
    """Nobody but the API server, asked for it, says that it has ended: whole GPUs are as free, then."""
    kubelet = KubeletModel(gpus=1)
    before = pod("a", share("main", 80, 30))
    await kubelet.admit(before)
    kubelet.heard, kubelet.offers_held = set(), True
    with pytest.raises(PairRefused, match="do not fit on any single GPU"):
        await kubelet.admit(pod("b", share("main", 30, 20)))
    kubelet.renewed[before.key] = changed(before, phase="Succeeded")
    await kubelet.admit(pod("c", share("main", 30, 20)))
    assert kubelet.gpus_of(("default", "c"), "main")


@pytest.mark.parametrize("kept", [True, False])
async def test_who_was_asked_after_leaves_what_its_kubelet_keeps_for_it(*, kept: bool) -> None:
    """It does not offer that one's memory; nor will it offer its cores, in the call to come."""
    kubelet = KubeletModel(gpus=1)
    before, new = pod("before", share("main", 80, 20)), pod("new", share("main", 30, 10))
    await kubelet.admit(before)
    kubelet.heard = {new.key}
    kubelet.renewed[before.key] = changed(before, phase="Succeeded")
    kubelet.api[new.key], kubelet.taken_up[new.key] = new, Admission(new)
    memory = kubelet.listed(PairMember.MEMORY)
    offered = sorted(memory - kubelet.in_use(PairMember.MEMORY) if kept else memory)
    with pytest.raises(PairRefused, match="do not fit") if kept else nullcontext():
        await kubelet.pairing.prefer(PairMember.MEMORY, 10, offered)


@in_virtual_time
async def test_without_specs_nothing_is_guessed() -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    with pytest.raises(PairRefused, match="restore the connection to the API server") as refusal:
        await kubelet.admit(pod("p", share("main", 30, 10)))
    assert "default/p" in str(refusal.value)
    assert refusal.value.cause is Cause.UNAVAILABLE


@in_virtual_time
async def test_without_records_one_waiting_pod_is_enough() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = False
    await kubelet.admit(pod("a", share("main", 10, 5)))
    assert len(kubelet.gpus_of(("default", "a"), "main")) == 1
    queued = pod("queued", share("main", 10, 6))
    kubelet.api[queued.key] = queued
    with pytest.raises(PairRefused, match="nothing is guessed"):
        await kubelet.admit(pod("b", share("main", 10, 5)))


@in_virtual_time
async def test_with_nothing_readable_nothing_is_given() -> None:
    kubelet = KubeletModel()
    kubelet.records_readable = kubelet.specs_readable = False
    with pytest.raises(PairRefused, match="neither the kubelet's PodResources nor the API server") as refusal:
        await kubelet.admit(pod("a", share("main", 10, 5)))
    assert refusal.value.cause is Cause.UNAVAILABLE


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


@pytest.mark.parametrize(("watch", "served"), [("interrupted", True), ("interrupted", False), ("mute", True)])
async def test_a_successor_of_the_same_name_is_granted_as_itself(watch: str, served: bool) -> None:
    """A watch that is interrupted, or silent, shows the one before; its successor has a UID of its own."""
    kubelet = KubeletModel()
    before = pod("a", share("main", 20, 10), phase="Running" if served else "Pending")
    kubelet.api[before.key] = before
    after = changed(before, uid="uid-next", phase="Pending")
    kubelet.taken_up[after.key] = Admission(after)
    kubelet.renewed[after.key] = after
    kubelet.watching = watch == "mute"
    free = kubelet.listed(PairMember.CORE)
    ids = await kubelet.pairing.prefer(PairMember.CORE, 20, sorted(free))
    grant = await kubelet.pairing.allocate(PairMember.CORE, ids)
    assert grant.pod.uid == "uid-next"


@in_virtual_time
async def test_a_pod_that_was_served_asks_for_nothing_where_nobody_can_say_that_it_is_itself() -> None:
    kubelet = KubeletModel()
    before = pod("a", share("main", 20, 10), phase="Running")
    kubelet.api[before.key] = before
    kubelet.taken_up[before.key] = Admission(before)
    kubelet.watching = kubelet.reachable = False
    free = sorted(kubelet.listed(PairMember.CORE))
    with pytest.raises(PairRefused, match="restore the connection to the API server") as refusal:
        await kubelet.pairing.prefer(PairMember.CORE, 20, free)
    assert refusal.value.cause is Cause.UNAVAILABLE
    assert 1 < kubelet.gets < 5 * DOUBT_SECONDS
    # One that waits by the copy is most likely the same, and nothing else keeps it from starting.
    kubelet.api[before.key] = changed(before, phase="Pending")
    assert len(await kubelet.pairing.prefer(PairMember.CORE, 20, free)) == 20


@in_virtual_time
async def test_no_pod_of_an_old_copy_is_guessed_without_the_kubelets_record() -> None:
    """One that neither the record nor the watch shows may be asking for as much, of another namespace."""
    kubelet = KubeletModel()
    known = pod("a", share("main", 20, 10))
    kubelet.api[known.key] = known
    kubelet.records_readable = kubelet.reachable = False
    free = sorted(kubelet.listed(PairMember.CORE))
    # A watch may be mute for a minute before anybody notices.
    for kubelet.watching in (True, False):
        with pytest.raises(PairRefused, match="restore one of them") as refusal:
            await kubelet.pairing.prefer(PairMember.CORE, 20, free)
        assert refusal.value.cause is Cause.UNAVAILABLE
    kubelet.reachable = True
    assert len(await kubelet.pairing.prefer(PairMember.CORE, 20, free)) == 20


@in_virtual_time
async def test_without_a_record_all_that_the_api_server_lists_may_be_asking() -> None:
    """Storm 90015: a pod was deleted while the kubelet had yet to admit it, and another one got its share."""
    kubelet = KubeletModel()
    kubelet.records_readable = False
    known, size = pod("a", share("main", 20, 10)), 20
    kubelet.api[known.key] = known
    free = sorted(kubelet.listed(PairMember.CORE))
    unseen = pod("b", share("main", 20, 10), namespace="other")
    for other in (unseen, changed(unseen, ending=True)):
        kubelet.renewed[unseen.key] = other  # the watch is mute
        with pytest.raises(PairRefused, match="nothing is guessed"):
            await kubelet.pairing.prefer(PairMember.CORE, size, free)
    # Nor is a container that an agent before may have served known from the next one of its pod.
    kubelet.renewed.clear()
    kubelet.api[known.key] = pod("a", share("main", 20, 10), share("second", 20, 30))
    with pytest.raises(PairRefused, match="nothing is guessed"):
        await kubelet.pairing.prefer(PairMember.CORE, size, free)
    kubelet.api[known.key] = changed(known, ending=True)
    with pytest.raises(PairRefused, match="no pod of this node is known to wait"):
        await kubelet.pairing.prefer(PairMember.CORE, size, free)
