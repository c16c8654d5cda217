"""The part of the record that concerns one pair, over several readings."""

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.model.health import Health, HealthState
from agent.model.holding import Holding, PairMember, Record, Source
from agent.model.pod import VGPU
from agent.pairing.resolver import PodSource, RequesterResolver
from tests.unit.pairing.asking import InOrder, index
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share

CORES = Holding("default", "a", "main", VGPU.core, ("GPU-a::c0",))
BLOCKS = Holding("default", "a", "main", VGPU.memory, ("GPU-a::m0", "GPU-a::m1"))
WHOLE = Holding("default", "b", "main", "nvidia.com/gpu", ("GPU-b",))
NAMELESS = Holding("", "pod with UID 1", "main", VGPU.core, ("GPU-a::c1",), Source.CHECKPOINT)
LISTED = (("default", "a", "main"), ("default", "b", "main"))


def resolver() -> RequesterResolver:
    return RequesterResolver(VGPU, cast("Any", None), PodSource())


def test_only_units_of_the_pair_and_of_pods_with_names_count() -> None:
    record = Record((CORES, BLOCKS, WHOLE, NAMELESS), LISTED)
    found = resolver().held(record)
    assert (found.cores, found.blocks) == ((CORES,), (BLOCKS,))
    assert record.pods == {("default", "a"), ("default", "b")}


def test_what_did_not_change_is_the_same_object() -> None:
    calls = resolver()
    first = calls.held(Record((CORES, BLOCKS), LISTED))
    assert calls.held(Record((CORES, BLOCKS), LISTED[:1])) is first
    fewer = calls.held(Record((BLOCKS,), LISTED))
    assert (fewer.cores, fewer.blocks) == ((), (BLOCKS,))


def test_a_holding_that_changed_is_read_again() -> None:
    calls = resolver()
    calls.held(Record((CORES,), LISTED))
    more = replace(CORES, ids=("GPU-a::c0", "GPU-a::c7"))
    assert calls.held(Record((more,), LISTED)).ids == {"GPU-a::c0", "GPU-a::c7"}
    init = replace(CORES, source=Source.CHECKPOINT)
    assert [each.listed for each in calls.held(Record((init,), LISTED)).cores] == [False]
    # All objects are others, as after a restart of the kubelet: nothing of an earlier reading comes back.
    for number in range(50):
        fresh = replace(CORES, ids=(f"GPU-a::c{number}",))
        assert calls.held(Record((fresh,), LISTED)).ids == {f"GPU-a::c{number}"}


@pytest.mark.parametrize("order", list(itertools.permutations(PairMember)))
async def test_a_kubelet_that_keeps_one_half_of_a_pod_that_is_over_keeps_the_other(
    order: tuple[PairMember, PairMember],
) -> None:
    """Storm 70005: one that has just started frees nothing before it has heard of all pods."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    gone = pod("gone", share("main", 50, 20))
    await kubelet.admit(gone)
    await kubelet.refresh()
    del kubelet.api[gone.key]
    kubelet.heard = set()
    kubelet.random = InOrder([*order], [*order])
    await kubelet.admit(pod("next", share("main", 60, 21)))
    assert index(kubelet, ("default", "next")) == [1]
    del kubelet.taken_up[gone.key]  # now it has heard of all
    await kubelet.admit(pod("last", share("main", 90, 35)))
    assert index(kubelet, ("default", "last")) == [0]


async def test_a_kubelet_that_keeps_the_units_of_one_pod_that_is_over_has_freed_those_of_another() -> None:
    """It counted one as running that ended within the call, and its checkpoint still names both."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    earlier, just_now = (pod(name, share("main", 60, 30)) for name in ("earlier", "just-now"))
    for each in (earlier, just_now):
        await kubelet.admit(each)
    await kubelet.refresh()
    written = kubelet.checkpoint()
    kubelet.checkpoint = lambda: written  # type: ignore[method-assign]
    kubelet.end(earlier.key)
    del kubelet.api[just_now.key]
    kubelet.heard = set()
    await kubelet.admit(pod("next", share("main", 90, 35)))
    assert index(kubelet, ("default", "next")) == [0]


async def test_units_of_a_lost_gpu_are_withheld_for_nobody() -> None:
    """Storm 1000057: the kubelet was taken to keep for its pods what the checkpoint still names."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    for name in ("a", "b"):
        await kubelet.admit(pod(name, share("main", 60, 30)))
    await kubelet.refresh()
    written = kubelet.checkpoint()
    kubelet.checkpoint = lambda: written  # type: ignore[method-assign]
    for name in ("a", "b"):
        kubelet.end(("default", name))
    well, lost = kubelet.inventory.value.gpus
    states = (well, replace(lost, health=Health(HealthState.UNHEALTHY)))
    kubelet.inventory.publish(replace(kubelet.inventory.value, gpus=states))
    await kubelet.refresh()
    await kubelet.admit(pod("next", share("main", 90, 35)))
    assert kubelet.gpus_of(("default", "next"), "main") == {well.uuid}
