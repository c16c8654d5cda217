"""A kubelet that has lost its checkpoint offers what containers run on; those ask again when they start."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.inventory.snapshot import Snapshot
from agent.model.holding import PairMember
from agent.model.pod import Stage
from agent.pairing.pair_rules import Grant
from agent.pairing.resolver import PairRefused, resource_of
from tests.pods import changed
from tests.unit.pairing.asking import index
from tests.unit.pairing.kubelet_model import Admission, Key, KubeletModel, pod, share, undisturbed


async def lose(kubelet: KubeletModel) -> None:
    """Its next kubelet has no checkpoint, and lists its pods one reading later."""
    await kubelet.refresh()
    kubelet.heard = set()
    for each in kubelet.taken_up.values():
        each.held.clear()
    await kubelet.refresh()
    kubelet.heard |= set(kubelet.taken_up)
    await kubelet.refresh()
    await kubelet.refresh()


async def start_again(kubelet: KubeletModel, key: Key) -> None:
    """All containers of a pod ask."""
    await kubelet._containers(kubelet.taken_up[key], undisturbed)


async def start_one(kubelet: KubeletModel, key: Key, name: str, *members: PairMember) -> None:
    """One container of a pod asks, for all members or these: the kubelet has nothing to hand on."""
    admission = kubelet.taken_up[key]
    (container,) = (each for each in admission.pod.containers if each.name == name)
    for member in members or kubelet.random.sample(list(PairMember), 2):
        resource = resource_of(kubelet.pair, member)
        chosen = await kubelet._ask(member, container.limits[resource], set())
        await kubelet.pairing.allocate(member, sorted(chosen))
        admission.held[name, resource] = frozenset(chosen)


@pytest.mark.parametrize("seed", range(4))
async def test_nobody_is_given_what_a_running_container_lost(seed: int) -> None:
    kubelet = KubeletModel(gpus=2, seed=seed)
    await kubelet.admit(pod("runs", share("main", 60, 20)))
    await lose(kubelet)
    await kubelet.admit(pod("other", share("main", 50, 10)))
    assert index(kubelet, ("default", "other")) == [1]
    with pytest.raises(PairRefused):
        await kubelet.admit(pod("third", share("main", 60, 10)))


@pytest.mark.parametrize("seed", range(4))
async def test_on_a_full_gpu_each_has_its_own_again(seed: int) -> None:
    kubelet = KubeletModel(gpus=1, seed=seed)
    one, other = pod("one", share("main", 60, 20)), pod("other", share("main", 40, 19))
    await kubelet.admit(one)
    await kubelet.admit(other)
    await lose(kubelet)
    await start_again(kubelet, one.key)
    await start_again(kubelet, other.key)
    assert index(kubelet, one.key) == index(kubelet, other.key) == [0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("early", [(60, 20), (30, 10), (100, 40)])
async def test_what_init_containers_lost_is_kept_from_nobody_of_their_pod(
    seed: int, early: tuple[int, int]
) -> None:
    kubelet = KubeletModel(gpus=1, seed=seed)
    whole = pod("a", share("prepare", *early, Stage.INIT), share("main", 60, 20), share("second", 10, 10))
    await kubelet.admit(whole)
    await lose(kubelet)
    await start_again(kubelet, whole.key)


@pytest.mark.parametrize("seed", range(4))
async def test_whole_gpus_are_had_again(seed: int) -> None:
    kubelet = KubeletModel(gpus=2, seed=seed)
    large = pod("a", share("main", 200, 0))
    await kubelet.admit(large)
    await lose(kubelet)
    await start_again(kubelet, large.key)


@pytest.mark.parametrize("seed", range(4))
async def test_who_lost_a_gpu_that_is_ill_goes_to_another(seed: int) -> None:
    kubelet = KubeletModel(gpus=2, seed=seed)
    shared = pod("a", share("main", 60, 20))
    await kubelet.admit(shared)
    await lose(kubelet)
    states = list(kubelet.inventory.value.gpus)
    states[0] = replace(states[0], blocked="Xid 79")
    by_uuid = {state.uuid: state for state in states}
    kubelet.inventory.publish(Snapshot(1, None, None, tuple(states), by_uuid=by_uuid))
    kubelet.shares.restock()
    await start_again(kubelet, shared.key)
    assert index(kubelet, shared.key) == [1]
    # What it lost is free, now that it has others.
    await kubelet.refresh()
    assert {each.gpus for each in kubelet._record.joined.holdings} == {frozenset({states[1].uuid})}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("early", "second", "other"),
    [((30, 10), (10, 10), (1, 1)), ((90, 38), (10, 10), (1, 1)), ((60, 20), (10, 5), (30, 10))],
)
async def test_an_heir_that_starts_alone_has_its_own_again(
    seed: int, early: tuple[int, int], second: tuple[int, int], other: tuple[int, int]
) -> None:
    """Beside a pod that leaves no room for the peak of its group, or hardly any."""
    kubelet = KubeletModel(gpus=1, seed=seed)
    heirs = share("main", 60, 20), share("second", *second)
    group = pod("a", share("prepare", *early, Stage.INIT), *heirs)
    await kubelet.admit(group)
    await kubelet.admit(pod("other", share("main", *other)))
    await lose(kubelet)
    await start_one(kubelet, group.key, "main")
    assert index(kubelet, group.key) == [0]


@pytest.mark.parametrize("early", [(30, 10), (40, 20), None])
@pytest.mark.parametrize("first", list(PairMember))
async def test_a_member_that_is_asked_for_late_is_on_the_gpu_of_the_first(
    early: tuple[int, int] | None, first: PairMember
) -> None:
    kubelet = KubeletModel(gpus=2)
    prepare = (share("prepare", *early, Stage.INIT),) if early else ()
    group = pod("a", *prepare, share("main", 30, 10))
    await kubelet.admit(group)
    await lose(kubelet)
    await start_one(kubelet, group.key, "main", first)
    for _ in range(2):
        kubelet.now += 60  # nothing is reserved any more
        await kubelet.refresh()
    await kubelet.admit(pod("fuller", share("main", 60, 20)))
    await kubelet.admit(pod("other", share("main", 50, 15)))
    assert index(kubelet, ("default", "other")) == [1]
    kubelet.end(("default", "fuller"))
    kubelet.now += 60
    await kubelet.refresh()
    await start_one(kubelet, group.key, "main", first.other)
    assert index(kubelet, group.key) == [0]


@pytest.mark.parametrize("seed", range(4))
async def test_what_an_init_container_lost_is_free_once_its_heirs_have_theirs(seed: int) -> None:
    kubelet = KubeletModel(gpus=1, seed=seed)
    group = pod("a", share("prepare", 100, 40, Stage.INIT), share("main", 10, 4))
    await kubelet.admit(group)
    await lose(kubelet)
    await start_one(kubelet, group.key, "main")
    for _ in range(2):
        await kubelet.refresh()
    await kubelet.admit(pod("other", share("main", 50, 10)))
    assert index(kubelet, ("default", "other")) == [0]


@pytest.mark.parametrize("granted", [("main",), ("main", "second")])
@pytest.mark.parametrize("seed", range(4))
async def test_what_a_kubelet_had_not_written_when_it_ended_is_asked_for_again(
    seed: int, granted: tuple[str, ...]
) -> None:
    """Storm 10500082: the next one's first container was served as the second, which asks for as much."""
    kubelet = KubeletModel(gpus=2, seed=seed)
    new = pod("new", share("main", 30, 10), share("second", 30, 10))
    kubelet.api[new.key], kubelet.taken_up[new.key] = new, Admission(new)
    for name in granted:
        members = list(PairMember) if name != granted[-1] else [PairMember.CORE]
        await start_one(kubelet, new.key, name, *members)
    kubelet.taken_up[new.key].held.clear()
    kubelet.now += 0.5
    kubelet.heard = {new.key}
    found: dict[tuple[str, str], frozenset[str]] = {}
    allocate = kubelet.pairing.allocate

    async def noted(member: PairMember, ids: Sequence[str]) -> Grant:
        grant = await allocate(member, ids)
        found[grant.container, resource_of(kubelet.pair, member)] = frozenset(ids)
        return grant

    kubelet.pairing.allocate = noted  # type: ignore[method-assign]
    await start_again(kubelet, new.key)
    assert len(found) == 4
    assert found == kubelet.taken_up[new.key].held


