"""Calls and patches against the scripted server."""

from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.cluster import api as api_module
from agent.cluster import node as node_module
from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable
from agent.cluster.node import OwnNode
from tests.component.cluster.scripted import serving
from tests.component.cluster.server import (
    bookmark,
    client,
    event,
    objects,
    opened,
    page,
    send,
    silence,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually

NODE = "/api/v1/nodes/n"


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
        node = OwnNode(api, "n")
        await node.write_taint("o/s", "NoSchedule", present=True)
        assert [one.body for one in fake.of(NODE)] == [
            patch(seen=None, then=[ours]),
            patch(seen=[theirs], then=[theirs, ours]),
        ]
        assert {one.headers["Content-Type"] for one in fake.of(NODE)} == {"application/json-patch+json"}
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("3", node_with("3", theirs, ours)), page("4", node_with("4", ours)))
        fake.script(NODE, objects({}))
        node = OwnNode(api, "n")
        await node.write_taint("o/s", "NoSchedule", present=False)
        await node.write_taint("o/s", "NoSchedule", present=False)
        assert [one.body for one in fake.of(NODE)] == [
            patch(seen=[theirs, ours], then=[theirs]),
            patch(seen=[ours], then=[]),
        ]
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("1", node_with("1")))
        fake.script(NODE, status(409, "the object has been modified"))
        with pytest.raises(ApiError, match="the taints of node n changed"):
            await OwnNode(api, "n").write_taint("o/s", "NoSchedule", present=True)
        assert len(fake.of(NODE)) < 10
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", page("1"))
        with pytest.raises(ApiError, match="there is no node n"):
            await OwnNode(api, "n").write_taint("o/s", "NoSchedule", present=True)


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
        node = OwnNode(api, "n")
        group.start_soon(node.reflector.run)
        await eventually(lambda: node.value is not None)
        shown: list[Any] = []
        node.reflector.on_change = lambda: shown.append(node.value and node.value.status.allocatable)
        await node.write_amounts({"x": (8, 8)})
        assert shown == [{"x": "8"}]
        with anyio.move_on_after(0.1) as waiting:
            await node.seen()
        assert waiting.cancelled_caught
        late.set()
        with anyio.fail_after(5):
            await node.seen()
        assert shown == [{"x": "8"}] * 3
        group.cancel_scope.cancel()


async def test_patches_of_the_node_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "now", lambda: "2026-01-02T00:00:00Z")
    async with serving() as (fake, api):
        fake.script(NODE, objects({}))
        fake.script(f"{NODE}/status", objects({}))
        node = OwnNode(api, "n")
        await node.write_metadata({"a": "1", "b": None}, {"c/d": "{}"})
        await node.write_metadata({}, {"e": None})
        await node.write_amounts({"nvidia.com/gpu": (8, 7), "nvidia.com/mps-core": (100, 0)})
        await node.write_condition("GPUModeReady", "True", "Applied", "said", "2026-01-01T00:00:00Z")
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
        node = OwnNode(api, "n")
        group.start_soon(node.reflector.run)
        await eventually(lambda: node.value is not None)
        found = node.value
        assert found is not None
        assert found.metadata.labels == {"nvidia-device-enable": "mps"}
        assert found.status.node_info.kubelet_version == "v1.36.3"
        assert found.status.node_info.container_runtime_version == "containerd://2.4.2"
        assert found.status.capacity["nvidia.com/gpu"] == "8"
        assert fake.asked[0].query["fieldSelector"] == "metadata.name=n"
        group.cancel_scope.cancel()


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
