"""The part of the record that concerns one pair, over several readings."""

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.holdings.record import View
from agent.model.health import Health, HealthState
from agent.model.holding import Holding, PairMember, Record, Source
from agent.model.placement import PlacementPolicy
from agent.model.pod import VGPU, Pod, Stage
from agent.pairing.pod_source import PodSource
from agent.pairing.resolver import RequesterResolver, resource_of
from tests.pods import changed
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


async def written(kubelet: KubeletModel, *pods: Pod) -> None:
    """They run; the kubelet's checkpoint names what it names now for good."""
    for each in pods:
        await kubelet.admit(each)
    await kubelet.refresh()
    entries = kubelet.checkpoint()
    kubelet.checkpoint = lambda: entries  # type: ignore[method-assign]


def kept_for(kubelet: KubeletModel, *gone: Pod) -> None:
    """They are over, and the kubelet, which has just started, does not list them and frees nothing yet."""
    for each in gone:
        del kubelet.api[each.key]
    kubelet.heard = set()


@pytest.mark.parametrize("order", list(itertools.permutations(PairMember)))
async def test_a_kubelet_that_keeps_one_half_of_a_pod_that_is_over_keeps_the_other(
    order: tuple[PairMember, PairMember],
) -> None:
    """Storm 70005: one that has just started frees nothing before it has heard of all pods."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    gone = pod("gone", share("main", 50, 20))
    await kubelet.admit(gone)
    await kubelet.refresh()
    kept_for(kubelet, gone)
    kubelet.random = InOrder([*order], [*order])
    await kubelet.admit(pod("next", share("main", 60, 21)))
    assert index(kubelet, ("default", "next")) == [1]
    del kubelet.taken_up[gone.key]  # now it has heard of all
    await kubelet.admit(pod("last", share("main", 90, 35)))
    assert index(kubelet, ("default", "last")) == [0]


async def test_of_whom_a_kubelet_offers_anything_it_keeps_nothing() -> None:
    """Another pod had some of it, and ended within the call."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    earlier, just_now = pod("earlier", share("main", 100, 0)), pod("just-now", share("main", 5, 1))
    await kubelet.admit(earlier)
    await kubelet.refresh()
    written, usual = kubelet.checkpoint(), kubelet.checkpoint
    kubelet.checkpoint = lambda: {**written, **usual()}  # type: ignore[method-assign]
    kubelet.end(earlier.key)
    await kubelet.admit(just_now)
    await kubelet.refresh()
    del kubelet.api[just_now.key]
    kubelet.heard = set()
    await kubelet.admit(pod("next", share("main", 5, 6)))
    assert index(kubelet, ("default", "next")) == [0]


async def test_a_kubelet_that_keeps_the_units_of_one_pod_that_is_over_has_freed_those_of_another() -> None:
    """It counted one as running that ended within the call, and its checkpoint still names both."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    earlier, just_now = (pod(name, share("main", 60, 30)) for name in ("earlier", "just-now"))
    await written(kubelet, earlier, just_now)
    kubelet.end(earlier.key)
    kept_for(kubelet, just_now)
    await kubelet.admit(pod("next", share("main", 90, 35)))
    assert index(kubelet, ("default", "next")) == [0]


@pytest.mark.parametrize("order", list(itertools.permutations(PairMember)))
@pytest.mark.parametrize("alone", [(100, 0), (0, 30)])
@pytest.mark.parametrize("both", [(60, 30), None])
@pytest.mark.parametrize("hint", ["", "1"])
async def test_gpus_come_last_of_whose_kept_units_the_call_says_nothing(
    alone: tuple[int, int], both: tuple[int, int] | None, hint: str, order: tuple[PairMember, PairMember]
) -> None:
    """Those of pods that had the other member alone, also where a scheduler's choice has no room."""
    kubelet = KubeletModel(gpus=3, blocks=40)
    kubelet.policy = PlacementPolicy.SPREAD
    gone = [pod("one-member", share("main", *alone)), *([pod("both", share("main", *both))] if both else [])]
    other = [] if both else [pod("runs", share("main", 60, 30))]
    for each in (*gone, *other):
        await kubelet.admit(each)
    await kubelet.refresh()
    kept_for(kubelet, *gone)
    kubelet.heard = {each.key for each in other}
    kubelet.random = InOrder([*order], [*order])
    choice = {"tencent.com/predicate-gpu-idx-0": hint} if hint else {}
    await kubelet.admit(pod("next", share("main", 50, 20), annotations=choice))
    assert index(kubelet, ("default", "next")) == [2]
    # Where there is no other, it is taken for free: the kubelet may have freed it, and not written so yet.
    before, usual = kubelet.checkpoint(), kubelet.checkpoint
    kubelet.checkpoint = lambda: {**before, **usual()}  # type: ignore[method-assign]
    del kubelet.taken_up[gone[0].key]
    await kubelet.admit(pod("last", share("main", 60, 30)))
    assert index(kubelet, ("default", "last")) == [0]


