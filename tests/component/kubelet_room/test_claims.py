"""The socket of the DRA driver, with a C-core client as the kubelet."""

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.kit.tasks import Cell
from agent.kubelet import claim_service as service_module
from agent.kubelet.claim_service import SERVICE, ClaimName, ClaimService, DeviceVerdict, PreparedShare
from agent.kubelet.grpc_server import DrainableServer
from tests.component import protos
from tests.component.kubelet_room.parts import Peer, eventually

DRA = protos.load("dra")
Code = grpc.StatusCode


class ScriptedDriver:
    """A driver that knows the claim `good`, refuses `bad`, and fails with any other."""

    name = "gpu.example.com"

    def __init__(self) -> None:
        self.health: Cell[Sequence[DeviceVerdict]] = Cell(())

    async def prepare(self, claims: Sequence[ClaimName]) -> Mapping[str, Sequence[PreparedShare] | str]:
        share = PreparedShare(("gpu",), "pool", "device", "share-1", ("example.com/gpu=0",))
        answers: dict[str, Sequence[PreparedShare] | str] = {"good": [share], "bad": "it cannot be"}
        return {each.uid: answers[each.name] for each in claims}

    async def unprepare(self, claims: Sequence[ClaimName]) -> None:
        pass


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[ScriptedDriver, Peer]]:
    driver = ScriptedDriver()
    service = ClaimService(driver)
    server = DrainableServer(service.handlers(), folder / "dra.sock")
    await server.start()
    try:
        async with Peer(server.path) as peer:
            yield driver, peer
    finally:
        service.drain()
        await server.stop()


async def prepared(peer: Peer, *names: str) -> Any:
    claims = [{"namespace": "default", "uid": f"uid-{name}", "name": name} for name in names]
    method = DRA.DRAPluginStub(peer.channel).NodePrepareResources
    return (await peer.call(method, DRA.PrepareRequest(claims=claims))).claims


async def test_every_claim_is_answered(folder: Path) -> None:
    async with served(folder) as (_, peer):
        claims = await prepared(peer, "good", "bad")
        (device,) = claims["uid-good"].devices
        assert (device.device_name, device.share_id, list(device.cdi_device_ids)) == (
            "device",
            "share-1",
            ["example.com/gpu=0"],
        )
        assert (claims["uid-bad"].error, list(claims["uid-bad"].devices)) == ("it cannot be", [])


async def test_a_fault_of_the_driver_is_no_fault_of_the_caller(folder: Path, logs: Any) -> None:
    async with served(folder) as (_, peer):
        with pytest.raises(grpc.RpcError) as failed:
            await prepared(peer, "unknown")
        assert failed.value.code() is Code.INTERNAL
        assert "prepare_failed" in [event["event"] for event in logs]
        with pytest.raises(grpc.RpcError) as broken:
            await peer.raw(SERVICE + "NodePrepareResources", b"\xff" * 40)
        assert broken.value.code() is Code.INVALID_ARGUMENT


async def test_a_request_that_never_comes_is_late_and_not_broken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "RECEIVE_SECONDS", 0.05)
    async with served(folder) as (_, peer):
        silence = threading.Event()

        def nothing() -> Iterator[bytes]:
            silence.wait(10)
            yield from ()

        method = peer.channel.stream_unary(SERVICE + "NodePrepareResources")
        try:
            with pytest.raises(grpc.RpcError) as late:
                await peer.call(method, nothing())
        finally:
            silence.set()
        assert late.value.code() is Code.DEADLINE_EXCEEDED
        assert "no request came within 0.05 s" in late.value.details()


async def test_a_watcher_of_health_that_reads_nothing_is_let_go_and_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    monkeypatch.setattr(service_module, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(service_module, "HEALTH_SECONDS", 0.01)
    async with served(folder) as (driver, peer):
        sick = [DeviceVerdict("pool", "device", well=False, cause="x" * 1024)] * 5_000
        driver.health.publish(sick)  # two are more than what the peer takes in unread
        stream = peer.channel.unary_stream("/v1.DRAResourceHealth/NodeWatchResources")(b"")
        await eventually(lambda: "peer_reads_nothing" in [event["event"] for event in logs])
        stream.cancel()
