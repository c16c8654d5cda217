import anyio
import pytest

from agent.model.holding import PairHoldings, PairMember, Record
from agent.model.pod import VGPU
from agent.pairing.resolver import DOUBT_SECONDS, PairRefused, askers
from tests.pods import changed
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


def test_a_pod_that_ends_asks_for_nothing() -> None:
    # Of a StatefulSet the next pod of this size may be waiting while the last one is Terminating.
    waiting, leaving = pod("next", share("main", 20, 10)), pod("last", share("main", 20, 10))
    leaving = changed(leaving, ending=True)
    record = Record((), (("default", "next", "main"), ("default", "last", "main")))
    found = askers(VGPU, PairMember.CORE, 20, record, PairHoldings(), [leaving, waiting], ())
    assert [each.pod.name for each in found] == ["next"]
    assert askers(VGPU, PairMember.CORE, 20, record, PairHoldings(), [leaving], ()) == []


@in_virtual_time
async def test_without_a_record_a_container_that_has_a_half_is_asked_for_the_other_first() -> None:
    """The kubelet turns to the next one once it has all; both would be in doubt for 10 s, and refused."""
    kubelet = KubeletModel()
    kubelet.records_readable = False
    two = pod("two", share("first", 20, 10), share("second", 20, 30))
    kubelet.api[two.key], kubelet.taken_up[two.key] = two, Admission(two)
    began = anyio.current_time()
    for member, size in ((PairMember.MEMORY, 10), (PairMember.CORE, 20)):
        ids = await kubelet.pairing.prefer(member, size, sorted(kubelet.listed(member)))
        assert (await kubelet.pairing.allocate(member, ids)).container == "first"
    assert anyio.current_time() - began < 0.1


@pytest.mark.parametrize("then", ["it stays", "it has ended"])
@in_virtual_time
async def test_one_that_ends_is_not_taken_for_one_that_runs(then: str) -> None:
    """Storm 9500005: a kubelet that has lost its checkpoint admits those that are being deleted, too."""
    kubelet = KubeletModel()
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    leaving = changed(pod("leaving", share("main", 30, 10)), ending=True)
    kubelet.api |= {each.key: each for each in (runs, leaving)}
    kubelet.taken_up = {each.key: Admission(each) for each in (runs, leaving)}
    free = sorted(kubelet.listed(PairMember.CORE))
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await anyio.sleep(2)
            if then == "it has ended":
                del kubelet.taken_up[leaving.key]

        group.start_soon(later)
        if then == "it stays":
            with pytest.raises(PairRefused):
                await kubelet.pairing.prefer(PairMember.CORE, 30, free)
            assert anyio.current_time() <= DOUBT_SECONDS + 1
        else:
            ids = await kubelet.pairing.prefer(PairMember.CORE, 30, free)
            assert (await kubelet.pairing.allocate(PairMember.CORE, ids)).pod == runs


def test_without_a_record_one_that_ends_may_be_asking_and_any_container_of_its_size() -> None:
    two = pod("two", share("first", 20, 10), share("second", 20, 30), share("third", 5, 1))
    leaving = changed(pod("last", share("main", 20, 10)), ending=True)
    found = askers(VGPU, PairMember.CORE, 20, None, PairHoldings(), [leaving, two], ())
    assert [(each.pod.name, each.container.name) for each in found] == [
        ("last", "main"),
        ("two", "first"),
        ("two", "second"),
    ]


@pytest.mark.parametrize("then", ["its mirror never comes", "it is listed no more", "its mirror comes"])
@in_virtual_time
async def test_a_static_pods_share_is_not_given_to_one_that_runs(then: str) -> None:
    """Storm 1000081: a kubelet without its checkpoint listed the one that ran without its devices."""
    kubelet = KubeletModel()
    runs = pod("runs", share("main", 30, 10), phase="Running", started=True)
    static = pod("static-node1", share("main", 30, 10))
    kubelet.api[runs.key] = runs
    kubelet.taken_up = {each.key: Admission(each) for each in (runs, static)}
    free = sorted(kubelet.listed(PairMember.CORE))
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await anyio.sleep(2)
            if then == "it is listed no more":
                del kubelet.taken_up[static.key]
            elif then == "its mirror comes":
                kubelet.api[static.key] = static

        group.start_soon(later)
        if then == "its mirror never comes":
            with pytest.raises(PairRefused, match="default/runs, default/static-node1: nothing is guessed"):
                await kubelet.pairing.prefer(PairMember.CORE, 30, free)
            assert anyio.current_time() <= DOUBT_SECONDS + 1
        else:
            ids = await kubelet.pairing.prefer(PairMember.CORE, 30, free)
            grant = await kubelet.pairing.allocate(PairMember.CORE, ids)
            assert grant.pod == (static if then == "its mirror comes" else runs)
    # One that waits is served at once.
    began = anyio.current_time()
    await kubelet.admit(pod("waits", share("main", 20, 11)))
    assert anyio.current_time() == began
