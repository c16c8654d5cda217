"""Calls that come late, at once, twice or against the promise; units that are set aside between them."""

import asyncio

import anyio
import pytest

from agent.model.holding import PairMember, Record
from agent.model.pod import Demand
from agent.pairing.resolver import Cause, PairRefused
from tests.unit.pairing.asking import first, index, told
from tests.unit.pairing.kubelet_model import Admission, AgentKilled, KubeletModel, pod, share

NOTHING: frozenset[str] = frozenset()


async def test_an_agent_killed_between_the_halves_ends_on_one_gpu() -> None:
    for at in range(4):
        kubelet = KubeletModel(gpus=3, seed=at)
        await kubelet.admit(pod("a", share("main", 60, 30)))

        def killed(step: int, at: int = at, kubelet: KubeletModel = kubelet) -> None:
            if step == at:
                kubelet.start_agent()

        await kubelet.admit(pod("b", share("main", 50, 20)), killed)
        assert index(kubelet, ("default", "b")) == [1]


async def test_those_whom_a_reading_wakes_run_after_the_answer() -> None:
    """They wait for the new record; the pod waits for the answer."""
    kubelet, woken = KubeletModel(), list[bool]()
    waiting = pod("a", share("main", 10, 5))
    kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    look = kubelet.look

    async def looking(deadline: float = 1.0) -> Record:
        asyncio.get_running_loop().call_soon(woken.append, True)
        return await look(deadline)

    kubelet.look = looking  # type: ignore[method-assign]
    pool = next(iter(kubelet.pairing.ledger.pools.values()))
    assert len(await kubelet.pairing.prefer(PairMember.CORE, 10, pool.cores)) == 10
    assert not woken


async def test_half_pairs_expire() -> None:
    kubelet = KubeletModel(gpus=1)

    def broken(step: int) -> None:
        if step == 2:
            raise AgentKilled("no")

    with pytest.raises(AgentKilled):
        await kubelet.admit(pod("a", share("main", 60, 30)), broken)
    assert len(kubelet.pairing.ledger.reservations) == 1
    kubelet.now += 11.0
    await kubelet.admit(pod("b", share("main", 60, 30)))
    assert kubelet.pairing.stats.expired == 1


async def test_two_allocates_at_once_are_served_one_after_the_other() -> None:
    kubelet = KubeletModel(gpus=2)
    granted: list[str] = []

    async def one(name: str, size: int) -> None:
        await kubelet.admit(pod(name, share("main", size, size)))
        granted.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(one, "a", 15)
        group.start_soon(one, "b", 16)
    assert sorted(granted) == ["a", "b"]
    assert all(len(kubelet.gpus_of(("default", name), "main")) == 1 for name in granted)


async def test_a_call_that_is_given_up_leaves_the_next_one_well() -> None:
    kubelet = KubeletModel()
    listed = kubelet.look

    async def stuck(deadline: float = 1.0) -> None:
        await anyio.sleep(10)

    kubelet.look = stuck  # type: ignore[method-assign, assignment]
    with pytest.raises(TimeoutError), anyio.fail_after(0.05):
        await kubelet.admit(pod("a", share("main", 10, 5)))
    kubelet.taken_up.clear()
    kubelet.api.clear()
    kubelet.look = listed  # type: ignore[method-assign]
    await kubelet.admit(pod("b", share("main", 10, 5)))


async def test_ids_against_the_promise_are_refused() -> None:
    kubelet = KubeletModel(gpus=2)
    waiting = pod("a", share("main", 10, 5))
    await first(kubelet, waiting, PairMember.CORE)
    other = sorted(each for each in kubelet.listed(PairMember.MEMORY) if each.startswith("GPU-00000001"))[:5]
    with pytest.raises(PairRefused):
        await kubelet.pairing.allocate(PairMember.MEMORY, other)
    with pytest.raises(PairRefused, match=r"is not a unit of tencent\.com/vcuda-memory"):
        await kubelet.pairing.allocate(
            PairMember.MEMORY, [other[0], "GPU-00000001-0000-0000-0000-000000000000::m999"]
        )
    with pytest.raises(PairRefused, match="is not known on this node"):
        await kubelet.pairing.allocate(PairMember.MEMORY, ["GPU-none::m1"])


