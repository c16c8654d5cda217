"""Replicas of one owner through filter, priorities and bind, one after the other."""

from typing import Any

import anyio
import pytest

from agent.extender import binder
from agent.extender.binder import MOST_IN_VAIN
from agent.model.placement import HINT, POLICY
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import Scheduler, leader
from tests.pace import scaled

OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "rs", "controller": True}
NODES = ("a", "b", "c")


async def placed(api: ClusterApi, scheduler: Scheduler, name: str, **metadata: Any) -> tuple[str, str]:
    pod = api.pod(name, 25, 40, **metadata)
    fitting = (await scheduler.filter(pod, NODES))["NodeNames"]
    _, scores = await scheduler.post("priorities", {"Pod": pod, "Nodes": None, "NodeNames": fitting})
    best = max(scores, key=lambda each: (each["Score"], each["Host"]))["Host"]
    assert await scheduler.bind(pod, best) == ""
    await scheduler.settled()
    return best, pod["metadata"]["annotations"][f"{HINT}0"]


@pytest.mark.parametrize(
    ("flags", "metadata", "places"),
    [
        ({}, {"ownerReferences": [OWNER]}, 6),
        ({"spreadReplicas": "false"}, {"ownerReferences": [OWNER]}, 2),
        ({}, {"ownerReferences": [OWNER], "annotations": {POLICY: "binpack"}}, 2),
        ({}, {}, 2),
    ],
    ids=["replicas", "by option not", "its own policy", "no owner"],
)
async def test_replicas_spread(flags: dict[str, str], metadata: dict[str, Any], places: int) -> None:
    api = ClusterApi()
    for node in NODES:
        api.node(node, *gpus(2))
    async with api.serving(), leader(api, **flags) as scheduler:
        found = [await placed(api, scheduler, f"replica-{number}", **metadata) for number in range(6)]
    assert len(set(found)) == places
    assert len({node for node, _ in found[:3]}) == min(3, places - 1)


async def test_a_replica_is_ranked_once_the_one_before_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """kube-scheduler binds beside its work on the next pod."""
    monkeypatch.setattr(binder, "SIBLING_SECONDS", scaled(10.0))
    api = ClusterApi()
    for node in NODES:
        api.node(node, *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        first, second = (api.pod(name, 25, 40, ownerReferences=[OWNER]) for name in ("first", "second"))
        await ranked(scheduler, first)
        found: dict[str, int] = {}
        async with anyio.create_task_group() as group:

            async def next_one() -> None:
                found.update(await ranked(scheduler, second))

            group.start_soon(next_one)
            assert await scheduler.bind(first, "b") == ""
        assert found == {"a": 10, "b": 0, "c": 10}


async def test_replicas_that_are_never_bound_hold_up_nobody_for_long() -> None:
    api = ClusterApi()
    for node in NODES:
        api.node(node, *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        serving = scheduler.extender.serving
        assert serving is not None
        for number in range(20):
            await ranked(scheduler, api.pod(f"replica-{number}", 25, 40, ownerReferences=[OWNER]))
            # The same once more waits for nothing.
            patience = serving.binder._patience
            await ranked(scheduler, api.pod(f"replica-{number}", 25, 40, ownerReferences=[OWNER]))
            assert serving.binder._patience >= patience
        assert serving.binder._patience < MOST_IN_VAIN


async def ranked(scheduler: Scheduler, pod: Object) -> dict[str, int]:
    _, scores = await scheduler.post("priorities", {"Pod": pod, "Nodes": None, "NodeNames": NODES})
    return {each["Host"]: each["Score"] for each in scores}


async def test_replicas_are_known_to_the_next_leader() -> None:
    api = ClusterApi()
    for node in NODES:
        api.node(node, *gpus(1))
    found = set()
    async with api.serving():
        for number in range(3):
            async with leader(api) as scheduler:
                found.add(await placed(api, scheduler, f"replica-{number}", ownerReferences=[OWNER]))
    assert len(found) == 3
