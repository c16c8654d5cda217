"""A static pod asks whose mirror the API server has not got yet: its share goes to no other."""

import pytest

from agent.model.holding import PairMember
from agent.model.pod import Container, Pod
from agent.pairing.resolver import PairRefused
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
    free = sorted(kubelet.listed(PairMember.CORE))
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, free)


class Counting(KubeletModel):
    asked = 0

    async def get(self, namespace: str, name: str) -> Pod | None:
        self.asked += 1
        return await super().get(namespace, name)


@pytest.mark.parametrize("alike", ["one that runs", "two that wait"])
@in_virtual_time
async def test_absent_pods_are_not_asked_for_again_and_again(alike: str) -> None:
    kubelet = Counting()
    gone = [pod(f"deleted-by-force-{n}", Container("main", {})) for n in range(100)]
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    two = [pod("a", share("main", 30, 10)), pod("b", share("main", 30, 10))]
    there = [runs] if alike == "one that runs" else two
    kubelet.api = {each.key: each for each in there}
    kubelet.taken_up = {each.key: Admission(each) for each in (*gone, *there)}
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, sorted(kubelet.listed(PairMember.CORE)))
    assert kubelet.asked <= 10 * len(gone)