async def test_held_units_are_never_handed_out_again() -> None:
    for seed in range(20):
        kubelet = KubeletModel(gpus=2, seed=seed)
        await kubelet.admit(pod("a", share("main", 30, 10)))
        kubelet.offers_held = True
        await kubelet.admit(pod("b", share("main", 30, 10)))
        units = [NOTHING.union(*each.held.values()) for each in kubelet.taken_up.values()]
        assert not units[0] & units[1]
        # The kubelet may pass over what is preferred: then the Allocate itself is refused.
        held = sorted(each for each in kubelet.in_use(PairMember.CORE))[:30]
        waiting = pod("c", share("main", 30, 10))
        kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
        with pytest.raises(PairRefused, match=r"is held by default/[ab], container main") as refusal:
            await kubelet.pairing.allocate(PairMember.CORE, held)
        assert refusal.value.cause is Cause.UNAVAILABLE
        assert refusal.value.pod is not None
        # Its owner reads the refusal, by an event and in the pod's status: not whose pods others are.
        stranger = pod("d", share("main", 30, 10), namespace="other")
        del kubelet.api[waiting.key], kubelet.taken_up[waiting.key]
        kubelet.api[stranger.key], kubelet.taken_up[stranger.key] = stranger, Admission(stranger)
        with pytest.raises(PairRefused, match=r"is held by another namespace's pod, though") as refusal:
            await kubelet.pairing.allocate(PairMember.CORE, held)
        assert "default/" not in str(refusal.value)


async def test_a_grant_says_who_got_what() -> None:
    kubelet = KubeletModel(gpus=2)
    await kubelet.admit(pod("a", share("main", 30, 10), share("more", 5, 1)))
    first, second = kubelet.grants[:2]
    assert (first.pod.uid, first.container, first.demand) == ("uid-a", "main", Demand(30, 10))
    assert {len(first.ids), len(second.ids)} == {30, 10}
    assert [first.complete, second.complete] == [False, True]
    assert [grant.last for grant in kubelet.grants] == [False, False, True, True]
    assert {each.partition("::")[0] for each in first.ids | second.ids} == set(first.gpus)


async def test_units_that_stand_twice_or_lie_on_two_gpus_are_refused() -> None:
    kubelet = KubeletModel(gpus=2)
    first, second = (pool.cores for pool in kubelet.pairing.ledger.pools.values())
    waiting = pod("a", share("main", 2, 5))
    kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    for ids, told_as in (([first[0], first[0]], "stands twice"), ([first[0], second[0]], "lie on 2 GPUs")):
        with pytest.raises(PairRefused, match=told_as) as refusal:
            await kubelet.pairing.allocate(PairMember.CORE, ids)
        assert refusal.value.cause is Cause.INVALID


async def test_units_are_set_aside_only_where_nobody_has_or_will_have_them() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("a", share("main", 10, 10)))
    gpu = next(iter(kubelet.pairing.ledger.pools))
    taken: list[tuple[str, ...]] = []

    async def keep(ids: tuple[str, ...]) -> None:
        taken.append(ids)

    with pytest.raises(PairRefused, match=r"30 free units of .*, 31 more are asked for"):
        await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 31, keep)
    with pytest.raises(PairRefused, match="0 free units"):
        await kubelet.pairing.set_aside("GPU-unknown", PairMember.MEMORY, 1, keep)
    assert not taken
    await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 30, keep)
    (ids,) = taken
    assert len(set(ids)) == 30
    assert not set(ids) & kubelet.pairing.ledger.kept_ids


@pytest.mark.parametrize("readable", [True, False])
async def test_units_of_a_pod_that_no_record_showed_in_time_are_not_set_aside(*, readable: bool) -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("a", share("main", 10, 10)))
    gpu = next(iter(kubelet.pairing.ledger.pools))
    kubelet.now += 60.0  # its promise is over, and no reading came through since
    kubelet.records_readable = readable
    taken: list[tuple[str, ...]] = []

    async def keep(ids: tuple[str, ...]) -> None:
        taken.append(ids)

    with pytest.raises(PairRefused, match="30 free units" if readable else "nobody can say who holds what"):
        await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 31, keep)
    assert not taken


