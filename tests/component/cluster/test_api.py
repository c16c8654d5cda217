"""Calls, patches, the pod cache, events and credentials against the scripted server."""

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.cluster import api as api_module
from agent.cluster import lean
from agent.cluster import pods as pods_module
from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi
from agent.cluster.events import WAITING, Event, EventRecorder, Regarding
from agent.cluster.node import NodeObject
from agent.cluster.pods import PodCache
from tests.component.cluster.server import (
    FakeApi,
    bookmark,
    client,
    event,
    objects,
    opened,
    page,
    pod,
    send,
    silence,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually

NODE = "/api/v1/nodes/n"
POD = "/api/v1/namespaces/ns/pods/a"
EVENTS = "/api/v1/namespaces/default/events"


@asynccontextmanager
async def serving(**scripts: Any) -> Any:
    fake = FakeApi()
    async with fake.serving(), client(fake.url) as api:
        yield fake, api


async def test_errors_are_this_rooms_and_name_what_was_asked() -> None:
    async with serving() as (fake, api):
        fake.script("/x", status(409, "the object has been modified"))
        with pytest.raises(ApiRefused, match="PATCH /x: 409 the object has been modified") as refusal:
            await api.merge_patch("/x", {})
        assert (refusal.value.status, refusal.value.retry_after) == (409, None)
        fake.script("/busy", status(429, "later", Retry_After="3"))
        with pytest.raises(ApiRefused) as busy:
            await api.get("/busy")
        assert busy.value.retry_after == 3.0
        fake.script("/mute", silence)
        with pytest.raises(ApiUnavailable, match="did not answer /mute in time"):
            await api.get("/mute", deadline=0.1)
        fake.script("/who", status(401, "Unauthorized"))
        with pytest.raises(ApiRefused, match="token is not accepted"):
            await api.get("/who")
    async with client("http://127.0.0.1:9") as nowhere:
        with pytest.raises(ApiUnavailable, match="cannot be reached for /x"):
            await nowhere.get("/x")


async def test_an_error_page_that_is_no_status_object_is_cut_short() -> None:
    async with serving() as (fake, api):

        async def proxy(request: Any) -> Any:
            from aiohttp import web

            return web.Response(status=502, text="<html>" + "x" * 5000)

        fake.script("/x", proxy)
        with pytest.raises(ApiRefused) as refusal:
            await api.get("/x")
        assert str(refusal.value).startswith("GET /x: 502 <html>xx")
        assert len(str(refusal.value)) < 300


async def test_a_taint_is_set_between_those_of_others_whoever_changes_them_meanwhile() -> None:
    ours, theirs = {"key": "o/s", "effect": "NoSchedule"}, {"key": "a", "effect": "NoExecute", "value": "1"}

    def node_with(version: str, *taints: dict[str, str]) -> dict[str, Any]:
        return {"metadata": {"name": "n", "resourceVersion": version}, "spec": {"taints": taints}}

    def patch(*, seen: Any, then: Any) -> list[dict[str, Any]]:
        path = "/spec/taints"
        return [
            {"op": "test", "path": path, "value": seen},
            {"op": "add", "path": path, "value": then},
        ]

    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("1", node_with("1")), page("2", node_with("2", theirs)))
        fake.script(NODE, status(422, "testing /spec/taints value failed"), objects({}))
        node = NodeObject(api, "n")
        await node.set_taint("o/s", "NoSchedule", present=True)
        assert [one.body for one in fake.of(NODE)] == [
            patch(seen=None, then=[ours]),
            patch(seen=[theirs], then=[theirs, ours]),
        ]
        assert {one.headers["Content-Type"] for one in fake.of(NODE)} == {"application/json-patch+json"}
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("3", node_with("3", theirs, ours)), page("4", node_with("4", ours)))
        fake.script(NODE, objects({}))
        node = NodeObject(api, "n")
        await node.set_taint("o/s", "NoSchedule", present=False)
        await node.set_taint("o/s", "NoSchedule", present=False)
        assert [one.body for one in fake.of(NODE)] == [
            patch(seen=[theirs, ours], then=[theirs]),
            patch(seen=[ours], then=[]),
        ]
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("1", node_with("1")))
        fake.script(NODE, status(409, "the object has been modified"))
        with pytest.raises(ApiError, match="the taints of node n changed"):
            await NodeObject(api, "n").set_taint("o/s", "NoSchedule", present=True)
        assert len(fake.of(NODE)) < 10
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("1"))
        with pytest.raises(ApiError, match="there is no node n"):
            await NodeObject(api, "n").set_taint("o/s", "NoSchedule", present=True)


