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
from tests.component.cluster.server import (
    Answer,
    bookmark,
    event,
    missing,
    objects,
    pod,
    silence,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually
from tests.pace import scaled

PODS = "/api/v1/namespaces/ns/pods"
POD = f"{PODS}/a"


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
        fake.script(f"{PODS}/nobody", missing("pods", "nobody"))
        assert await cache.get("ns", "nobody") is None


@pytest.mark.parametrize(
    "answer",
    [
        status(404, "the server could not find the requested resource"),  # no such path
        missing("namespaces", "ns"),
        missing("pods", "another"),
        objects("404 page not found", code=404),
    ],
)
async def test_a_404_that_is_not_the_api_servers_word_on_the_pod_ends_nobody(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "MISS_SECONDS", scaled(1.0))
    async with pod_cache() as (fake, cache):
        fake.script(POD, answer)
        with pytest.raises(ApiRefused, match="404"):
            await cache.get("ns", "a")
        # Nor is any other answer with a 200: a pod of no UID would be another than each that is known.
        others: tuple[Any, ...] = (pod("b"), pod("a", uid=""), {"metadata": {}})
        for other in others:
            fake.scripts[POD] = [objects(other)]
            with pytest.raises(ApiError, match="is another object"):
                await cache.fetch("ns", "a")


async def test_all_that_have_not_finished_are_listed_by_one_call_that_names_no_version() -> None:
    async with pod_cache() as (fake, cache):
        fake.scripts["/api/v1/pods"] = [objects({"kind": "PodList", "items": [pod("a"), pod("b")]})]
        assert [each.name for each in await cache.list_now()] == ["a", "b"]
        selector = "spec.nodeName=n,status.phase!=Succeeded,status.phase!=Failed"
        assert dict(fake.asked[-1].query) == {"fieldSelector": selector}
        others: tuple[Any, ...] = ({"items": []}, {"kind": "Status"}, [])
        for other in others:
            fake.scripts["/api/v1/pods"] = [objects(other)]
            with pytest.raises(ApiError, match="cannot be understood"):
                await cache.list_now()


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
    async with pod_cache() as (fake, cache):
        fake.script(POD, silence)
        monkeypatch.setattr(pods_module, "MISS_SECONDS", 0.1)
        with pytest.raises(ApiError, match=r"in time|within 0\.1 s"):
            await cache.get("ns", "a")
        monkeypatch.setattr(pods_module, "MISS_SECONDS", scaled(1.0))
        fake.scripts[POD] = [objects({"metadata": {"name": 7}})]
        with pytest.raises(ApiError, match="pod ns/a cannot be understood"):
            await cache.get("ns", "a")
        fake.scripts[POD] = [status(403, "pods is forbidden")]
        with pytest.raises(ApiRefused, match="grant the right"):
            await cache.get("ns", "a")