async def test_units_that_no_reading_shows_yet_are_not_granted_again_whatever_their_age() -> None:
    """Storm 1000029: the kubelet could not be read, had forgotten what it had handed out, and offered it."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("before", share("main", 10, 10)))
    kubelet.now += 1.0
    await kubelet.refresh()
    kubelet.now += 1.0
    kubelet.records_readable = False
    first_one = pod("a", share("main", 10, 10))
    await kubelet.admit(first_one)
    kubelet.now += 60.0
    kubelet.offers_held = True
    with pytest.raises(PairRefused, match="do not fit on any single GPU"):
        await kubelet.admit(pod("b", share("main", 85, 10)))
    await kubelet.admit(pod("c", share("main", 20, 10)))
    units = [ids for each in kubelet.taken_up.values() for ids in each.held.values()]
    assert len(frozenset().union(*units)) == sum(map(len, units))
    # The next reading that is made says who is there.
    kubelet.end(first_one.key)
    kubelet.records_readable = True
    await kubelet.admit(pod("d", share("main", 70, 10)))


async def test_cores_are_set_aside_but_not_those_of_a_pair_to_come() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await kubelet.admit(pod("a", share("main", 10, 10)))
    await first(kubelet, pod("b", share("main", 25, 25)), PairMember.MEMORY)
    gpu = next(iter(kubelet.pairing.ledger.pools))
    taken: list[tuple[str, ...]] = []

    async def keep(ids: tuple[str, ...]) -> None:
        taken.append(ids)

    with pytest.raises(PairRefused, match=r"65 free units of tencent.com/vcuda-core, 66 more"):
        await kubelet.pairing.set_aside(gpu, PairMember.CORE, 66, keep)
    await kubelet.pairing.set_aside(gpu, PairMember.CORE, 65, keep)
    (ids,) = taken
    pool = kubelet.pairing.ledger.pools[gpu]
    assert set(ids) <= pool.core_set - kubelet.pairing.ledger.kept_ids
    left = pool.without(frozenset(ids))
    assert (len(left.cores), left.blocks) == (35, pool.blocks)


async def no_more_than_15_are_set_aside(kubelet: KubeletModel) -> None:
    gpu = next(iter(kubelet.pairing.ledger.pools))

    async def keep(ids: tuple[str, ...]) -> None:
        raise AssertionError(ids)

    with pytest.raises(PairRefused, match="15 free units"):
        await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 16, keep)


def slow_to_list(kubelet: KubeletModel) -> None:
    look = kubelet.look

    async def slow(deadline: float = 1.0) -> Record:
        kubelet.now += 12.0
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]


async def test_units_of_a_pair_whose_second_half_is_to_come_are_not_set_aside() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    await first(kubelet, pod("a", share("main", 10, 25)), PairMember.CORE)
    await no_more_than_15_are_set_aside(kubelet)


async def test_a_promise_counts_from_when_it_was_made_though_the_kubelet_answered_late() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    slow_to_list(kubelet)
    await first(kubelet, pod("a", share("main", 10, 25)), PairMember.CORE)
    # The Allocate after it finds the promise, and need not wait once more.
    assert (kubelet.pairing.stats.expired, kubelet.lists) == (0, 1)
    await no_more_than_15_are_set_aside(kubelet)


async def test_a_promise_outlasts_the_reading_for_its_second_half() -> None:
    """Storm 5: each reading takes longer than a promise lasts, and lists are made again meanwhile."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    recorder = told(kubelet)
    look = kubelet.look

    async def slow(deadline: float = 1.0) -> Record:
        kubelet.now += 12.0
        kubelet.pairing.observe(Record())
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 25), share("second", 5, 5)))
    assert kubelet.pairing.stats.expired == 0
    assert [name for _, name, _ in recorder.choices] == ["main", "second"]


async def test_the_next_container_of_a_pod_is_waited_for_while_it_asks() -> None:
    """Storm 70005: its units left the list meanwhile, and a kubelet whose Allocate comes then panics."""
    kubelet, kept = KubeletModel(gpus=1, blocks=40), list[frozenset[str]]()
    look = kubelet.look

    async def slow(deadline: float = 1.0) -> Record:
        kubelet.now += 12.0
        kept.append(kubelet.pairing.continuing())
        return await look(deadline)

    kubelet.look = slow  # type: ignore[method-assign]
    await kubelet.admit(pod("a", share("main", 10, 25), share("second", 5, 5)))
    (gpu,) = kubelet.pairing.ledger.pools
    assert kept == [frozenset(), frozenset(), frozenset({gpu}), frozenset({gpu})]
    assert not kubelet.pairing.continuing()


async def test_a_member_without_preference_is_kept_though_the_kubelet_answered_late() -> None:
    kubelet = KubeletModel(gpus=1, blocks=40)
    slow_to_list(kubelet)
    waiting = pod("a", share("main", 10, 25))
    kubelet.api[waiting.key], kubelet.taken_up[waiting.key] = waiting, Admission(waiting)
    (pool,) = kubelet.pairing.ledger.pools.values()
    await kubelet.pairing.allocate(PairMember.CORE, pool.cores[:10])
    # The second member follows at once; whose it is takes another look.
    await kubelet.pairing.prefer(PairMember.MEMORY, 25, pool.blocks)
    assert (kubelet.pairing.stats.expired, kubelet.lists) == (0, 2)


async def test_a_record_older_than_what_a_call_has_read_frees_nothing() -> None:
    """Health and modes bring the lists up to date by the record that was published last, whatever its age."""
    kubelet = KubeletModel(gpus=1, blocks=40)
    kubelet.now = 1.0
    await kubelet.refresh()
    await kubelet.admit(pod("a", share("main", 10, 25)))
    kubelet.now = 2.0
    await kubelet.admit(pod("b", share("main", 10, 5)))
    kubelet.shares.refresh()
    held = kubelet.in_use(PairMember.CORE) | kubelet.in_use(PairMember.MEMORY)
    assert held <= kubelet.pairing.ledger.kept_ids
    gpu = next(iter(kubelet.pairing.ledger.pools))

    async def keep(ids: tuple[str, ...]) -> None:
        assert not held & set(ids)

    with pytest.raises(PairRefused, match="10 free units"):
        await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 11, keep)
    await kubelet.pairing.set_aside(gpu, PairMember.MEMORY, 10, keep)
