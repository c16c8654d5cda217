"""Pods whose end is in doubt: their objects are gone, their UIDs are claimed, or nobody knows them."""

import math
import time
from pathlib import Path

import anyio
import pytest

from agent.holdings.record import LAG_SECONDS, Evidence, View, join
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.holding import Holding, Record
from tests.pods import a_pod
from tests.unit.holdings.record_node import Node

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("listed", [True, False])
async def test_limits_of_a_pod_whose_object_is_gone_wait_for_the_kubelets_word(
    node: Node, listed: bool
) -> None:
    node.know("u", "trains")
    node.kubelet.pods = {"trains": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        asked = node.watch._allocations.version
        del node.pods["u"]
        for event in ("its object goes", "another pod changes"):
            node.changes.publish(None)
            await anyio.wait_all_tasks_blocked()
            now = node.watch.cell.value
            assert now is not None
            assert not now.holdings, event
            assert now.unfinished == {"u"}, event  # its containers run for as long as the tenant chose
            assert node.watch.gpus_by_pod() == {"u": {A}}, event  # nobody has left a process yet
        assert node.watch._allocations.version > asked  # and the kubelet is asked soon
        if not listed:
            node.kubelet.pods = {}
        assert bool(await node.held()) == listed
        for event in ("the kubelet has answered", "another pod changes"):
            assert node.watch._record.joined.unfinished == ({"u"} if listed else set()), event
            assert node.watch.gpus_by_pod() == ({"u": {A}} if listed else {}), event
            node.changes.publish(None)
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


async def test_what_outlives_its_object_ends_though_the_next_of_its_name_is_listed(node: Node) -> None:
    """Storm 1000081: the next of a name, made after a deletion by force, was taken to have devices."""
    node.know("u", "trains")
    node.kubelet.pods = {"trains": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        del node.pods["u"]
        node.changes.publish(None)
        await anyio.wait_all_tasks_blocked()
        assert await node.held()  # the kubelet has not heard of it yet
        node.know("v", "trains")
        await anyio.wait_all_tasks_blocked()
        assert await node.held()
        node.kubelet.pods = {"trains": {"main": ""}}  # it has: this is the next one, which is being admitted
        assert await node.held() == set()
        group.cancel_scope.cancel()


async def test_a_pod_that_has_finished_leaves_no_doubt(node: Node) -> None:
    node.know("u", "trains")
    node.kubelet.pods = {"trains": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        node.know("u", "trains", finished=True)
        await anyio.wait_all_tasks_blocked()
        assert node.watch._record.joined.unfinished == set()
        assert node.watch.gpus_by_pod() == {}
        assert await node.held()  # kubelets before 1.34 list it on
        assert node.watch._record.joined.unfinished == set()
        group.cancel_scope.cancel()


async def test_what_nobody_knows_ends_when_the_watch_has_shown_everybody(node: Node) -> None:
    """A pod was deleted while the agent was down; kubelets before 1.34 list a completed Job."""
    node.know("job", "completed", finished=True)
    node.kubelet.pods = {"completed": {"main": ""}}
    node.kubelet.records(("gone", "main", A))
    nameless = {("pod with UID gone", "main", A)}
    assert await node.held() == nameless  # it may be the next pod of that name
    node.heard = time.monotonic() + LAG_SECONDS / 2
    assert await node.held() == nameless
    node.kubelet.pods["of a file"] = {"main": ""}
    node.heard = time.monotonic() + 2 * LAG_SECONDS
    assert await node.held() == nameless  # of that one the API server may never know
    del node.kubelet.pods["of a file"]
    assert await node.held() == set()
    assert await node.held() == set()


@pytest.mark.parametrize("read", [False, True])
async def test_who_came_before_the_kubelet_restarted_lives_until_the_watch_has_shown_everybody(
    node: Node, read: bool
) -> None:
    """The watch was mute, and the kubelet of now has heard of nobody: neither says that a pod has ended.

    `read`: the entry was read before the restart; a pod may be admitted while the kubelet answers slowly.
    """
    node.kubelet.records(("ended", "main", B))
    assert await node.held() == set()
    node.kubelet.restart()
    assert await node.held() == set()  # it stays ended
    container = "prepare" if read else "main"
    nameless = {("pod with UID u", container, A)}
    node.kubelet.pods = {"train-0": {"main": "" if read else A}}
    node.kubelet.records(("u", container, A)) if read else node.kubelet.records()
    assert await node.held() == (nameless if read else {("train-0", "main", A)})
    node.kubelet.records(("u", container, A))
    node.kubelet.restart()
    for _ in range(2):
        assert await node.held() == nameless
    node.heard = time.monotonic() + 2 * LAG_SECONDS
    assert await node.held() == set()
    node.heard = -math.inf
    assert await node.held() == set()


async def test_who_a_kubelet_lost_may_live_until_the_watch_has_spoken(node: Node) -> None:
    """It lost its checkpoint, and has heard of nobody; and the watch was mute since before the pod came."""

    async def unfinished() -> frozenset[str]:
        await node.held()
        return node.watch.cell.value.unfinished if node.watch.cell.value else frozenset()

    node.know("v", "train-1")
    node.kubelet.pods = {"train-0": {"main": A}, "train-1": {"main": B}}
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    assert await unfinished() == {"u", "v"}
    node.kubelet.restart()
    node.kubelet.pods = {"train-1": {"main": B}}
    node.kubelet.records(("v", "main", B))
    for _ in range(3):
        assert await unfinished() == {"u", "v"}
    node.heard = time.monotonic() + LAG_SECONDS / 2
    assert await unfinished() == {"u", "v"}
    node.heard = time.monotonic() + 2 * LAG_SECONDS
    assert await unfinished() == {"v"}


async def test_who_ended_while_no_agent_ran_is_not_kept_once_the_watch_lists(node: Node) -> None:
    """Units that such a pod had grown by were withheld for a minute and more."""
    node.complete = False
    node.know("v", "train-1")
    node.kubelet.pods = {"train-1": {"main": B}}
    node.kubelet.records(("gone", "main", A), ("v", "main", B))
    await node.held()
    node.complete, node.heard = True, time.monotonic()
    assert await node.held() == {("train-1", "main", B)}
    assert node.watch.cell.value
    assert node.watch.cell.value.unfinished == {"v"}


def test_a_kubelet_that_lists_a_lost_pod_by_name_and_does_so_no_more_has_spoken() -> None:
    resource, away = "nvidia.com/gpu", View(away=True)
    train, other = ("ns", "train", "main"), {("x", "m", resource): frozenset({B})}
    listed = Record((Holding(*train, resource, (A,)),), (train,), began=1.0)
    entries = {("u", "main", resource): frozenset({A})}
    record = join(Evidence(), listed, entries, away, same_kubelet=True, fresh=True, read=True)
    record = join(record, Record(began=2.0), other, away, same_kubelet=False, fresh=True, read=True)
    named = Record((), (train,), began=3.0)
    record = join(record, named, other, away, same_kubelet=True, fresh=True, read=True)
    record = join(record, Record(began=4.0), other, away, same_kubelet=True, fresh=True, read=True)
    assert "u" not in record.joined.unfinished


@pytest.mark.parametrize("listed", [False, True])
async def test_who_a_kubelet_listed_and_lost_has_ended(node: Node, listed: bool) -> None:
    """Nor is anybody kept whom no API server will ever speak of."""
    node.complete = listed
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held() == {("train-0", "main", A)}
    if not listed:
        node.kubelet.restart()
    node.kubelet.pods = {}
    node.kubelet.records()
    await node.held()
    assert node.watch.cell.value
    assert node.watch.cell.value.unfinished == frozenset()


async def test_a_uid_that_is_contested_has_not_ended(node: Node) -> None:
    node.know("u", "train")
    node.kubelet.pods = {"train": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        del node.pods["u"]
        node.contested = frozenset({"u"})
        node.know("v", "another", finished=True)  # whose end is published
        await anyio.wait_all_tasks_blocked()
        assert node.watch.cell.value is not None
        assert node.watch.cell.value.ended == {"v"}
        assert "u" in node.watch.cell.value.unfinished
        group.cancel_scope.cancel()


async def test_a_pod_with_two_uids_hides_nothing(node: Node) -> None:
    """That of a static pod's object, and that of its cgroups, by which the checkpoint names it."""
    node.know("object", "static", hides=True)
    node.pods["u"] = node.pods["object"]
    node.kubelet.pods = {"static": {"main": ""}}
    node.kubelet.records(("u", "prepare", A))
    assert await node.held() == {("static", "prepare", A)}
    node.kubelet.tear()
    assert await node.held() == {("static", "prepare", A)}


async def test_lookers_for_processes_hear_of_ends_while_the_kubelet_does_not_answer(node: Node) -> None:
    node.know("u", "trains")
    node.kubelet.pods = {"trains": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        node.watch.problem = "PodResources does not answer"
        node.watch.cell.publish(None)
        heard = node.watch.holders.version
        del node.pods["u"]
        node.know("v", "train-2")
        await anyio.wait_all_tasks_blocked()
        assert node.watch.holders.version > heard
        assert node.watch.cell.value is None
        heard = node.watch.holders.version
        node.kubelet.pods = {}
        await node.watch.look()  # a call of the kubelet's reads for itself
        assert node.watch.holders.version > heard
        assert node.watch.gpus_by_pod() == {}
        assert node.watch.take_vanished() == set()
        del node.pods["v"]  # it went before anybody had read what it held
        node.changes.publish(None)
        await anyio.wait_all_tasks_blocked()
        assert node.watch.take_vanished() == {"v"}
        assert node.watch.take_vanished() == set()
        group.cancel_scope.cancel()


async def test_who_claims_to_mirror_a_pod_of_another_name_frees_nothing_of_it(node: Node) -> None:
    """As a tenant's pod may, once the object of that pod is gone and while its containers run on."""
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A), ("u", "prepare", B))
    both = {("train-0", "main", A), ("train-0", "prepare", B)}
    assert await node.held() == both
    del node.pods["u"]
    assert await node.held() == both
    node.pods["u"] = a_pod("ns", "forger", (), "f", phase="Running")
    for _ in range(2):
        assert await node.held() == both
    del node.pods["u"]
    for _ in range(2):
        assert await node.held() == both
        assert node.watch.gpus_by_pod() == {"u": {A, B}}


async def test_a_checkpoint_that_was_read_for_no_answer_is_not_known(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storm 8000092: GPUs that pods held were offered in another mode, once the file was torn."""
    node.complete = False
    node.kubelet.records(("u", "main", A))

    async def silent(deadline: float = 2.0) -> Record:
        raise PodResourcesUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(node.kubelet, "list", silent)
        assert await node.held() is None
    node.kubelet.tear()
    assert await node.held() is None
    node.kubelet.records(("u", "main", A))
    assert await node.held() == {("pod with UID u", "main", A)}


async def test_one_that_was_dropped_while_others_were_asked_after_is_held_until_the_kubelet_speaks(
    node: Node,
) -> None:
    """Deleted by force, it runs; the task that follows the watch has not had its turn."""
    node.know("u", "trains")
    node.kubelet.pods = {"trains": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    before = node.watch.newest.unfinished
    assert before == {"u"}

    async def nothing(*_: object) -> None:
        await anyio.lowlevel.checkpoint()

    node.watch.ask_after = nothing
    node.watch.given.append(lambda: frozenset({B}))
    del node.pods["u"]
    await node.watch._ask_after({}, ())
    assert node.watch.gpus_by_pod() == {"u": frozenset({A})}
    assert node.watch.newest.unfinished == before
    assert not node.watch.left_behind
    node.kubelet.pods = {}
    heard = node.watch.holders.version
    await node.watch.look()
    assert node.watch.holders.version > heard
    assert node.watch.gpus_by_pod() == {}
    assert node.watch.left_behind == {"u": frozenset({A, B})}
