"""The uninstall hook: everything or nothing, and the name of each obstacle."""

from typing import Any

import anyio
import pytest

from agent.cleanup import cluster as room
from agent.cleanup.cluster import MARGIN_SECONDS, ClusterCleanup, Release
from agent.cleanup.request import CleanupFailed, CleanupRefused, CleanupState
from tests.pace import scaled
from tests.unit.cleanup.cluster_api import NOW, RELEASE, Cluster, holder

SHORT = min(scaled(0.2), 3.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(room, "LIST_AGENTS_SECONDS", 0.02)


async def run(cluster: Cluster, seconds: float = 20.0, release: Release = RELEASE) -> int:
    return await ClusterCleanup(cluster, release, lambda: NOW).run(seconds)


async def test_every_agent_is_asked_and_nothing_stays_behind() -> None:
    cluster = Cluster("node1", "node2")
    assert await run(cluster) == 2
    assert sorted(name for name, _ in cluster.requests) == ["node1", "node2"]
    (one, other) = (request for _, request in cluster.requests)
    assert one.id == other.id
    assert 20 < one.seconds_left(NOW) <= 20 + MARGIN_SECONDS
    assert cluster.annotations == {"node1": {}, "node2": {}}


async def test_cluster_without_gpu_nodes_is_clean() -> None:
    assert await run(Cluster()) == 0


async def test_a_node_that_joins_meanwhile_is_asked_too() -> None:
    cluster = Cluster("node1")
    cluster.answers["node1"] = None

    async def join() -> None:
        while not cluster.requests:
            await anyio.sleep(0.01)
        cluster.annotations["node2"] = {}
        cluster.agents.append("node2")
        while len(cluster.requests) < 2:
            await anyio.sleep(0.01)
        del cluster.annotations["node1"]

    async with anyio.create_task_group() as group:
        group.start_soon(join)
        assert await run(cluster) == 2  # one of them is gone
    assert cluster.annotations == {"node2": {}}


async def test_a_node_that_is_gone_is_not_waited_for() -> None:
    cluster = Cluster("node1")
    cluster.agents.append("node2")  # its pod has not been collected yet
    assert await run(cluster) == 2
    assert cluster.annotations == {"node1": {}}


async def test_holders_are_named_and_nothing_is_changed() -> None:
    cluster = Cluster("node1")
    cluster.users = [holder("a"), holder("b", "node2"), holder("done", phase="Succeeded"), holder("new", "")]
    with pytest.raises(CleanupRefused) as refusal:
        await run(cluster)
    told = str(refusal.value)
    assert "2 pod(s)" in told
    assert "team/a (node node1), team/b (node node2)" in told
    assert "done" not in told
    assert cluster.requests == []
    assert cluster.annotations == {"node1": {}}


async def test_many_holders_are_counted() -> None:
    cluster = Cluster("node1")
    cluster.users = [holder(f"pod{number:02}") for number in range(12)]
    with pytest.raises(CleanupRefused, match=r"12 pod\(s\).* and 2 more"):
        await run(cluster)


async def test_a_node_that_refuses_calls_all_off() -> None:
    cluster = Cluster("node1", "node2")
    cluster.answers["node2"] = (CleanupState.REFUSED, "1 pod(s) hold MPS shares: team/late")
    with pytest.raises(CleanupRefused, match=r"^node node2: 1 pod\(s\) hold MPS shares: team/late$"):
        await run(cluster)
    assert cluster.in_force() == set()


async def test_a_node_that_fails_is_named_when_time_is_up() -> None:
    cluster = Cluster("node1", "node2")
    cluster.answers["node1"] = (CleanupState.FAILED, "/run/x: cannot be removed: Device or resource busy")
    with pytest.raises(CleanupFailed, match=r"node node1: /run/x: cannot be removed.*--no-hooks"):
        await run(cluster, SHORT)
    assert cluster.in_force() == set()


async def test_an_agent_that_does_not_answer_is_named() -> None:
    cluster = Cluster("node1")
    cluster.answers["node1"] = None
    with pytest.raises(CleanupFailed, match="node node1: its agent has not answered"):
        await run(cluster, SHORT)
    assert cluster.in_force() == set()


async def test_an_agent_whose_clock_is_wrong_is_named() -> None:
    cluster = Cluster("node1")
    cluster.answers["node1"] = None

    async def put_away() -> None:
        while not cluster.requests:
            await anyio.sleep(0.01)
        cluster.annotations["node1"].clear()

    async with anyio.create_task_group() as group:
        group.start_soon(put_away)
        with pytest.raises(CleanupFailed, match="node node1: the request was taken away there"):
            await run(cluster, SHORT)


async def test_an_interrupted_hook_calls_all_off() -> None:
    cluster = Cluster("node1", "node2")
    cluster.answers["node2"] = None
    with anyio.move_on_after(10) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(run, cluster)
            while len(cluster.requests) < 2:
                await anyio.sleep(0.01)
            assert cluster.in_force() == {"node1", "node2"}
            group.cancel_scope.cancel()
    assert not scope.cancelled_caught
    assert cluster.in_force() == set()


@pytest.mark.parametrize("path", ["PATCH /api/v1/nodes/", "GET /api/v1/namespaces/"])
async def test_a_lacking_right_is_told_and_undone(path: str) -> None:
    cluster = Cluster("node1")
    cluster.refusing[path] = 403
    with pytest.raises(CleanupFailed, match="403"):
        await run(cluster)
    assert cluster.in_force() == set()


async def test_a_request_whose_answer_was_lost_is_taken_back() -> None:
    """The API server may have taken the patch, though nobody heard of it."""
    cluster = Cluster("node1")
    cluster.answers["node1"] = None
    cluster.silent = 1
    with pytest.raises(CleanupFailed, match="not clean within"):
        await run(cluster, SHORT)
    assert cluster.in_force() == set()


async def test_the_release_counts_as_deployed_before_anything_else() -> None:
    """helm upgrade finds it by that label, whatever becomes of this hook."""
    cluster = Cluster("node1")
    cluster.users = [holder("a")]
    with pytest.raises(CleanupRefused):
        await run(cluster)
    assert cluster.record == {"status": "deployed"}


async def test_a_record_that_is_not_there_hinders_nothing() -> None:
    cluster = Cluster("node1")
    cluster.record = None
    assert await run(cluster) == 1
    assert await run(cluster, release=Release("gpu", "app=agents")) == 1


async def test_an_answer_that_is_no_node_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a proxy on the way, which answers a page of its own with 200."""
    cluster, garbled = Cluster("node1"), ["<html>"]
    answer = cluster.get

    async def get(path: str, *arguments: Any) -> bytes:
        return garbled.pop().encode() if garbled and "/nodes/" in path else await answer(path, *arguments)

    monkeypatch.setattr(cluster, "get", get)
    assert await run(cluster) == 1
    assert not garbled