async def test_a_gpu_of_doubtful_units_comes_before_one_whose_list_has_just_grown() -> None:
    kubelet = KubeletModel(gpus=2, blocks=40)
    gone, (_, grown) = pod("whole", share("main", 100, 0)), kubelet.pairing.ledger.pools
    await kubelet.admit(gone)
    await kubelet.refresh()
    before, usual = kubelet.checkpoint(), kubelet.checkpoint
    kubelet.checkpoint = lambda: {**before, **usual()}  # type: ignore[method-assign]
    kubelet.end(gone.key)
    kubelet.pairing._unsettled = lambda: frozenset({grown})  # type: ignore[method-assign]
    kubelet.random = InOrder([PairMember.MEMORY, PairMember.CORE])
    await kubelet.admit(pod("next", share("main", 50, 20)))
    assert index(kubelet, ("default", "next")) == [0]


async def test_a_schedulers_choice_is_followed_where_a_kubelet_may_keep_units() -> None:
    """It has seen their end; the kubelet withholds those of another pod, which ended within the call."""
    kubelet = KubeletModel(gpus=3, blocks=40)
    gone = [pod("whole", share("main", 100, 0)), pod("just-now", share("main", 60, 30))]
    await written(kubelet, *gone)
    kubelet.end(gone[0].key)
    kept_for(kubelet, gone[1])
    kubelet.random = InOrder([PairMember.MEMORY, PairMember.CORE])
    choice = {"tencent.com/predicate-gpu-idx-0": "0"}
    await kubelet.admit(pod("next", share("main", 50, 20), annotations=choice))
    assert index(kubelet, ("default", "next")) == [0]


async def test_what_a_kubelet_keeps_is_known_after_the_api_server_was_asked() -> None:
    kubelet = KubeletModel(gpus=2, blocks=40)
    kept, freed = (pod(name, share("main", 60, 30)) for name in ("kept", "freed"))
    await written(kubelet, kept, freed)
    kept_for(kubelet, kept)
    kubelet.renewed[freed.key] = changed(freed, phase="Succeeded")  # the watch does not show it yet
    del kubelet.taken_up[freed.key]
    kubelet.random = InOrder([*PairMember], [*PairMember])
    await kubelet.admit(pod("next", share("main", 40, 35)))
    assert index(kubelet, ("default", "next")) == [1]


