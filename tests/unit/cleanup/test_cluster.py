"""The uninstall hook: everything or nothing, and words for whoever stands in the way."""

import pytest

from agent.cleanup.cluster import AWAY, ClusterCleanup
from agent.cleanup.errors import CleanupFailed, CleanupRefused
from tests.unit.cleanup.cluster_api import RELEASE, Cluster, holder

IN_SERVICE = {RELEASE.agents: False, RELEASE.cleaners: True}
CLEANED = {RELEASE.agents: True, RELEASE.cleaners: False}


async def run(cluster: Cluster, seconds: float = 0.3) -> int:
    return await ClusterCleanup(cluster, RELEASE).run(seconds)


async def test_agents_leave_before_cleaners_come() -> None:
    cluster = Cluster(("node1", "node2"))
    assert await run(cluster) == 2
    assert cluster.history == [(RELEASE.agents, True), (RELEASE.cleaners, False)]
    assert cluster.away == CLEANED


async def test_cluster_without_gpu_nodes_is_clean() -> None:
    assert await run(Cluster(())) == 0


async def test_holders_are_named_and_nothing_is_changed() -> None:
    cluster = Cluster(("node1",))
    cluster.users = [holder("a"), holder("b", "node2"), holder("done", phase="Succeeded"), holder("new", "")]
    with pytest.raises(CleanupRefused) as refusal:
        await run(cluster)
    told = str(refusal.value)
    assert "2 pod(s)" in told
    assert "team/a (node node1), team/b (node node2)" in told
    assert "done" not in told
    assert cluster.away == IN_SERVICE


async def test_many_holders_are_counted() -> None:
    cluster = Cluster(("node1",))
    cluster.users = [holder(f"pod{number:02}") for number in range(12)]
    with pytest.raises(CleanupRefused, match=r"12 pod\(s\).* and 2 more"):
        await run(cluster)


async def test_a_node_that_refuses_puts_the_agents_back() -> None:
    cluster = Cluster(("node1", "node2"))
    cluster.failing["node2"] = (3, '{"event": "x"}\n1 pod(s) hold MPS shares: team/late\n')
    with pytest.raises(CleanupRefused, match=r"^node node2: 1 pod\(s\) hold MPS shares: team/late$"):
        await run(cluster, 20)
    assert cluster.away == IN_SERVICE
    assert cluster.history[-2:] == [(RELEASE.cleaners, True), (RELEASE.agents, False)]


async def test_a_node_that_fails_is_named_when_time_is_up() -> None:
    cluster = Cluster(("node1", "node2"))
    cluster.failing["node1"] = (1, "/run/x: cannot be removed: Device or resource busy")
    with pytest.raises(CleanupFailed, match=r"node node1: /run/x: cannot be removed.*--no-hooks"):
        await run(cluster)
    assert cluster.away == IN_SERVICE


async def test_an_agent_that_stays_is_named() -> None:
    cluster = Cluster(("node1",))
    cluster.staying.add("node1")
    with pytest.raises(CleanupFailed, match="node node1: its agent has not ended yet"):
        await run(cluster)
    assert cluster.away == IN_SERVICE


async def test_a_lacking_right_is_told_and_undone() -> None:
    cluster = Cluster(("node1",))
    cluster.refusing = "/daemonsets/"
    with pytest.raises(CleanupFailed, match="403"):
        await run(cluster)
    assert cluster.away == IN_SERVICE


def test_cleaners_are_made_away() -> None:
    assert AWAY.startswith("gpu-node-agent.io/")
