"""A StatefulSet's pod is replaced: the kubelet's checkpoint names the one before until its next writing."""

import pytest

from tests.pods import changed
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share


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
