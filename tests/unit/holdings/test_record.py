"""The one record of who holds what: every source, every gap in it, and who has ended."""

import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.holdings import holdings as holdings_module
from agent.model.holding import Record
from tests.unit.holdings.record_node import Node

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
C = "GPU-00000000-0000-0000-0000-00000000000c"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_init_containers_hold_what_only_the_checkpoint_shows(node: Node) -> None:
    node.know("u", "warm", hides=True)
    node.kubelet.pods = {"warm": {"main": B}, "other": {"main": ""}}
    node.kubelet.records(("u", "prepare", A), ("u", "main", B))
    assert await node.held() == {("warm", "prepare", A), ("warm", "main", B)}
    assert node.watch.cell.value is not None
    assert [each.listed for each in node.watch.cell.value.holdings] == [True, False]
    version = node.watch.cell.version
    await node.held()
    assert node.watch.cell.version == version  # nothing changed, so nobody is woken


async def test_a_pod_ends_by_the_kubelets_word(node: Node) -> None:
    node.know("u", "warm")
    node.kubelet.pods = {"warm": {"main": ""}}
    node.kubelet.records(("u", "prepare", A))
    assert await node.held() == {("warm", "prepare", A)}
    node.kubelet.pods = {}  # the file goes on naming it
    assert await node.held() == set()


async def test_a_pod_ends_by_the_api_servers_word_before_the_next_look(node: Node) -> None:
    for end in ("finished", "gone"):
        node.know("u", "warm")
        node.kubelet.pods = {"warm": {"main": B}}
        node.kubelet.records(("u", "prepare", A), ("u", "main", B))
        async with anyio.create_task_group() as group:
            assert await node.held()
            group.start_soon(node.watch._follow_pods)
            await anyio.wait_all_tasks_blocked()
            if end == "gone":
                del node.pods["u"]
                node.changes.publish(None)
            else:
                node.know("u", "warm", finished=True)
            with anyio.fail_after(5):
                await node.watch.cell.wait_for(lambda now: now is not None and not now.holdings)
            group.cancel_scope.cancel()
        # A kubelet that lists it still, as after a deletion by force, is right: its containers may run.
        assert await node.held()


@pytest.mark.parametrize("end", ["finished", "gone", "another of its name"])
@pytest.mark.parametrize("recorded", [(), (("u", "prepare", A),)])
async def test_a_pod_that_ends_holds_nothing_that_was_not_in_the_checkpoint_yet(
    node: Node, recorded: tuple[tuple[str, str, str], ...], end: str
) -> None:
    node.know("u", "warm")
    node.kubelet.pods = {"warm": {"main": B}, "other": {"main": C}}
    node.kubelet.records(*recorded)
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        assert ("warm", "main", B) in (await node.held() or ())
        if end == "finished":
            node.know("u", "warm", finished=True)
        else:
            del node.pods["u"]
            if end == "another of its name":  # whether it was listed is not known before the next reading
                node.know("v", "warm")
            node.changes.publish(None)
        await anyio.wait_all_tasks_blocked()
        assert node.watch.cell.value is not None
        left = {(each.pod, each.ids) for each in node.watch.cell.value.holdings}
        assert left == {("other", (C,))} | ({("warm", (B,))} if end == "another of its name" else set())
        group.cancel_scope.cancel()


async def test_pods_that_end_one_after_the_other_between_two_readings_stay_ended(node: Node) -> None:
    for uid, name in (("u", "first"), ("v", "second"), ("w", "third")):
        node.know(uid, name)
    node.kubelet.pods = {"first": {"main": A}, "second": {"main": B}, "third": {"main": C}}
    node.kubelet.records(("u", "main", A), ("v", "main", B), ("w", "main", C))
    assert await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        for gone, left in (("u", {"second", "third"}), ("v", {"third"}), ("w", set())):
            del node.pods[gone]
            node.changes.publish(None)
            await anyio.wait_all_tasks_blocked()
            assert node.watch.cell.value is not None
            assert {each.pod for each in node.watch.cell.value.holdings} == left
        group.cancel_scope.cancel()