async def test_a_write_needs_no_watch_to_be_known() -> None:
    """The watch falls mute at version 10; later an older event comes after the answer to a write."""

    def node_at(version: str, **amounts: str) -> dict[str, Any]:
        metadata = {"name": "n", "uid": "u", "resourceVersion": version}
        return {"metadata": metadata, "status": {"allocatable": amounts}}

    late = anyio.Event()

    async def mute(request: Any) -> Any:
        answer = await opened(request)
        await send(answer, event("ADDED", node_at("10")), bookmark("10", complete=True))
        await late.wait()
        await send(answer, event("MODIFIED", node_at("11", x="1")), event("MODIFIED", node_at("12", x="8")))
        await anyio.sleep_forever()

    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script("/api/v1/nodes", mute)
        fake.script(f"{NODE}/status", objects(node_at("12", x="8")))
        node = NodeObject(api, "n")
        group.start_soon(node.run)
        await eventually(lambda: node.value is not None)
        shown: list[Any] = []
        node.reflector.on_change = lambda: shown.append(node.value and node.value.status.allocatable)
        await node.patch_resources({"x": (8, 8)})
        assert shown == [{"x": "8"}]
        with anyio.move_on_after(0.1) as waiting:
            await node.seen()
        assert waiting.cancelled_caught
        late.set()
        with anyio.fail_after(5):
            await node.seen()
        assert shown == [{"x": "8"}] * 3
        group.cancel_scope.cancel()


async def test_patches_of_the_node_are_exact() -> None:
    async with serving() as (fake, api):
        fake.script(NODE, objects({}))
        fake.script(f"{NODE}/status", objects({}))
        node = NodeObject(api, "n")
        await node.patch_metadata(labels={"a": "1", "b": None}, annotations={"c/d": "{}"})
        await node.patch_metadata(annotations={"e": None})
        await node.patch_resources({"nvidia.com/gpu": (8, 7), "nvidia.com/mps-core": (100, 0)})
        await node.patch_condition(
            "GPUModeReady", "True", "Applied", "said", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
        )
        merge, strategic = "application/merge-patch+json", "application/strategic-merge-patch+json"
        assert [(one.method, one.path, one.headers["Content-Type"], one.body) for one in fake.asked] == [
            (
                "PATCH",
                NODE,
                merge,
                {"metadata": {"labels": {"a": "1", "b": None}, "annotations": {"c/d": "{}"}}},
            ),
            ("PATCH", NODE, merge, {"metadata": {"annotations": {"e": None}}}),
            (
                "PATCH",
                f"{NODE}/status",
                merge,
                {
                    "status": {
                        "capacity": {"nvidia.com/gpu": "8", "nvidia.com/mps-core": "100"},
                        "allocatable": {"nvidia.com/gpu": "7", "nvidia.com/mps-core": "0"},
                    }
                },
            ),
            (
                "PATCH",
                f"{NODE}/status",
                strategic,
                {
                    "status": {
                        "conditions": [
                            {
                                "type": "GPUModeReady",
                                "status": "True",
                                "reason": "Applied",
                                "message": "said",
                                "lastTransitionTime": "2026-01-01T00:00:00Z",
                                "lastHeartbeatTime": "2026-01-02T00:00:00Z",
                            }
                        ]
                    }
                },
            ),
        ]


async def test_the_own_node_is_watched_and_read() -> None:
    item = {
        "metadata": {
            "name": "n",
            "uid": "1",
            "labels": {"nvidia-device-enable": "mps"},
            "resourceVersion": "3",
        },
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {
            "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.4.2"},
            "capacity": {"cpu": "2", "nvidia.com/gpu": "8"},
        },
    }
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script("/api/v1/nodes", watch(event("ADDED", item), bookmark("3", complete=True)))
        node = NodeObject(api, "n")
        group.start_soon(node.run)
        await eventually(lambda: node.value is not None)
        found = node.value
        assert found is not None
        assert found.metadata.labels == {"nvidia-device-enable": "mps"}
        assert found.status.node_info.kubelet_version == "v1.36.3"
        assert found.status.node_info.container_runtime_version == "containerd://2.4.2"
        assert found.status.capacity["nvidia.com/gpu"] == "8"
        assert fake.asked[0].query["fieldSelector"] == "metadata.name=n"
        group.cancel_scope.cancel()


@asynccontextmanager
async def pod_cache(*known: Any) -> Any:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(
            "/api/v1/pods", watch(*(event("ADDED", one) for one in known), bookmark("9", complete=True))
        )
        cache = PodCache(api, "n")
        group.start_soon(cache.run)
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