@pytest.mark.parametrize("seed", range(4))
async def test_a_half_that_a_new_kubelet_got_before_its_first_reading_stays(seed: int) -> None:
    """No record answered then, and the checkpoint of the reading that comes between has nothing of it yet."""
    kubelet = KubeletModel(gpus=2, seed=seed)
    await kubelet.admit(pod("ends", share("main", 60, 5)))
    await kubelet.admit(pod("stays", share("main", 50, 5)))
    await kubelet.refresh()
    kubelet.now += 5
    ends = ("default", "ends")
    kubelet.api[ends] = changed(kubelet.api[ends], phase="Succeeded")
    del kubelet.taken_up[ends]
    new = pod("new", share("init", 10, 3, Stage.INIT), share("main", 20, 4))
    kubelet.api[new.key], kubelet.taken_up[new.key] = new, Admission(new)
    kubelet.heard = set(kubelet.taken_up)
    kubelet.records_readable = False
    await start_one(kubelet, new.key, "init", PairMember.CORE)
    kubelet.records_readable = True
    kubelet.now += 0.2
    written = kubelet.checkpoint
    kubelet.checkpoint = lambda: {key: ids for key, ids in written().items() if key[0] != new.uid}  # type: ignore[method-assign]
    await kubelet.refresh()
    await start_one(kubelet, new.key, "init", PairMember.MEMORY)
    held = kubelet.taken_up[new.key].held.values()
    assert len({each.partition("::")[0] for ids in held for each in ids}) == 1
    assert kubelet.pairing.ledger.reservations[-1].complete
