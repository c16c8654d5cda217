"""The RPCs of a resource's socket, asked by C-core gRPC."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import anyio
import grpc
import pytest

from agent.kubelet import service as service_module
from agent.kubelet.podresources import PATIENCE_SECONDS
from agent.kubelet.wire import Allocation, DeviceNode, Mount, PreferenceRequest, Reason, Refused
from agent.pairing.resolver import MISS_SECONDS
from tests.component.kubelet_room.parts import (
    GPU,
    REGISTRY,
    V1BETA1,
    Peer,
    ScriptedPlugin,
    eventually,
    served,
)
from tests.pace import scaled

Code = grpc.StatusCode
METHODS = (
    "/v1beta1.DevicePlugin/GetDevicePluginOptions",
    "/v1beta1.DevicePlugin/ListAndWatch",
    "/v1beta1.DevicePlugin/GetPreferredAllocation",
    "/v1beta1.DevicePlugin/Allocate",
    "/v1beta1.DevicePlugin/PreStartContainer",
    "/pluginregistration.Registration/GetInfo",
    "/pluginregistration.Registration/NotifyRegistrationStatus",
)


async def test_options_and_info(folder: Path) -> None:
    plugin = ScriptedPlugin("a")
    plugin.needs_pre_start = True
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        options = await peer.call(peer.device.GetDevicePluginOptions, V1BETA1.Empty())
        assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, True)
        info = await peer.call(peer.watcher.GetInfo, REGISTRY.InfoRequest())
        assert (info.type, info.name, info.endpoint) == ("DevicePlugin", GPU, "")
        assert list(info.supported_versions) == ["v1beta1"]
        assert one.service.infos_given.value == 1


async def test_it_is_busy_until_nobody_waits_and_no_next_call_is_near(folder: Path) -> None:
    """By this others stand back, so that it may not stay so."""
    plugin, seen = ScriptedPlugin("a"), list[bool]()

    async def refuse(_: object) -> NoReturn:
        seen.append(one.service.busy)
        raise Refused("not today")

    plugin.on_allocate = plugin.on_prefer = refuse
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        assert not one.service.busy
        request = V1BETA1.PreferredAllocationRequest(container_requests=[{"allocation_size": 1}])
        for call in (peer.allocate("a"), peer.call(peer.device.GetPreferredAllocation, request)):
            with pytest.raises(grpc.RpcError):
                await call
            await eventually(lambda: not one.service.busy)
    assert seen == [True, True]


async def test_only_granted_allocations_are_told_of(folder: Path) -> None:
    async def refuse(ids: Sequence[str]) -> Allocation:
        raise Refused("not today")

    told: list[None] = []
    plugin = ScriptedPlugin("a")
    async with served(plugin, folder, lambda: told.append(None)) as one, Peer(one.path) as peer:
        await peer.allocate("a")
        await eventually(lambda: len(told) == 1)
        plugin.on_allocate = refuse
        with pytest.raises(grpc.RpcError):
            await peer.allocate("a")
    assert len(told) == 1


async def test_grants_are_forgotten_by_a_later_reading_though_nobody_asks_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "GRANT_SECONDS", 0.0)
    async with served(ScriptedPlugin("a", "b"), folder) as one, Peer(one.path) as peer:
        began = time.monotonic()
        await peer.allocate("a")
        await peer.allocate("b")
        one.read = began  # one that began before shows nothing of them, however late it comes
        assert one.service.granted_lately() == {"a", "b"}
        for _ in range(10):
            one.read = time.monotonic()
            await peer.allocate("a")
        assert len(one.service._granted) == 1


async def test_what_is_being_handed_out_counts_until_the_answer(folder: Path) -> None:
    asked, go_on = anyio.Event(), anyio.Event()

    async def slow(ids: Sequence[str]) -> Allocation:
        asked.set()
        await go_on.wait()
        raise Refused("not today")

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = slow
    async with served(plugin, folder) as one, Peer(one.path) as peer, anyio.create_task_group() as group:

        async def ask() -> None:
            with pytest.raises(grpc.RpcError):
                await peer.allocate("a")

        group.start_soon(ask)
        await asked.wait()
        assert one.service.granted_lately() == {"a"}
        go_on.set()
        await eventually(lambda: not one.service.granted_lately())


async def test_what_may_be_preferred_counts_until_the_answer(folder: Path) -> None:
    """A kubelet that is given a device which has left its list meanwhile ends by it (a nil pointer)."""
    asked, go_on = anyio.Event(), anyio.Event()

    async def slow(request: PreferenceRequest) -> Sequence[str]:
        asked.set()
        await go_on.wait()
        return request.available[:1]

    plugin = ScriptedPlugin("a", "b", "c")
    plugin.on_prefer = slow
    async with served(plugin, folder) as one, Peer(one.path) as peer, anyio.create_task_group() as group:
        request = V1BETA1.PreferredAllocationRequest(
            container_requests=[
                {
                    "available_device_ids": ["b", "a"],
                    "must_include_device_ids": ["c"],
                    "allocation_size": 1,
                }
            ]
        )
        group.start_soon(peer.call, peer.device.GetPreferredAllocation, request)
        await asked.wait()
        assert one.service.granted_lately() == {"a", "b", "c"}
        go_on.set()
        await eventually(lambda: one.service.granted_lately() == {"b"})


async def test_allocation_carries_every_field(folder: Path) -> None:
    async def grant(ids: Sequence[str]) -> Allocation:
        return Allocation(
            environment={"A": "1", "B": "zwei €"},
            mounts=(Mount("/in", "/out", read_only=False), Mount("/x", "/y")),
            device_nodes=(DeviceNode("/dev/n0", "/host/dev/n0", "rwm"),),
            annotations={"k": "v"},
            cdi_devices=("nvidia.com/gpu=a",),
        )

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = grant
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        (got,) = (await peer.allocate("a")).container_responses
        assert dict(got.envs) == {"A": "1", "B": "zwei €"}
        assert [(m.container_path, m.host_path, m.read_only) for m in got.mounts] == [
            ("/in", "/out", False),
            ("/x", "/y", True),
        ]
        assert [(d.container_path, d.host_path, d.permissions) for d in got.devices] == [
            ("/dev/n0", "/host/dev/n0", "rwm")
        ]
        assert dict(got.annotations) == {"k": "v"}
        assert [device.name for device in got.cdi_devices] == ["nvidia.com/gpu=a"]


async def test_preference_reads_all_containers_of_a_request(folder: Path) -> None:
    seen: list[PreferenceRequest] = []

    async def choose(request: PreferenceRequest) -> Sequence[str]:
        seen.append(request)
        return request.available[: request.size]

    plugin = ScriptedPlugin("a", "b", "c")
    plugin.on_prefer = choose
    asked = {"available_device_ids": ["a", "b", "c"], "must_include_device_ids": ["b"], "allocation_size": 2}
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        request = V1BETA1.PreferredAllocationRequest(container_requests=[asked, {"allocation_size": 0}])
        answer = await peer.call(peer.device.GetPreferredAllocation, request)
        assert [list(each.device_ids) for each in answer.container_responses] == [["a", "b"], []]
        assert seen == [PreferenceRequest(("a", "b", "c"), ("b",), 2), PreferenceRequest((), (), 0)]


async def test_pre_start_gets_the_ids(folder: Path) -> None:
    seen: list[Sequence[str]] = []

    async def remember(ids: Sequence[str]) -> None:
        seen.append(tuple(ids))

    plugin = ScriptedPlugin("a")
    plugin.on_pre_start = remember
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        await peer.call(peer.device.PreStartContainer, V1BETA1.PreStartContainerRequest(devices_ids=["a"]))
        assert seen == [("a",)]


async def test_what_was_handed_out_is_logged_by_gpu(folder: Path, logs: Any) -> None:
    async with served(ScriptedPlugin(), folder) as one, Peer(one.path) as peer:
        await peer.allocate("GPU-b::c1", "GPU-a::c2", "GPU-b::c3")
    assert logs == [
        {
            "event": "allocated",
            "log_level": "info",
            "resource": GPU,
            "devices": 3,
            "gpus": ["GPU-a", "GPU-b"],
        }
    ]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.INVALID, Code.INVALID_ARGUMENT),
        (Reason.EXHAUSTED, Code.RESOURCE_EXHAUSTED),
        (Reason.UNAVAILABLE, Code.UNAVAILABLE),
        (Reason.LATE, Code.DEADLINE_EXCEEDED),
    ],
)
async def test_a_refusal_reaches_the_pod_in_words(folder: Path, reason: Reason, code: Any, logs: Any) -> None:
    async def refuse(ids: Sequence[str]) -> NoReturn:
        raise Refused(f"GPU {ids[0]} is unwell: 100 %\nsee é", reason)

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = refuse
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        with pytest.raises(grpc.RpcError) as refusal:
            await peer.allocate("a")
        assert refusal.value.code() is code
        assert refusal.value.details() == "GPU a is unwell: 100 %\nsee é"
        assert one.service.stats.calls == {("Allocate", reason.value): 1}
        assert plugin.allocated == []
    assert [event["log_level"] for event in logs if event["event"] == "request_refused"] == ["warning"]


async def test_a_fault_of_the_plugin_is_told_and_the_socket_serves_on(folder: Path, logs: Any) -> None:
    async def stumble(ids: Sequence[str]) -> NoReturn:
        raise KeyError(ids[0])

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = stumble
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        with pytest.raises(grpc.RpcError) as failure:
            await peer.allocate("a")
        assert failure.value.code() is Code.INTERNAL
        assert "Allocate of nvidia.com/gpu failed in the agent: KeyError: 'a'" in failure.value.details()
        plugin.on_allocate = plugin._grant
        assert len((await peer.allocate("a")).container_responses) == 1
        assert one.service.stats.calls == {("Allocate", "INTERNAL"): 1, ("Allocate", "ok"): 1}
    assert "request_failed" in [event["event"] for event in logs]


@pytest.mark.parametrize("own", [True, False])
async def test_a_plugin_that_hangs_is_given_up(
    folder: Path, own: bool, monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    """The agent's deadline, and a TimeoutError of the plugin's own making that must not pass for it."""
    monkeypatch.setattr(service_module, "ANSWER_SECONDS", 0.05)

    async def hang(ids: Sequence[str]) -> NoReturn:
        if own:
            raise TimeoutError("a part of the plugin was late")
        await anyio.sleep_forever()
        raise AssertionError

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = hang
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        with pytest.raises(grpc.RpcError) as late:
            await peer.allocate("a")
        if own:
            assert late.value.code() is Code.INTERNAL
            assert "a part of the plugin was late" in late.value.details()
        else:
            assert late.value.code() is Code.DEADLINE_EXCEEDED
            assert "took longer than 0.05 s" in late.value.details()
        plugin.on_allocate = plugin._grant
        assert len((await peer.allocate("a")).container_responses) == 1


def test_the_agents_deadlines_leave_a_busy_node_time() -> None:
    # Pods were refused after 2 s on a node whose processors were busy.
    assert service_module.REQUEST_SECONDS == 20.0
    # An answer may wait for the kubelet's own, which its callers are given less time for.
    assert service_module.ANSWER_SECONDS == 20.0 > PATIENCE_SECONDS + MISS_SECONDS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(12))
async def test_broken_bytes_harm_nobody(
    folder: Path, method: str, seed: int, logs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoders refuse some and skip others as unknown fields: never a fault in the log, nor a dead socket."""
    rng = random.Random(seed)
    data = (
        [b"\x0a", b"\xff" * 12, b"\x0a\x7fshort", b"\x0a\x02\x0a\x05"][seed]
        if seed < 4
        else rng.randbytes(40)
    )
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        try:
            if method.endswith("ListAndWatch"):
                await anyio.to_thread.run_sync(
                    lambda: next(peer.channel.unary_stream(method)(data, timeout=scaled(5)))
                )
            else:
                await peer.raw(method, data)
        except grpc.RpcError as error:
            told = (error.code(), error.details())
        else:
            told = (Code.INVALID_ARGUMENT, "cannot be read")
        assert told[0] is Code.INVALID_ARGUMENT
        assert "cannot be read" in told[1]
        assert len((await peer.allocate("a")).container_responses) == 1
    assert "request_failed" not in {event["event"] for event in logs}
    assert caplog.records == []  # grpclib's: tracebacks of handlers


