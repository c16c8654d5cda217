"""A StatefulSet's pod is replaced: the kubelet's checkpoint names the one before until its next writing."""

import pytest

from agent.model.holding import PairMember
from agent.model.pod import VGPU
from tests.pods import changed
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share


@pytest.mark.parametrize("seed", range(4))
async def test_the_next_pod_of_a_statefulset_gets_its_share(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names that were remembered, its second half counted as had before it was asked for."""
    kubelet = KubeletModel(gpus=1, seed=seed)
    before = pod("web-0", share("main", 60, 20))
    await kubelet.admit(before)
    written = kubelet.checkpoint()
    # The kubelet writes the next one down once its container has all its devices.
    monkeypatch.setattr(kubelet, "checkpoint", lambda: written)
    await kubelet.refresh()
    kubelet.end(before.key)
    await kubelet.refresh()  # freed, and still in the file
    after = changed(before, uid="uid-next", phase="Pending")
    await kubelet.admit(after)
    assert kubelet.gpus_of(after.key, "main")


@pytest.mark.parametrize("seed", range(4))
async def test_without_a_record_what_an_earlier_pod_of_the_name_held_is_not_its_own(
    seed: int,
) -> None:
    """Storm 10000056: its first container was taken for served, and its cores for the second one's."""
    kubelet = KubeletModel(gpus=2, seed=seed)
    containers = share("side", 25, 2), share("main", 25, 1)
    await kubelet.admit(pod("twin", *containers))
    await kubelet.refresh()
    kubelet.records_readable = False
    twin = pod("twin", *containers, uid="uid-of-the-second")
    kubelet.api[twin.key], kubelet.taken_up[twin.key] = twin, Admission(twin)
    for member, size in ((PairMember.MEMORY, 2), (PairMember.CORE, 25)):
        free = sorted(kubelet.listed(member) - kubelet.in_use(member))
        ids = await kubelet.pairing.prefer(member, size, free)
        grant = await kubelet.pairing.allocate(member, ids)
        assert (grant.pod.uid, grant.container) == ("uid-of-the-second", "side")


async def test_without_a_record_a_successor_is_not_tied_to_the_gpu_of_the_earlier_pod() -> None:
    kubelet = KubeletModel(gpus=2)
    await kubelet.admit(pod("twin", share("main", 25, 1)))
    await kubelet.admit(pod("beside", share("main", 70, 1)))
    await kubelet.refresh()
    kubelet.records_readable = False
    twin = pod("twin", share("main", 50, 1), uid="uid-of-the-second")
    kubelet.api[twin.key], kubelet.taken_up[twin.key] = twin, Admission(twin)
    free = sorted(kubelet.listed(PairMember.CORE) - kubelet.in_use(PairMember.CORE))
    ids = await kubelet.pairing.prefer(PairMember.CORE, 50, free)
    grant = await kubelet.pairing.allocate(PairMember.CORE, ids)
    beside = kubelet.taken_up["default", "beside"].held["main", VGPU.core]
    assert grant.gpus != (min(beside).partition("::")[0],)
