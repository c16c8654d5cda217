"""Pods by the copy, and by a call where it lacks them."""

from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.cluster import pods as pods_module
from agent.cluster.api import ApiError, ApiRefused
from agent.cluster.pods import PodCache
from tests.component.cluster.scripted import serving
from tests.component.cluster.server import bookmark, event, objects, pod, silence, status, watch
from tests.component.kubelet_room.parts import eventually

POD = "/api/v1/namespaces/ns/pods/a"


@asynccontextmanager
async def pod_cache(*known: Any) -> Any:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(
            "/api/v1/pods", watch(*(event("ADDED", one) for one in known), bookmark("9", complete=True))
        )
        cache = PodCache(api, "n")
        group.start_soon(cache.reflector.run)
        await eventually(lambda: cache.reflector.synced)
        yield fake, cache
        group.cancel_scope.cancel()


SPEC = {
    "nodeName": "n",
    "containers": [{"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "2"}}}],
    "initContainers": [{"name": "side", "restartPolicy": "Always"}],
}


async def test_a_pod_of_the_copy_costs_no_call() -> None:
    async with pod_cache(pod("a", spec=SPEC)) as (fake, cache):
        found = await cache.get("ns", "a")
        assert found.spec.containers[0].resources.limits == {"nvidia.com/gpu": "2"}
        assert found.spec.init_containers[0].restart_policy == "Always"
        assert (found.spec.node_name, found.status.phase) == ("n", "Pending")
        assert fake.of(POD) == []


async def test_a_miss_is_one_get() -> None:
    async with pod_cache() as (fake, cache):
        fake.script(POD, objects(pod("a", spec=SPEC)))
        assert (await cache.get("ns", "a")).metadata.uid == "a"
        assert [one.method for one in fake.of(POD)] == ["GET"]
        assert await cache.get("ns", "nobody") is None


@pytest.mark.parametrize(
    "old",
    [
        pod("a", uid="old", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        pod("a", uid="old", status={"phase": "Failed"}),
        pod("a", uid="old", status={"phase": "Succeeded"}),
    ],
)
async def test_a_copy_that_ends_may_have_a_namesake(old: Any) -> None:
    async with pod_cache(old) as (fake, cache):
        fake.script(POD, objects(pod("a", uid="new")))
        assert (await cache.get("ns", "a")).metadata.uid == "new"


async def test_a_get_in_an_admission_has_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pods_module.MISS_SECONDS == 1.0
    monkeypatch.setattr(pods_module, "MISS_SECONDS", 0.1)
    async with pod_cache() as (fake, cache):
        fake.script(POD, silence)
        with pytest.raises(ApiError, match=r"in time|within 0\.1 s"):
            await cache.get("ns", "a")
        fake.scripts[POD] = [objects({"metadata": {"name": 7}})]
        with pytest.raises(ApiError, match="pod ns/a cannot be understood"):
            await cache.get("ns", "a")
        fake.scripts[POD] = [status(403, "pods is forbidden")]
        with pytest.raises(ApiRefused, match="grant the right"):
            await cache.get("ns", "a")
