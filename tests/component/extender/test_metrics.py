"""The extender's /metrics, of leaders and followers, of answers, and of a watch that died."""

from typing import Any

import anyio
import pytest

from agent.extender.free_capacity import PodClaim
from agent.extender.handlers import Verbs
from agent.extender.pod_demand import PodDemand
from agent.extender.settings import DEAD_WATCH_SECONDS
from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import Scheduler, leader

PREFIX = "gpu_agent_extender_"
LEASE = "gpu-node-agent-extender"


async def figures(scheduler: Scheduler) -> dict[str, float]:
    """Every sample of the page, without the common part of its name."""
    _, page = await scheduler.get("/metrics")
    samples = (line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(PREFIX))
    return {name.removeprefix(PREFIX): float(value) for name, value in samples}


async def test_figures_of_the_ledger_end_with_leadership() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        assert await scheduler.bind(api.pod("p", 60, 10), "a") == ""
        await scheduler.settled()
        before = await figures(scheduler)
        assert (before["leader"], before["ready"], before["nodes"], before["pods"]) == (1, 1, 1, 1)
        assert before["sold_ratio"] == pytest.approx(0.3)
        assert 0 <= before['watch_age_seconds{resource="nodes"}'] < DEAD_WATCH_SECONDS
        assert 0 <= before['watch_age_seconds{resource="pods"}'] < DEAD_WATCH_SECONDS

        api.leases[LEASE]["spec"] |= {"holderIdentity": "other", "leaseDurationSeconds": 300}
        api.leases[LEASE]["metadata"]["resourceVersion"] = "999999"
        with anyio.fail_after(10):
            while scheduler.extender.fleet is not None:
                await anyio.sleep(0.02)
        after = await figures(scheduler)
        assert (after["leader"], after["ready"]) == (0, 0)
        gauges = ("nodes", "pods", "assumed_pods", "sold_ratio", "watch_age_seconds")
        assert [name for name in after if name.startswith(gauges)] == []
        assert after['requests_total{result="ok",verb="bind"}'] == 1


async def test_nodes_without_inventory_are_those_that_offer_gpus() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    totals: dict[str, Any] = {"tencent.com/vcuda-core": 100}
    api.node("old", **totals)
    for number in range(3):
        api.node(f"cpu-{number}")
    async with api.serving(), leader(api) as scheduler:
        found = await figures(scheduler)
        assert (found["nodes"], found["nodes_without_inventory"], found["nodes_bad_inventory"]) == (5, 1, 0)


async def test_a_dead_watch_ends_the_answers_until_it_lives_again() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        sync = scheduler.extender.sync
        assert sync is not None
        assert sync.nodes.heard is not None
        sync.nodes.heard -= DEAD_WATCH_SECONDS + 1
        sync.look()
        found = await figures(scheduler)
        assert (found["leader"], found["ready"]) == (1, 0)
        assert found['watch_age_seconds{resource="nodes"}'] > DEAD_WATCH_SECONDS
        assert any("watch of nodes has been dead" in line for line in scheduler.extender.blockers())
        status, _ = await scheduler.post("predicates", {"Pod": api.pod("p", 1, 1), "NodeNames": ["a"]})
        assert status == 503
        api.node("b", *gpus(1))
        await scheduler.ready()
        assert (await scheduler.filter(api.pod("q", 1, 1), ["a", "b"]))["NodeNames"] == ["a", "b"]


async def test_choices_that_expired_are_a_counter() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        assert (await figures(scheduler))["expired_choices_total"] == 0
        fleet = scheduler.extender.fleet
        assert fleet is not None
        fleet.assume("never-bound", "a", PodClaim(PodDemand()), anyio.current_time())
        api.pod("another", 1, 1, "a")  # the watch lives, and does not show it
        with anyio.fail_after(10):
            while (await figures(scheduler))["expired_choices_total"] != 1:
                await anyio.sleep(0.1)


async def test_answers_are_counted_by_status(monkeypatch: pytest.MonkeyPatch, logs: Any) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))

    async def fails(*_: Any) -> None:
        raise RuntimeError("a fault of the extender")

    async with api.serving(), leader(api) as scheduler:
        body = {"Pod": api.pod("p", 60, 10), "NodeNames": ["a"]}
        assert (await scheduler.post("predicates", body))[0] == 200
        assert (await scheduler.post("predicates", b"{"))[0] == 400
        monkeypatch.setattr(Verbs, "_answer", fails)
        assert (await scheduler.post("predicates", body))[0] == 500
        found = await figures(scheduler)
    answered = {
        code: found[f'responses_total{{code="{code}",verb="predicates"}}'] for code in (200, 400, 500)
    }
    assert answered == {200: 1, 400: 1, 500: 1}
    assert any(one["event"] == "http_handler_failed" for one in logs)
    assert found['requests_total{result="error",verb="predicates"}'] == 1
