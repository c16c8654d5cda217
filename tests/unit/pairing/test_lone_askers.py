"""The only pod that is seen to wait for a share is not always the one that asks."""

import anyio
import pytest

from agent.model.holding import PairMember, Record
from agent.model.pod import MPS, VGPU, Container, Pod
from agent.pairing.pair_rules import PairRules
from agent.pairing.pairing import Pairing
from agent.pairing.pod_source import PodSource
from agent.pairing.resolver import DOUBT_SECONDS, PairRefused, RequesterResolver
from tests.pods import changed
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time

STATIC = pod("static-node1", share("main", 30, 10))


def node(*seen: str, runs: bool = False) -> KubeletModel:
    """A kubelet that lists pods which want the static pod's share, and which the API server has."""
    kubelet = KubeletModel()
    for name in seen:
        each = pod(name, share("main", 30, 10), phase="Running" if runs else "Pending", started=runs)
        kubelet.api[each.key], kubelet.taken_up[each.key] = each, Admission(each)
    return kubelet


class Unreachable(KubeletModel):
    """Answers no GET while it cannot be reached."""

    async def get(self, namespace: str, name: str) -> Pod | None:
        return await self.fetch(namespace, name)


async def is_refused(kubelet: KubeletModel) -> None:
    """The static pod asks, and nobody gets its share."""
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())


@pytest.mark.parametrize("beside", ["one that runs", "one that was turned away"])
@in_virtual_time
async def test_static_pod_whose_manifest_was_edited_is_no_newcomer_by_its_name(beside: str) -> None:
    """Nor are others through that came before: the kubelet has dropped it and taken it up again."""
    kubelet = KubeletModel()
    kubelet.taken_up[STATIC.key] = Admission(pod("static-node1", Container("main", {})))
    await kubelet.refresh()
    other = pod("other", share("main", 30, 10))
    if beside == "one that runs":
        other = pod("other", share("main", 30, 10), phase="Running", started=True)
    kubelet.api[other.key], kubelet.taken_up[other.key] = other, Admission(other)
    await kubelet.refresh()
    if beside != "one that runs":
        kubelet.pairing.turn_away(other, "was refused")
    kubelet.taken_up[STATIC.key] = Admission(STATIC)
    await is_refused(kubelet)


@in_virtual_time
async def test_start_that_is_refused_ends_no_admission_beside_it() -> None:
    """The static pod's waits for another plugin's Allocate, longer than anybody doubts."""
    kubelet = node("runs", runs=True)
    await kubelet.refresh()
    kubelet.taken_up[STATIC.key] = Admission(STATIC)
    await is_refused(kubelet)  # a start of `runs`, as far as anybody knows
    await anyio.sleep(5)
    await is_refused(kubelet)


@in_virtual_time
async def test_call_for_the_other_pair_ends_no_admission_either() -> None:
    other = MPS
    kubelet = node("waits")
    runs = pod("runs", share("main", 20, 10, pair=other), phase="Running", started=True)
    kubelet.api[runs.key] = runs
    kubelet.taken_up |= {runs.key: Admission(runs), STATIC.key: Admission(STATIC)}
    pairing = Pairing(PairRules(other), RequesterResolver(other, kubelet, kubelet))  # type: ignore[arg-type]

    async def starts() -> None:
        with pytest.raises(PairRefused):
            await pairing.prefer(PairMember.CORE, 20, [f"x::c{n}" for n in range(20)])

    async with anyio.create_task_group() as group:
        group.start_soon(starts)
        await anyio.sleep(0.5)
        await is_refused(kubelet)


@in_virtual_time
async def test_reading_that_fails_ends_no_doubt() -> None:
    """The static pod that an earlier reading of the same call has shown may still be asking."""
    kubelet = node("waits")
    kubelet.taken_up[STATIC.key] = Admission(STATIC)

    async def stumbles() -> None:
        await anyio.sleep(1)
        kubelet.records_readable = False
        await anyio.sleep(0.5)
        kubelet.records_readable = True

    async with anyio.create_task_group() as group:
        group.start_soon(stumbles)
        await is_refused(kubelet)
    assert anyio.current_time() >= DOUBT_SECONDS


@in_virtual_time
async def test_static_pod_that_could_not_be_asked_for_is_not_forgotten_by_a_reading_that_fails() -> None:
    """A record has shown it; then the API server answers again, and the record cannot be read."""
    kubelet = Unreachable()
    waits = pod("waits", share("main", 30, 10))
    kubelet.api[waits.key] = waits
    kubelet.taken_up = {each.key: Admission(each) for each in (waits, STATIC)}
    kubelet.reachable = False

    async def stumbles() -> None:
        await anyio.sleep(0.7)
        kubelet.records_readable, kubelet.reachable = False, True
        await anyio.sleep(3)
        kubelet.records_readable = True

    async with anyio.create_task_group() as group:
        group.start_soon(stumbles)
        await is_refused(kubelet)