async def test_a_pod_that_outlives_its_object_holds_devices_while_it_is_listed(
    node: Node,
) -> None:
    for uid, name in (("u", "forced"), ("v", "other")):
        node.know(uid, name)
    node.kubelet.pods = {"forced": {"main": A}, "other": {"main": B}}
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    both = await node.held()
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch.run)
        await node.watch.cell.wait_for(bool)
        await anyio.wait_all_tasks_blocked()
        del node.pods["u"]
        assert await node.held() == both  # its containers run on
        for phase in ("another pod changes", "another pod ends"):
            if phase == "another pod ends":
                del node.pods["v"]
            node.changes.publish(None)
            await anyio.wait_all_tasks_blocked()
            assert node.watch.cell.value is not None
            assert "forced" in {each.pod for each in node.watch.cell.value.holdings}, phase
        node.kubelet.pods = {}
        with anyio.fail_after(5):
            await node.watch.cell.wait_for(lambda now: now is not None and not now.holdings)
        group.cancel_scope.cancel()


async def test_a_kubelet_that_lists_nothing_yet_makes_nobodys_devices_free(node: Node) -> None:
    node.know("u", "warm")
    node.know("v", "whole")
    entries = (("u", "prepare", A), ("v", "main", B), ("w", "main", A))
    listed = {"warm": {"main": ""}, "whole": {"main": B}}
    node.kubelet.pods = listed
    node.kubelet.records(*entries)
    everything = await node.held()
    assert everything == {("warm", "prepare", A), ("whole", "main", B)}
    for agent in ("the same", "another"):
        if agent == "another":
            node.start_agent()
        node.kubelet.restart()
        assert await node.held() == everything
        node.kubelet.pods = {"warm": {"main": ""}}
        assert await node.held() == everything
        assert node.watch.problem is None  # and the agent stays ready
        node.kubelet.pods = listed
        assert await node.held() == everything
    # From then on what it does not list has ended.
    node.kubelet.pods = {"warm": {"main": ""}}
    assert await node.held() == {("warm", "prepare", A)}