async def test_unknown_methods_are_unimplemented(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        with pytest.raises(grpc.RpcError) as refusal:
            await peer.raw("/v1beta1.DevicePlugin/Deallocate", b"")
        assert refusal.value.code() is Code.UNIMPLEMENTED


async def test_a_huge_request_is_served(folder: Path) -> None:
    """The kubelet sends what it has, without a limit: 60,000 IDs are 2.9 MB."""
    ids = [f"GPU-00000000-0000-0000-0000-000000000000::c{n}" for n in range(60_000)]
    plugin = ScriptedPlugin()
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        asked = {"available_device_ids": ids, "allocation_size": 50_000}
        request = V1BETA1.PreferredAllocationRequest(container_requests=[asked])
        answer = await peer.call(peer.device.GetPreferredAllocation, request)
        assert list(answer.container_responses[0].device_ids) == ids[:50_000]


async def test_a_caller_that_never_sends_its_request_is_let_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "REQUEST_SECONDS", 0.05)
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        silence = threading.Event()

        def nothing() -> Iterator[bytes]:
            silence.wait(10)
            yield from ()

        method = peer.channel.stream_unary("/v1beta1.DevicePlugin/Allocate")
        try:
            with pytest.raises(grpc.RpcError) as late:
                await peer.call(method, nothing())
        finally:
            silence.set()
        assert late.value.code() is Code.DEADLINE_EXCEEDED
        assert "no request came within 0.05 s" in late.value.details()


async def test_counts_and_durations(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        for _ in range(3):
            await peer.allocate("a")
        listener = peer.listen()
        await eventually(lambda: len(listener.lists) == 1)
        stats = one.service.stats
        assert stats.calls == {("Allocate", "ok"): 3}
        assert stats.seconds["Allocate"] > 0
        assert (stats.lists_sent, stats.streams_opened) == (1, 1)
        assert stats.bytes_sent == stats.last_list_bytes == len(one.plugin.lists.value)


async def test_the_kubelets_verdict_is_kept_until_it_changes(folder: Path, logs: Any) -> None:
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        told = REGISTRY.RegistrationStatus(plugin_registered=False, error="the name is invalid")
        await peer.call(peer.watcher.NotifyRegistrationStatus, told)
        refused = one.service.last_status_error, one.service.stats.registration_failures
        assert refused == ("the name is invalid", 1)
        told = REGISTRY.RegistrationStatus(plugin_registered=True)
        await peer.call(peer.watcher.NotifyRegistrationStatus, told)
        assert (one.service.last_status_error, one.service.stats.registrations) == (None, 1)
    assert [event["event"] for event in logs] == ["registration_refused", "registered"]