@pytest.mark.parametrize("before", [True, False])
@in_virtual_time
async def test_share_of_one_that_is_deleted_by_force_in_its_own_call_goes_to_no_other(
    *, before: bool
) -> None:
    """`before`: the other was listed before it, so is through; else the watch has shown what it asked for."""
    kubelet = node("waits")
    gone = pod("gone", share("main", 30, 10))
    if before:
        await kubelet.refresh()
        kubelet.now += 1
    else:
        kubelet.api[gone.key] = gone
    kubelet.taken_up[gone.key] = Admission(gone)

    async def is_deleted() -> None:
        await anyio.sleep(0.01)
        kubelet.api.pop(gone.key, None)

    async with anyio.create_task_group() as group:
        group.start_soon(is_refused, kubelet)
        group.start_soon(is_deleted)


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("early", [False, True])
@in_virtual_time
async def test_share_of_one_that_is_deleted_in_its_own_call_goes_to_no_other(
    *, early: bool, runs: bool
) -> None:
    """One that was deleted before, `early`, and taken up before others keeps nobody waiting (1000232)."""
    kubelet = KubeletModel()
    gone = pod("gone", share("main", 30, 10), ending=early)
    if early:
        kubelet.api[gone.key], kubelet.taken_up[gone.key] = gone, Admission(gone)
        await kubelet.refresh()
    other = node("other", runs=runs)
    kubelet.api |= other.api | {gone.key: gone}
    kubelet.taken_up |= other.taken_up | {gone.key: Admission(gone)}

    usual = kubelet.look

    async def late(deadline: float = 1.0) -> Record:
        await anyio.sleep(0.05)
        return await usual(deadline)

    async def is_deleted() -> None:
        await anyio.sleep(0.01)
        kubelet.api[gone.key] = changed(gone, ending=True)

    kubelet.look = late  # type: ignore[method-assign]
    if early:
        with anyio.fail_after(1):
            await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
        assert kubelet.pairing.ledger.reservations[0].holder.pod == "other"
        return
    async with anyio.create_task_group() as group:
        group.start_soon(is_refused, kubelet)
        group.start_soon(is_deleted)


@in_virtual_time
async def test_second_half_of_one_that_is_deleted_under_a_mute_watch_goes_to_no_other() -> None:
    """The call for the first half says that it asks, also where the watch has never shown it (storm 7083)."""
    kubelet = node("other", runs=True)
    gone = pod("gone", share("main", 20, 10))
    kubelet.api[gone.key], kubelet.taken_up[gone.key] = gone, Admission(gone)
    cores = await kubelet.pairing.prefer(PairMember.CORE, 20, kubelet.free_cores())
    await kubelet.pairing.allocate(PairMember.CORE, cores)
    kubelet.taken_up[gone.key].held["main", VGPU.core] = frozenset(cores)
    kubelet.api[gone.key] = changed(gone, ending=True)
    kubelet.pods_on_node = lambda: [each for key, each in kubelet.api.items() if key != gone.key]  # type: ignore[method-assign]
    with pytest.raises(PairRefused):
        await kubelet.pairing.prefer(PairMember.MEMORY, 10, sorted(kubelet.listed(PairMember.MEMORY)))


@pytest.mark.parametrize("away", ["the API server", "the record", "both"])
@in_virtual_time
async def test_without_a_record_who_came_after_the_call_is_not_the_asker_whoever_answers_late(
    away: str,
) -> None:
    kubelet = node("came")
    came = kubelet.api.pop(("default", "came"))
    del kubelet.taken_up[came.key]
    kubelet.taken_up[STATIC.key] = Admission(STATIC)
    kubelet.reachable = away == "the record"
    kubelet.records_readable = away == "the API server"

    async def comes() -> None:
        await anyio.sleep(0.1)
        kubelet.records_readable = False
        await anyio.sleep(1)
        kubelet.api[came.key], kubelet.reachable = came, True

    async with anyio.create_task_group() as group:
        group.start_soon(comes)
        await is_refused(kubelet)


@pytest.mark.parametrize("member", PairMember)
@in_virtual_time
async def test_pod_that_is_deleted_by_force_beside_an_admission_costs_it_nothing(member: PairMember) -> None:
    """It was listed by the same reading, and the kubelet lists it until the admission is over."""
    kubelet = KubeletModel()
    await kubelet.refresh()
    small, new = pod("small", Container("main", {})), pod("new", share("main", 10, 10))
    kubelet.api[new.key] = new
    kubelet.taken_up = {each.key: Admission(each) for each in (small, new)}
    assert len(await kubelet.pairing.prefer(member, 10, sorted(kubelet.listed(member)))) == 10
    assert anyio.current_time() < 1


def test_static_pods_names_end_in_the_nodes_as_the_kubelet_writes_it() -> None:
    class Source(PodSource):
        node = "Node-A"

    assert [Source().may_be_static(each) for each in ("etcd-node-a", "etcd", "etcd-node-b")] == [
        True,
        False,
        False,
    ]
    assert PodSource().may_be_static("etcd")  # which node it is is not known