async def test_blind_kubelet_forgets_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its way to the API server is cut, or its runtime hangs: it serves PodResources and lists nobody."""
    age = 0.0
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(holdings_module, clock, lambda: time.time() + age, raising=False)
    for uid, name in (("u", "train-0"), ("v", "train-1"), ("w", "train-2")):
        node.know(uid, name)
    listed = {"train-0": {"main": A}, "train-1": {"main": B}, "train-2": {"main": C}}
    entries = (("u", "main", A), ("v", "main", B), ("w", "main", C))
    everything = {("train-0", "main", A), ("train-1", "main", B), ("train-2", "main", C)}
    for agent in ("the same", "another"):
        node.kubelet.pods = listed
        node.kubelet.records(*entries)
        assert await node.held() == everything
        node.kubelet.restart()
        if agent == "another":
            node.start_agent()
        age += 3600.0
        assert await node.held() == everything, agent
        # It hears of one after the other: each that it lists speaks for itself alone.
        node.kubelet.pods = {"train-0": {"main": A}, "coredns-x": {"dns": ""}}
        age += 3600.0
        assert await node.held() == everything, agent
        # One that it has listed, and lists no more, has ended; the API server does not know yet.
        node.kubelet.pods = {"coredns-x": {"dns": ""}}
        assert await node.held() == everything - {("train-0", "main", A)}, agent
        # The API server's word ends one of which it never hears.
        del node.pods["v"]
        assert await node.held() == {("train-2", "main", C)}, agent
        node.know("v", "train-1")


async def test_what_a_kubelet_forgot_before_it_heard_of_the_pod_is_held_on(node: Node) -> None:
    """Asked for its record while it takes its pods up one by one, it forgets those that are still to come."""
    node.know("u", "train-0")
    node.know("v", "train-1")
    node.kubelet.pods = {"train-0": {"main": A}, "train-1": {"main": B}}
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    everything = await node.held()
    node.kubelet.restart()
    node.kubelet.records(("u", "main", A))
    node.kubelet.pods = {"train-0": {"main": A}}
    for _ in range(2):
        assert await node.held() == everything
    # By the kubelet's word another has it: then it is that one's alone.
    node.know("x", "train-9")
    node.kubelet.pods["train-9"] = {"main": B}
    assert await node.held() == {("train-0", "main", A), ("train-9", "main", B)}
    node.kubelet.pods = {"train-0": {"main": A}}
    assert await node.held() == {("train-0", "main", A)}


async def test_units_that_came_to_another_pod_are_its_own_though_the_checkpoint_is_older(node: Node) -> None:
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A))
    await node.held()
    node.know("v", "train-1")
    node.kubelet.pods = {"train-1": {"main": A}}  # and the file still names the first
    assert await node.held() == {("train-1", "main", A)}
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch._follow_pods)
        await anyio.wait_all_tasks_blocked()
        node.know("u", "train-0", finished=True)
        await anyio.wait_all_tasks_blocked()
        assert node.watch.cell.value is not None
        assert [each.pod for each in node.watch.cell.value.holdings] == ["train-1"]
        group.cancel_scope.cancel()


async def test_entries_of_a_pod_that_is_gone_are_not_the_next_ones(node: Node) -> None:
    # A pod takes over one of two devices of a pod that is gone; the checkpoint is written after both calls.
    node.kubelet.records(("gone", "main", A), ("gone", "prepare", B))
    node.know("next", "train-1")
    node.kubelet.pods = {"train-1": {"main": A}}
    assert await node.held() == {("train-1", "main", A)}


async def test_the_next_of_a_name_that_has_one_of_the_ended_ones_units_has_no_other_of_them(
    node: Node,
) -> None:
    """As of a StatefulSet, before the kubelet has written the next one's container down."""
    node.know("u", "web-0")
    node.kubelet.pods = {"web-0": {"main": A, "side": B}}
    node.kubelet.records(("u", "main", A), ("u", "side", B))
    assert await node.held() == {("web-0", "main", A), ("web-0", "side", B)}
    del node.pods["u"]
    node.kubelet.pods = {}
    assert await node.held() == set()
    node.know("v", "web-0")
    node.kubelet.pods = {"web-0": {"main": A, "side": ""}}
    assert await node.held() == {("web-0", "main", A)}


async def test_an_ended_pods_units_do_not_name_it_after_the_next_which_the_watch_has_not_shown(
    node: Node,
) -> None:
    """Storm 90012: what else the first had held counted as the next one's; a wrong container was served."""
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A, "side": B}}
    node.kubelet.records(("u", "main", A), ("u", "side", B))
    await node.held()
    node.know("u", "train-0", finished=True)
    node.kubelet.pods = {"train-1": {"main": "", "side": ""}}
    assert await node.held() == set()
    del node.pods["u"]  # and the file still names it
    node.kubelet.pods = {"train-1": {"main": A, "side": ""}}
    assert await node.held() == {("train-1", "main", A)}


@pytest.mark.parametrize("read", ["", "before"])
async def test_a_pod_that_lacks_what_the_file_has_of_an_ended_one_is_not_that_one(
    node: Node, read: str
) -> None:
    """Storm 28: a pod ended at once, unseen by the watch; what else it had held counted as the next one's."""
    node.complete = False
    node.kubelet.pods = {"train-0": {"main": A, "side": ""}}
    assert await node.held() == {("train-0", "main", A)}
    node.kubelet.records(("u", "main", A), ("u", "side", B))
    node.kubelet.pods = {"train-1": {"main": "", "side": ""}}
    if read:
        await node.held()
    node.kubelet.pods = {"train-1": {"main": A, "side": ""}}
    assert await node.held() == {("train-1", "main", A)}
    node.kubelet.pods = {"train-1": {"main": A, "side": B}}
    assert await node.held() == {("train-1", "main", A), ("train-1", "side", B)}


async def test_a_pod_that_has_more_than_the_file_says_is_that_of_the_file(node: Node) -> None:
    """It is being admitted while the API server is away, to an agent that has just started."""
    node.complete = False
    node.kubelet.records(("u", "prepare", B), ("u", "main", A))
    node.kubelet.pods = {"train-0": {"main": A, "side": C}}
    assert await node.held() == {("train-0", "prepare", B), ("train-0", "main", A), ("train-0", "side", C)}


