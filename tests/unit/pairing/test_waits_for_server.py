"""Who waits for an API server that does not answer, and for how long."""

from typing import Any

import anyio
import pytest

from agent.kubelet.podresources import PodResourcesUnavailable
from agent.kubelet.service import ANSWER_SECONDS
from agent.model.holding import PairMember, Record
from agent.model.pod import Pod
from agent.pairing.pod_source import PodsUnavailable
from agent.pairing.resolver import DOUBT_SECONDS, PairRefused
from tests.pods import changed
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


@pytest.mark.parametrize("starting", [1, 2, 3])
@in_virtual_time
async def test_containers_that_start_cost_no_admission_beside_them(starting: int) -> None:
    """Those of pods that were admitted without their resource ask at each start, beside the sync loop."""
    kubelet = KubeletModel()
    kubelet.watching = kubelet.reachable = False
    for n in range(starting):
        squatter = pod(f"squatter-{n}", share("main", 30 + n, 7), phase="Running", started=True)
        kubelet.api[squatter.key], kubelet.taken_up[squatter.key] = squatter, Admission(squatter)
    victim = pod("victim", share("main", 10, 5))
    kubelet.api[victim.key], kubelet.taken_up[victim.key] = victim, Admission(victim)
    free = sorted(kubelet.listed(PairMember.CORE))
    took = float("inf")

    async def start(size: int) -> None:
        with pytest.raises(PairRefused):
            await kubelet.pairing.prefer(PairMember.CORE, size, free)

    async def admit() -> None:
        nonlocal took
        began = anyio.current_time()
        with anyio.move_on_after(ANSWER_SECONDS):
            await kubelet.pairing.prefer(PairMember.CORE, 10, free)
            took = anyio.current_time() - began

    async with anyio.create_task_group() as group:
        for n in range(starting):
            group.start_soon(start, 30 + n)
        await anyio.sleep(0.01)
        group.start_soon(admit)
    assert took < ANSWER_SECONDS, "the victim's call ran into its deadline: its pod is rejected for good"


@pytest.mark.parametrize(("beside", "waits"), [("a resize", True), ("a start", False)])
@in_virtual_time
async def test_a_call_in_line_ends_the_wait_and_a_resize_does_not(*, beside: str, waits: bool) -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    gpu = next(iter(kubelet.pairing.ledger.pools))
    free = sorted(kubelet.listed(PairMember.CORE))
    kubelet.taken_up["default", "a"] = Admission(pod("a", share("main", 10, 5)))

    async def keep(ids: tuple[str, ...]) -> None:
        assert ids

    async def later() -> None:
        await anyio.sleep(1)
        if beside == "a resize":
            await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 1, keep)
        else:
            with pytest.raises(PairRefused):
                await kubelet.pairing.prefer(PairMember.CORE, 30, free)

    async with anyio.create_task_group() as group:
        group.start_soon(later)
        with pytest.raises(PairRefused, match="restore the connection to the API server"):
            await kubelet.pairing.prefer(PairMember.CORE, 10, free)
        assert (anyio.current_time() >= DOUBT_SECONDS) is waits


@in_virtual_time
async def test_an_answer_of_no_use_is_not_waited_for() -> None:
    """As a 403 for want of a right, or what cannot be understood."""
    kubelet = KubeletModel()
    kubelet.cached = False
    new = pod("a", share("main", 20, 10))
    kubelet.taken_up[new.key] = Admission(new)

    async def forbidden(namespace: str, name: str) -> Pod | None:
        raise PodsUnavailable("403", away=False)

    kubelet.get = forbidden  # type: ignore[method-assign]
    with pytest.raises(PairRefused, match="may be asked for by any of default/a: nothing is guessed"):
        await kubelet.pairing.prefer(PairMember.CORE, 20, sorted(kubelet.listed(PairMember.CORE)))
    assert anyio.current_time() < 1


@in_virtual_time
async def test_a_call_asks_seldom_for_each_of_many_pods(logs: Any) -> None:
    """110 pods, of one of which the API server says nothing."""
    kubelet = KubeletModel()
    kubelet.cached, asked = False, list[str]()
    for n in range(110):
        each = pod(f"p{n}", share("main", 20, 10))
        kubelet.taken_up[each.key] = Admission(each)
        kubelet.api[each.key] = changed(each, containers=())

    async def get(namespace: str, name: str) -> Pod | None:
        asked.append(name)
        if name == "p7":
            raise PodsUnavailable("503")
        return kubelet.api[namespace, name]

    kubelet.get = get  # type: ignore[method-assign]
    with pytest.raises(PairRefused, match="any of default/p7: nothing is guessed"):
        await kubelet.pairing.prefer(PairMember.CORE, 20, sorted(kubelet.listed(PairMember.CORE)))
    assert DOUBT_SECONDS <= anyio.current_time() < DOUBT_SECONDS + 1
    assert 109 + 5 < len(asked) < 109 + 20
    assert [each["pod"] for each in logs if each["event"] == "pod_unreadable"] == ["default/p7"]