async def test_a_pod_whose_name_nobody_knows_keeps_both_members() -> None:
    """As after a reboot, while the watch is not up yet."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    await kubelet.admit(pod("before", share("main", 50, 30)))
    await kubelet.refresh()
    kubelet.start_agent()
    kubelet.heard, kubelet.cached = set(), False
    kubelet._view = View  # type: ignore[method-assign]
    kubelet.random = InOrder([*PairMember], [*PairMember])
    await kubelet.admit(pod("next", share("main", 40, 20)))
    assert index(kubelet, ("default", "next")) == [1]


async def admitted_up_to_init(
    kubelet: KubeletModel, begun: Pod
) -> tuple[dict[tuple[str, str], frozenset[str]], dict[PairMember, frozenset[str]]]:
    """An agent that begins, with a mute watch, before a pod's main container has what its init container had.

    Answers what the kubelet has of the pod, and what it will ask for.
    """
    await kubelet.admit(begun)
    held = kubelet.taken_up[begun.key].held
    units = {member: held.pop(("main", resource_of(VGPU, member))) for member in reversed(PairMember)}
    kubelet.api[begun.key] = begun
    kubelet.start_agent()
    kubelet.heard, kubelet.cached = {begun.key}, False
    kubelet._view = View  # type: ignore[method-assign]
    return held, units


async def test_what_a_pod_has_that_was_read_within_the_call_is_its_own_though_it_had_no_name() -> None:
    """A kubelet that was ended in mid-admission goes on behind the init container, and the watch is mute."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    begun = pod("begun", share("init", 60, 6, Stage.INIT), share("main", 40, 6))
    held, units = await admitted_up_to_init(kubelet, begun)
    for member, ids in units.items():
        assert (await kubelet.pairing.allocate(member, tuple(ids))).container == "main"
        held["main", resource_of(VGPU, member)] = ids


async def test_a_main_container_that_is_listed_ends_no_init_container_of_its_size_that_has_no_name() -> None:
    """Storm 21000030: the main container's second half was served as the init container's, of equal size.

    A kubelet writes its checkpoint down once a container has all: its list is ahead, and the watch is mute.
    """
    kubelet = KubeletModel(gpus=1, blocks=40)
    begun = pod("begun", share("init", 40, 6, Stage.INIT), share("main", 40, 6))
    held, units = await admitted_up_to_init(kubelet, begun)
    file = kubelet.checkpoint()
    kubelet.checkpoint = lambda: file  # type: ignore[method-assign]
    for member, ids in units.items():
        assert (await kubelet.pairing.allocate(member, tuple(ids))).container == "main"
        held["main", resource_of(VGPU, member)] = ids


@pytest.mark.parametrize("blocks", [6, 8])
async def test_what_the_list_of_the_kubelet_lacks_is_not_had_by_its_checkpoint(blocks: int) -> None:
    """A kubelet that started has freed the first container's units, and written nothing since."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    begun = pod("begun", share("first", 40, 6), share("second", 40, blocks))
    await kubelet.admit(begun)
    file = {place: ids for place, ids in kubelet.checkpoint().items() if place[1] == "first"}
    kubelet.taken_up[begun.key].held.clear()
    kubelet.api[begun.key] = begun
    kubelet.start_agent()
    kubelet.heard, kubelet.cached = {begun.key}, False
    kubelet._view, kubelet.checkpoint = View, lambda: file  # type: ignore[method-assign]
    memory = next(ids for (_, _, name), ids in file.items() if name == VGPU.memory)
    assert (await kubelet.pairing.allocate(PairMember.MEMORY, tuple(memory))).container == "first"


async def test_units_of_a_lost_gpu_are_withheld_for_nobody() -> None:
    """Storm 1000057: the kubelet was taken to keep for its pods what the checkpoint still names."""
    kubelet = KubeletModel(gpus=2, blocks=40)
    await written(kubelet, *(pod(name, share("main", 60, 30)) for name in ("a", "b")))
    for name in ("a", "b"):
        kubelet.end(("default", name))
    well, lost = kubelet.inventory.value.gpus
    states = (well, replace(lost, health=Health(HealthState.UNHEALTHY)))
    kubelet.inventory.publish(replace(kubelet.inventory.value, gpus=states))
    await kubelet.refresh()
    await kubelet.admit(pod("next", share("main", 90, 35)))
    assert kubelet.gpus_of(("default", "next"), "main") == {well.uuid}
