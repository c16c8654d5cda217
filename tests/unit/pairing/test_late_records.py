"""A reading that began between the answer of an Allocate and the kubelet's note of it shows nothing of it."""

from dataclasses import replace

import pytest

from agent.holdings.record import View
from agent.kubelet.wire import Refused
from agent.model.pod import VGPU, Container, Stage
from agent.pairing.resolver import PairRefused
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share

pytestmark = pytest.mark.anyio


async def test_a_reading_of_the_same_moment_is_no_proof() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("before", share("main", 10, 10)))
    kubelet.now += 1.0
    shown = kubelet._listed()  # what PodResources answers until the kubelet has noted the next grant
    first_one = pod("a", share("main", 10, 10))
    await kubelet.admit(first_one)
    kubelet.now += 0.005
    # It lists the pod, whose admission it has begun, and not yet what it has just been granted.
    containers = (*shown.containers, (*first_one.key, "main"))
    kubelet.pairing.observe(replace(shown, containers=containers, began=kubelet.now))
    kubelet.records_readable = False
    kubelet.now += 60.0
    kubelet.offers_held = True
    with pytest.raises(PairRefused, match="do not fit on any single GPU"):
        await kubelet.admit(pod("b", share("main", 85, 10)))


async def test_what_was_granted_in_vain_is_free_again_by_readings_that_show_nothing_new() -> None:
    """`HoldingsWatch` publishes no record that equals the one before (`began` is not compared)."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    # The watch is away all the time and GETs are answered: nobody says that the pod is Failed.
    kubelet.cached = kubelet.watching = False
    kubelet._view = lambda: View({}, False)  # type: ignore[method-assign]
    await kubelet.refresh()
    kubelet.now += 1.0

    def another_plugin_refuses(step: int) -> None:
        kubelet.now += 0.01
        if step == 2:  # the first member is granted
            raise Refused("another plugin's Allocate failed")

    with pytest.raises(Refused):
        await kubelet.admit(pod("a", share("main", 10, 10)), another_plugin_refuses)
    assert kubelet.pairing.waiting == 1
    for _ in range(12):
        kubelet.now += 5.0
        record = await kubelet.look()
        if record != kubelet.cell.value:
            kubelet.cell.publish(record)
        kubelet.shares.refresh()  # as at each change of inventory or modes
    assert kubelet.pairing.waiting == 0


@pytest.mark.parametrize("stands", ["nameless", "nowhere"])
@pytest.mark.parametrize(("early", "late"), [(100, 100), (100, 200), (200, 200)])
async def test_whole_gpus_of_an_init_container_go_to_its_heir_before_a_record_shows_whose_they_are(
    early: int, late: int, stands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mute watch leaves what the checkpoint has of it without a name; one that is torn has nothing."""
    kubelet = KubeletModel(gpus=2)
    kubelet.cached = False
    monkeypatch.setattr(kubelet, "_view", View)
    if stands == "nowhere":
        monkeypatch.setattr(kubelet, "checkpoint", dict)
    init, main = (
        Container("init", {VGPU.core: early}, Stage.INIT),
        Container("main", {VGPU.core: late}),
    )
    both = pod("both", init, main)
    await kubelet.admit(both)
    assert len(kubelet.gpus_of(both.key, "main")) == late // 100
    assert kubelet.gpus_of(both.key, "init") <= kubelet.gpus_of(both.key, "main")
    with pytest.raises((PairRefused, Refused)):
        await kubelet.admit(pod("other", Container("main", {VGPU.core: 300 - late})))