@in_virtual_time
async def test_a_call_waits_ten_seconds_from_its_arrival() -> None:
    kubelet = KubeletModel()
    kubelet.specs_readable = False
    kubelet.taken_up["default", "a"] = Admission(pod("a", share("main", 10, 5)))
    gpu = next(iter(kubelet.pairing.ledger.pools))

    async def slow(ids: tuple[str, ...]) -> None:
        await anyio.sleep(8)

    async with anyio.create_task_group() as group:
        group.start_soon(kubelet.pairing.set_aside, gpu, PairMember.MEMORY, 1, slow)
        await anyio.sleep(0.01)
        with pytest.raises(PairRefused):
            await kubelet.pairing.prefer(PairMember.CORE, 10, sorted(kubelet.listed(PairMember.CORE)))
    assert anyio.current_time() < DOUBT_SECONDS + 1


@in_virtual_time
async def test_a_successor_of_a_pod_that_is_over_is_waited_for_too() -> None:
    """A StatefulSet's next pod, while the watch is interrupted and the API server restarts for 3 s."""
    kubelet = KubeletModel()
    before = pod("web-0", share("main", 20, 10), phase="Succeeded")
    after = changed(before, uid="uid-next", phase="Pending")
    kubelet.watching = False
    kubelet.api[before.key], kubelet.renewed[after.key] = before, after
    kubelet.taken_up[after.key] = Admission(after)

    async def refuses(namespace: str, name: str) -> Pod | None:
        if anyio.current_time() < 3:
            raise PodsUnavailable("503")
        return kubelet.renewed[after.key]

    kubelet.get = kubelet.fetch = refuses  # type: ignore[method-assign]
    ids = await kubelet.pairing.prefer(PairMember.CORE, 20, sorted(kubelet.listed(PairMember.CORE)))
    assert len(ids) == 20


@in_virtual_time
async def test_kubelets_record_and_api_server_back_in_a_moment() -> None:
    """Both cannot be read for 3 s, as when a whole control plane node restarts with its kubelet."""
    kubelet = KubeletModel()
    new = pod("a", share("main", 20, 10))
    kubelet.api[new.key], kubelet.taken_up[new.key] = new, Admission(new)
    look, lists = kubelet.look, kubelet.list_now

    async def later(deadline: float = 1.0) -> Record:
        if anyio.current_time() < 3:
            raise PodResourcesUnavailable("connection refused")
        return await look(deadline)

    async def lists_later() -> object:
        if anyio.current_time() < 3:
            raise PodsUnavailable("connection refused")
        return await lists()

    kubelet.look, kubelet.list_now = later, lists_later  # type: ignore[method-assign,assignment]
    ids = await kubelet.pairing.prefer(PairMember.CORE, 20, sorted(kubelet.listed(PairMember.CORE)))
    assert len(ids) == 20


@in_virtual_time
async def test_an_outage_leaves_patience_for_equal_pods() -> None:
    """Waits for the API server use up what is kept for pods that look alike (kubelets before 1.34)."""
    kubelet = KubeletModel()
    kubelet.cached, kubelet.specs_readable = False, False
    lost = pod("lost", share("main", 11, 3))
    kubelet.api[lost.key], kubelet.taken_up[lost.key] = lost, Admission(lost)
    free = sorted(kubelet.listed(PairMember.CORE))
    for _ in range(3):
        with pytest.raises(PairRefused):
            await kubelet.pairing.prefer(PairMember.CORE, 11, free)
    kubelet.end(lost.key)
    kubelet.cached = kubelet.specs_readable = True
    await anyio.sleep(5)
    rejected, new = pod("rejected", share("main", 10, 7)), pod("new", share("main", 10, 7))
    for each in (rejected, new):
        kubelet.api[each.key], kubelet.taken_up[each.key] = each, Admission(each)

    async def shown() -> None:
        await anyio.sleep(6)
        kubelet.api[rejected.key] = changed(rejected, phase="Failed")

    async with anyio.create_task_group() as group:
        group.start_soon(shown)
        assert len(await kubelet.pairing.prefer(PairMember.CORE, 10, free)) == 10
