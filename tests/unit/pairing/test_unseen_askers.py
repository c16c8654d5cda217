"""A static pod asks whose mirror the API server has not got yet: its share goes to no other."""

from contextlib import nullcontext

import anyio
import pytest

from agent.model.holding import PairMember
from agent.model.pod import Container, Pod
from agent.pairing.resolver import DOUBT_SECONDS, PairRefused
from tests.pods import changed
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_without_a_record_a_static_pods_share_is_not_given_to_one_that_runs() -> None:
    """As storm 1000081, and PodResources cannot be read at that moment."""
    kubelet = KubeletModel()
    runs = pod("runs", share("main", 30, 10))
    await kubelet.admit(runs)
    runs = kubelet.api[runs.key] = changed(runs, phase="Running", started=True)
    await kubelet.refresh()
    kubelet.now += 60
    await kubelet.refresh()
    # the static pod asks, its mirror is not there
    static = pod("static-node1", share("main", 30, 10))
    kubelet.taken_up[static.key] = Admission(static)
    kubelet.records_readable = False
    free = sorted(kubelet.listed(PairMember.CORE) - kubelet.in_use(PairMember.CORE))
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, free)


@in_virtual_time
async def test_static_pods_share_is_not_given_to_a_pod_that_was_just_turned_away() -> None:
    """A kubelet before 1.34 lists it until its status is written, and has no way to the API server."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    rejected = pod("rejected", share("main", 30, 10))  # by another plugin, or by us: waits by the API server
    static = pod("static-node1", share("main", 30, 10))
    kubelet.api[rejected.key] = rejected
    kubelet.taken_up = {each.key: Admission(each) for each in (rejected, static)}
    kubelet.pairing.turn_away(rejected, "was refused")
    free = kubelet.free_cores()
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, free)


@in_virtual_time
async def test_without_a_record_one_that_came_after_the_call_is_not_the_asker() -> None:
    """As storm 1000177: the kubelet asks for no pod before the API server has it, but for a static one."""
    kubelet = KubeletModel()
    kubelet.records_readable = False
    came = pod("came", share("main", 30, 10))

    async def comes() -> None:
        await anyio.sleep(0.1)
        kubelet.api[came.key] = came

    async with anyio.create_task_group() as group:
        group.start_soon(comes)
        with pytest.raises(PairRefused):
            await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
    assert len(await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())) == 30


@pytest.mark.parametrize("listed", ["a reading before it", "before it", "after it", "a reading after it"])
@in_virtual_time
async def test_static_pods_share_is_not_given_to_one_that_waits(listed: str) -> None:
    """Another plugin has just ended the one that waits by the API server; kubelets before 1.34 list it on."""
    kubelet = KubeletModel()
    static = Admission(pod("static-node1", share("main", 30, 10)))
    waits = Admission(pod("waits", share("main", 30, 10)))
    kubelet.api[waits.pod.key] = waits.pod
    for each in [static, waits] if "after" in listed else [waits, static]:
        kubelet.taken_up[each.pod.key] = each
        if "reading" in listed:
            await kubelet.refresh()
    # The kubelet admits one after the other: one that is listed before another is through.
    is_through = listed == "a reading after it"
    with nullcontext() if is_through else pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
    assert (anyio.current_time() >= DOUBT_SECONDS) is not is_through


@in_virtual_time
async def test_mirror_that_comes_a_moment_later_costs_no_admission() -> None:
    kubelet = KubeletModel()
    static, new = pod("static-node1", Container("main", {})), pod("new", share("main", 30, 10))
    kubelet.taken_up = {each.key: Admission(each) for each in (static, new)}
    kubelet.api[new.key] = new

    async def mirrored() -> None:
        await anyio.sleep(0.1)
        kubelet.api[static.key] = static

    async with anyio.create_task_group() as group:
        group.start_soon(mirrored)
        assert await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
    assert anyio.current_time() < 1


@in_virtual_time
async def test_static_pod_whose_mirror_never_comes_holds_nobody_up() -> None:
    """It wants no GPU, and others came after it: they are admitted at once."""
    kubelet = KubeletModel()
    static = pod("static-node1", Container("main", {}))
    kubelet.taken_up[static.key] = Admission(static)
    await kubelet.refresh()
    for n in range(3):
        await kubelet.admit(pod(f"new-{n}", share("main", 20, 5)))
    assert anyio.current_time() < 1


@in_virtual_time
async def test_static_pod_without_mirror_costs_starts_and_no_admission() -> None:
    """A pod that was admitted without its resource asks when its container starts."""
    kubelet = KubeletModel()
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    static = pod("static-node1", Container("main", {}))
    kubelet.api[runs.key] = runs
    kubelet.taken_up = {each.key: Admission(each) for each in (runs, static)}
    for n in range(2):
        with pytest.raises(PairRefused, match="any of default/runs, default/static-node1"):
            await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
        began = anyio.current_time()
        await kubelet.admit(pod(f"new-{n}", share("main", 20, 5)))
        assert anyio.current_time() - began < 1
    del kubelet.taken_up[static.key]
    assert await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())


@in_virtual_time
async def test_call_that_ends_says_nothing_of_a_pod_whose_own_stands_in_line() -> None:
    """A container starts beside the admission of the static pod, which has been listed and asks next."""
    kubelet = KubeletModel()
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    static = pod("static-node1", share("main", 30, 10))
    kubelet.api[runs.key] = runs
    kubelet.taken_up = {each.key: Admission(each) for each in (runs, static)}

    async def ask(after: float) -> None:
        await anyio.sleep(after)
        with pytest.raises(PairRefused):
            await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())

    async with anyio.create_task_group() as group:
        group.start_soon(ask, 0)
        group.start_soon(ask, 5)


class Counting(KubeletModel):
    asked = 0

    async def get(self, namespace: str, name: str) -> Pod | None:
        self.asked += 1
        return await super().get(namespace, name)


@pytest.mark.parametrize("alike", ["one that runs", "two that wait"])
@in_virtual_time
async def test_absent_pods_are_not_asked_for_again_and_again(alike: str) -> None:
    kubelet = Counting()
    gone = [pod(f"static-{n}-node1", Container("main", {})) for n in range(100)]
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    two = [pod("a", share("main", 30, 10)), pod("b", share("main", 30, 10))]
    there = [runs] if alike == "one that runs" else two
    kubelet.api = {each.key: each for each in there}
    kubelet.taken_up = {each.key: Admission(each) for each in (*gone, *there)}
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
    assert kubelet.asked <= 10 * len(gone)