@pytest.mark.parametrize("times", [1, 9])
async def test_kubelet_restarts_during_a_reading(node: Node, times: int) -> None:
    """Between its answer and the look at whose socket it is: the answer is of the one before."""
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A))
    everything = await node.held()
    usual, left = node.kubelet.list, times

    async def list_then_restart(deadline: float = 2.0) -> Record:
        nonlocal left
        answer = await usual(deadline)
        if left:
            left -= 1
            await anyio.to_thread.run_sync(node.kubelet.restart)
        return answer

    node.kubelet.list = list_then_restart  # type: ignore[method-assign]
    # One that restarts again and again has said nothing.
    assert await node.held() == (everything if times == 1 else None)
    left = 0
    assert await node.held() == everything


async def test_kubelet_restart_with_init_only_units_stays_ready(node: Node) -> None:
    node.know("u", "compiling", hides=True)
    node.kubelet.pods = {"compiling": {"main": ""}}
    node.kubelet.records(("u", "compile", A))
    everything = await node.held()
    assert everything == {("compiling", "compile", A)}
    restarted: tuple[dict[str, dict[str, str]], ...] = ({}, {"compiling": {"main": ""}})
    for listed in restarted:
        node.kubelet.restart()
        node.kubelet.pods = listed
        assert await node.held() == everything
        assert node.watch.problem is None  # which would make the agent unready
        assert node.watch.cell.value is not None


async def test_what_a_kubelet_listed_before_its_restart_stays_listed(node: Node) -> None:
    node.kubelet.pods = {"p": {"main": A}}
    node.kubelet.records(("u", "main", A))
    before = await node.watch.refresh()
    node.kubelet.restart()
    after = await node.watch.refresh()
    assert before is not None
    assert after is not None
    assert after.holdings[0] is before.holdings[0]


async def test_without_the_api_servers_word_nothing_in_the_checkpoint_has_ended(node: Node) -> None:
    node.complete = False
    node.kubelet.records(("u", "main", A))
    nameless = {("pod with UID u", "main", A)}
    assert await node.held() == nameless
    # Neither pods of its own files nor one of the API server's say that it has heard of all.
    for pods in ({"etcd-node-1": {"etcd": ""}}, {"gpu-node-agent-x7k2p": {"agent": ""}}, {}):
        node.kubelet.pods = pods
        assert await node.held() == nameless
    node.know("u", "train-0")
    assert await node.held() == {("train-0", "main", A)}
    del node.pods["u"]
    node.complete = True
    assert await node.held() == set()


async def test_a_pod_that_the_watch_has_not_told_of_yet_holds_what_its_init_container_got(node: Node) -> None:
    node.know("v", "old")
    node.kubelet.pods = {"old": {"main": ""}, "new": {"main": ""}}
    node.kubelet.records(("u", "prepare", A))
    assert await node.held() == {("pod with UID u", "prepare", A)}
    node.know("u", "new")
    assert await node.held() == {("new", "prepare", A)}
    # A UID that no listed pod can have is one of a pod that ended before this agent began.
    node.kubelet.records(("u", "prepare", A), ("ghost", "main", B))
    assert await node.held() == {("new", "prepare", A)}


async def test_a_contested_uid_frees_nothing(node: Node) -> None:
    node.know("s", "static-node-1")
    node.kubelet.pods = {"static-node-1": {"main": ""}}
    node.kubelet.records(("s", "prepare", A))
    assert await node.held() == {("static-node-1", "prepare", A)}
    del node.pods["s"]
    node.contested = frozenset({"s"})
    node.know("a", "static-node-1")
    node.know("b", "forger")
    for _ in ("the same agent", "another"):
        assert {ids for _, _, ids in await node.held() or ()} == {A}
        node.start_agent()