async def test_equal_events_are_counted_and_aged_ones_made_anew() -> None:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        group.start_soon(recorder.run)
        recorder.node("GPULost", "GPU x is lost", warning=True)
        await eventually(lambda: len(fake.of(EVENTS)) == 1)
        body = fake.asked[0].body
        name = body["metadata"]["name"]
        assert body["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n"}
        assert (body["reason"], body["message"], body["type"]) == ("GPULost", "GPU x is lost", "Warning")
        assert (body["count"], body["source"]) == (1, {"component": "gpu-node-agent", "host": "n"})
        assert body["firstTimestamp"].endswith("Z")

        one = f"{EVENTS}/{name}"
        fake.script(one, objects({}), objects({}), status(404, "gone"))
        for count in (2, 3):
            recorder.node("GPULost", "GPU x is lost", warning=True)
            await eventually(lambda: len(fake.of(one)) == count - 1)  # noqa: B023
            patched = fake.asked[-1]
            assert (patched.method, patched.body["count"]) == ("PATCH", count)
        recorder.node("GPULost", "GPU x is lost", warning=True)
        await eventually(lambda: len(fake.of(EVENTS)) == 2)
        again = fake.asked[-1].body
        assert again["count"] == 1
        assert again["metadata"]["name"] != name
        recorder.emit(Event(Regarding("Pod", "p", "ns", "uid"), "AllocationRefused", "x" * 5000))
        await eventually(lambda: len(fake.of("/api/v1/namespaces/ns/events")) == 1)
        other = fake.asked[-1].body
        assert other["involvedObject"] == {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": "p",
            "namespace": "ns",
            "uid": "uid",
        }
        assert (other["type"], len(other["message"])) == ("Normal", 1024)
        group.cancel_scope.cancel()


async def test_events_that_find_no_room_or_no_server_are_told(logs: Any) -> None:
    async with serving() as (fake, api):
        fake.script(EVENTS, status(403, "events is forbidden"))
        recorder = EventRecorder(api, "n")
        for number in range(WAITING + 10):
            recorder.node("GPULost", f"GPU {number} is lost")
        assert recorder.dropped == 10
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            await eventually(lambda: len(fake.of(EVENTS)) == WAITING)
            await eventually(lambda: len(logs) == WAITING)
            group.cancel_scope.cancel()
    assert {one["event"] for one in logs} == {"event_not_sent"}
    assert "events is forbidden" in logs[0]["problem"]


async def test_the_memory_of_events_is_bounded() -> None:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        group.start_soon(recorder.run)
        for number in range(3 * WAITING):
            recorder.node("GPULost", str(number))
            await eventually(lambda: len(fake.asked) == number + 1)  # noqa: B023
        assert len(recorder._counts) <= WAITING
        group.cancel_scope.cancel()


async def test_the_service_accounts_token_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are replaced hourly; the file may be missing for a moment."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("unused")
    await anyio.to_thread.run_sync(lean._empty)
    from kubernetes_asyncio.config import incluster_config

    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    configured = await lean.configuration(None)
    assert configured.host == "https://127.0.0.1:6443"
    configured.ssl_ca_cert = None
    fake = FakeApi()
    fake.script("/x", objects({}))
    async with fake.serving():
        configured.host = fake.url
        api = KubeApi(configured, lean.rest_client(configured))
        loader = configured.refresh_api_key_hook.__closure__[0].cell_contents
        await api.get("/x")
        token.write_text("second")
        await api.get("/x")
        loader.token_expires_at = loader.token_expires_at.replace(year=2000)
        await api.get("/x")
        assert [one.headers["authorization"] for one in fake.asked] == [
            "Bearer first",
            "Bearer first",
            "Bearer second",
        ]
        token.unlink()
        loader.token_expires_at = loader.token_expires_at.replace(year=2000)
        with pytest.raises(ApiUnavailable, match="the credentials for the API server cannot be read"):
            await api.get("/x")
        await api.close()


async def test_where_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(lean.NoClusterAccess, match="KUBERNETES_SERVICE_HOST is not set"):
        await lean.configuration(None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    if not os.path.exists("/var/run/secrets/kubernetes.io"):  # noqa: ASYNC240, PTH110
        with pytest.raises(lean.NoClusterAccess, match="the pod's service account cannot be used"):
            await lean.configuration(None)


async def test_a_watch_keeps_its_connection_alive() -> None:
    import socket

    async with serving() as (fake, api):
        fake.script("/w", watch(bookmark("1")))
        async with api.stream("/w", {}, 5.0) as lines:
            assert b"BOOKMARK" in await anext(lines)
            (held,) = api._rest.pool_manager.connector._acquired
            raw = held.transport.get_extra_info("socket")
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert (
                raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                == api_module.KEEP_ALIVE[socket.TCP_KEEPIDLE]
            )