async def test_a_namesake_takes_nothing_over(node: Node) -> None:
    node.know("u", "web-0")
    node.kubelet.pods = {"web-0": {"main": ""}}
    node.kubelet.records(("u", "prepare", A))
    await node.held()
    del node.pods["u"]
    node.know("v", "web-0")
    node.kubelet.records(("u", "prepare", A), ("v", "prepare", B))
    assert await node.held() == {("web-0", "prepare", B)}


async def test_an_unreadable_checkpoint_is_told_once_and_frees_nothing(node: Node, logs: Any) -> None:
    node.know("u", "warm", hides=True)
    node.kubelet.pods = {"warm": {"main": B}}
    node.kubelet.records(("u", "prepare", A), ("u", "main", B))
    everything = await node.held()
    node.kubelet.tear()
    for _ in range(3):
        assert await node.held() == everything
    assert [each["event"] for each in logs].count("checkpoint_unreadable") == 1
    # PodResources count alone beside what is remembered.
    node.kubelet.pods["later"] = {"main": A}
    assert ("later", "main", A) in (await node.held() or ())
    # An agent that remembers nothing knows that there is something that it does not know.
    node.start_agent()
    assert await node.held() is None
    assert node.watch.problem is not None
    assert "what containers of ns/warm hold is not known" in node.watch.problem
    node.know("u", "warm", hides=True, finished=True)
    assert await node.held() == {("warm", "main", B), ("later", "main", A)}
    # Of a kubelet that lists nothing yet nothing is known then, but by the API server.
    node.kubelet.restart()
    node.complete = False
    node.start_agent()
    assert await node.held() is None
    assert "which pods the kubelet has not heard of yet" in node.watch.problem
    node.complete = True
    node.know("v", "train-0")
    assert await node.held() is None
    node.know("v", "train-0", finished=True)
    assert await node.held() == set()


async def test_without_a_checkpoint_podresources_count_alone(node: Node) -> None:
    node.know("u", "warm", hides=True)
    node.kubelet.pods = {"warm": {"main": B}}
    assert await node.held() == {("warm", "main", B)}
    assert node.watch.problem is None


async def test_devices_of_other_plugins_and_of_gpus_that_are_gone_are_in_nobodys_way(node: Node) -> None:
    node.know("u", "p")
    node.kubelet.pods = {"p": {"main": ""}}
    node.kubelet.records(("x", "main", "mlx5_0"), ("u", "prepare", "GPU-that-was-taken-out"))
    assert await node.held() == {("p", "prepare", "GPU-that-was-taken-out")}
    node.kubelet.restart()
    assert await node.held() == {("p", "prepare", "GPU-that-was-taken-out")}


async def test_an_answer_that_comes_late_does_not_replace_a_newer_one(node: Node) -> None:
    late = anyio.Event()
    listed = node.kubelet.list

    async def slow(deadline: float = 2.0) -> Record:
        answer = await listed(deadline)
        await late.wait()
        return answer

    node.kubelet.pods = {"p": {"main": A}}
    node.kubelet.list = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(node.watch.refresh)
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.05)
        node.kubelet.list = listed  # type: ignore[method-assign]
        node.kubelet.pods = {"q": {"main": B}}
        newer = await node.held()
        late.set()
    assert newer == {("q", "main", B)}
    assert node.watch.cell.value is not None
    assert [each.pod for each in node.watch.cell.value.holdings] == ["q"]


async def test_the_checkpoint_is_read_before_the_kubelet_is_asked(node: Node) -> None:
    """A pod that comes in between is listed, and not taken for one that only the checkpoint shows."""
    node.know("u", "train-0")
    usual = node.kubelet.list

    async def admitted_after_the_answer(deadline: float = 2.0) -> Record:
        answer = await usual(deadline)
        node.kubelet.pods = {"train-0": {"main": A}}
        await anyio.to_thread.run_sync(node.kubelet.records, ("u", "main", A))
        return answer

    node.kubelet.list = admitted_after_the_answer  # type: ignore[method-assign]
    assert await node.held() == set()
    node.kubelet.list = usual  # type: ignore[method-assign]
    found = await node.watch.refresh()
    assert found is not None
    assert [each.listed for each in found.holdings] == [True]
