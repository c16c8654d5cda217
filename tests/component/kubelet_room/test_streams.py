"""ListAndWatch over its life: many streams, slow and vanishing peers, the drain, and no growth."""

import gc
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import grpc
import pytest
from h2.connection import H2Connection

from agent.kubelet import grpc_server as server_module
from agent.kubelet import service as service_module
from agent.kubelet.grpc_server import DrainableServer
from agent.kubelet.wire import Allocation
from tests.component.kubelet_room.parts import (
    V1BETA1,
    Peer,
    ScriptedPlugin,
    eventually,
    listing,
    open_files,
    running_tasks,
    served,
)
from tests.pace import scaled

Code = grpc.StatusCode


async def test_each_stream_gets_the_newest_list(folder: Path) -> None:
    plugin = ScriptedPlugin("a")
    async with served(plugin, folder) as one, Peer(one.path) as first, Peer(one.path) as second:
        streams = [first.listen(), second.listen()]
        await eventually(lambda: all(stream.lists == [["a"]] for stream in streams))
        assert one.service.streams.value == 2
        for ids in (("a", "b"), ()):
            plugin.lists.publish(listing(*ids))
            await eventually(lambda: all(stream.lists[-1] == list(ids) for stream in streams))  # noqa: B023
        await first.close()
        await eventually(lambda: one.service.streams.value == 1)
        plugin.lists.publish(listing("c"))
        await eventually(lambda: streams[1].lists[-1] == ["c"])


async def test_an_empty_list_is_sent_at_once(folder: Path) -> None:
    """Without a first message the kubelet has no key for the resource, and lets pods run without devices."""
    async with served(ScriptedPlugin(), folder) as one, Peer(one.path) as peer:
        stream = peer.listen()
        await eventually(lambda: stream.lists == [[]])


async def test_drain_ends_streams_with_ok_and_answers_what_is_under_way(folder: Path) -> None:
    entered, go_on = anyio.Event(), anyio.Event()

    async def slow(ids: Sequence[str]) -> Allocation:
        entered.set()
        await go_on.wait()
        return Allocation(environment={"LATE": "yes"})

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = slow
    answers: list[Any] = []
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        stream = peer.listen()
        await eventually(lambda: len(stream.lists) == 1)
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                answers.append(await peer.allocate("a"))

            group.start_soon(ask)
            await entered.wait()
            group.start_soon(one.stop)
            await eventually(stream.ended.is_set)
            assert stream.status is Code.OK
            await eventually(lambda: not one.path.exists())
            assert answers == []
            go_on.set()
        assert answers[0].container_responses[0].envs["LATE"] == "yes"
        assert one.peers == 0


async def test_a_stream_that_opens_during_the_drain_ends_at_once(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        one.service.drain()
        stream = peer.listen()
        await eventually(stream.ended.is_set)
        assert (stream.status, stream.lists) == (Code.OK, [])
        one.service.resume()
        again = peer.listen()
        await eventually(lambda: again.lists == [["a"]])


async def test_a_call_that_outlives_the_drain_is_cut_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DRAIN_SECONDS", 0.05)

    async def hang(ids: Sequence[str]) -> Allocation:
        await anyio.sleep_forever()
        raise AssertionError

    plugin = ScriptedPlugin("a")
    plugin.on_allocate = hang
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(grpc.RpcError) as cut:
                    await peer.allocate("a")
                assert cut.value.code() is Code.UNAVAILABLE

            group.start_soon(ask)
            await eventually(lambda: one.peers == 1)
            await anyio.sleep(0.05)
            await one.stop()
        assert one.peers == 0


def _stalled(path: Path) -> socket.socket:
    """A peer that opens ListAndWatch and never reads again. Blocks."""
    from h2.config import H2Configuration
    from h2.connection import H2Connection

    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    h2 = H2Connection(H2Configuration(client_side=True))
    h2.initiate_connection()
    h2.increment_flow_control_window(2**30)
    h2.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ],
    )
    h2.increment_flow_control_window(2**30, 1)
    h2.send_data(1, b"\0\0\0\0\0", end_stream=True)
    peer.sendall(h2.data_to_send())
    return peer


async def test_a_peer_that_reads_nothing_holds_nobody_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    monkeypatch.setattr(service_module, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "CLOSE_SECONDS", 0.05)
    plugin = ScriptedPlugin()
    plugin.lists.publish(listing("a" * 40) * 100_000)  # more than a socket's buffer
    async with served(plugin, folder) as one, Peer(one.path) as other:
        files = open_files()
        stalled = await anyio.to_thread.run_sync(_stalled, one.path)
        await eventually(lambda: one.service.stats.streams_opened == 1)
        assert len((await other.allocate("a")).container_responses) == 1
        await eventually(lambda: one.service.streams.value == 0)  # it counts no more as listening
        assert "peer_reads_nothing" in [event["event"] for event in logs]
        await one.stop()
        assert one.peers == 0
        await eventually(lambda: running_tasks() == 1)
        stalled.close()
        await other.close()
        await eventually(lambda: open_files() <= files)


@pytest.mark.parametrize("way", ["cancel", "close", "socket"])
async def test_a_peer_that_goes_away_leaves_nothing_behind(
    folder: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = ScriptedPlugin("a")
    async with served(plugin, folder) as one:
        tasks = running_tasks()
        if way == "socket":
            raw = await anyio.to_thread.run_sync(_stalled, one.path)
            await eventually(lambda: one.service.streams.value == 1)
            raw.close()
        else:
            async with Peer(one.path) as peer:
                stream = peer.listen()
                await eventually(lambda: len(stream.lists) == 1)
                if way == "cancel":
                    stream.stream.cancel()  # RST_STREAM; the connection stays
                    await eventually(lambda: one.service.streams.value == 0)
                    assert len((await peer.allocate("a")).container_responses) == 1
        await eventually(lambda: one.service.streams.value == 0 and one.peers == 0)
        await eventually(lambda: running_tasks() == tasks)
        plugin.lists.publish(listing("b"))  # nobody is left to stumble over it
        async with Peer(one.path) as peer:
            stream = peer.listen()
            await eventually(lambda: stream.lists == [["b"]])
    assert caplog.records == []


async def test_a_thousand_peers_come_and_go(folder: Path) -> None:
    """Connections, handlers and descriptors of those who left are given back."""

    def visit() -> None:
        for _ in range(20):
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(str(folder / "p.sock"))
            raw.close()

    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        await peer.allocate("a")
        await anyio.to_thread.run_sync(visit)
        await eventually(lambda: one.peers == 1)
        await eventually(lambda: running_tasks() == 1)
        files = open_files()
        for _ in range(50):
            await anyio.to_thread.run_sync(visit)
        await eventually(lambda: one.peers == 1)
        await eventually(lambda: running_tasks() == 1)
        await eventually(lambda: open_files() <= files)  # the last may not be taken in yet
        grpclibs = one.server._server
        assert grpclibs is not None
        assert len(grpclibs._handlers) < 50  # as many as came at once
        assert len((await peer.allocate("a")).container_responses) == 1


async def test_two_hundred_kubelets_listen_and_leave(folder: Path) -> None:
    """Each with the connection of the one before dropped, and its calls: grpclib by itself keeps ten."""
    plugin = ScriptedPlugin("a")
    async with served(plugin, folder) as one:
        for count in range(209):
            raw = await anyio.to_thread.run_sync(_stalled, one.path)
            await eventually(lambda: one.service.stats.lists_sent == count + 1)  # noqa: B023
            raw.close()
        await eventually(lambda: one.service.streams.value == 0 and one.peers == 0)
        await eventually(lambda: running_tasks() == 1)
        grpclibs = one.server._server
        assert grpclibs is not None
        assert len(grpclibs._handlers) < 5


async def test_calls_that_are_over_are_forgotten(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        for _ in range(200):
            await peer.allocate("a")
        remembered = [len(each._closed_streams) for each in gc.get_objects() if type(each) is H2Connection]
        assert 0 < max(remembered) <= 128


async def test_ten_thousand_lists_leave_no_trace(folder: Path) -> None:
    plugin = ScriptedPlugin()
    lists = [listing(f"{'x' * 40}{number}") for number in (1, 2)]
    async with served(plugin, folder) as one, Peer(one.path) as peer:
        received = 0
        call = peer.device.ListAndWatch(V1BETA1.Empty())

        def read() -> None:
            nonlocal received
            try:
                for _ in call:
                    received += 1
            except grpc.RpcError:
                return

        async def send(count: int) -> None:
            for number in range(count):
                sent = one.service.stats.lists_sent
                plugin.lists.publish(lists[number % 2])
                while one.service.stats.lists_sent == sent:
                    await anyio.lowlevel.checkpoint()
            gc.collect()

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, read)
            await eventually(lambda: received == 1)
            await send(500)
            blocks = sys.getallocatedblocks()
            await send(9_500)
            await eventually(lambda: received == 10_001)
            assert sys.getallocatedblocks() - blocks < 1_000  # a tenth of a block for each list
            call.cancel()


async def test_peers_that_connect_in_the_same_moment_are_all_dropped_at_the_stop(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one:
        peers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for peer in peers:  # within one turn of the loop
            peer.connect(str(one.path))
        await eventually(lambda: one.peers == 20)
        await one.stop()
        for peer in peers:
            peer.settimeout(5)
            read = await anyio.to_thread.run_sync(lambda: list(iter(lambda: peer.recv(4096), b"")))  # noqa: B023
            assert isinstance(read, list)  # the end of the stream came
            peer.close()


async def test_the_socket_of_a_dead_agent_is_replaced(folder: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "p.sock"))
    stale.close()
    async with served(ScriptedPlugin("a"), folder) as one, Peer(one.path) as peer:
        assert await one.server.in_place()
        assert len((await peer.allocate("a")).container_responses) == 1
        assert one.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == []  # noqa: PTH208


async def test_a_foreign_socket_in_our_place_is_left_alone(folder: Path) -> None:
    async with served(ScriptedPlugin("a"), folder) as one:
        await anyio.to_thread.run_sync(one.path.unlink)
        assert not await one.server.in_place()
        keeper = socket.socket(socket.AF_UNIX)  # keeps the inode number from being the same again
        keeper.bind(str(folder / "keeper"))
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(one.path))
        await one.stop()
        assert one.path.is_socket()
        other.close()
        keeper.close()


async def test_a_socket_that_cannot_be_bound_leaves_nothing(folder: Path) -> None:
    files = open_files()
    missing = DrainableServer(ScriptedPluginHandlers(), folder / "missing" / "p.sock")
    with pytest.raises(FileNotFoundError):
        await missing.start()
    occupied = folder / "p.sock"
    occupied.mkdir()
    blocked = DrainableServer(ScriptedPluginHandlers(), occupied)
    with pytest.raises(IsADirectoryError):
        await blocked.start()
    too_long = DrainableServer(ScriptedPluginHandlers(), folder / ("x" * 110))
    with pytest.raises(OSError, match="too long"):
        await too_long.start()
    assert os.listdir(folder) == ["p.sock"]  # noqa: PTH208
    assert open_files() <= files
    await blocked.stop()  # harmless


def ScriptedPluginHandlers() -> server_module.Handlers:  # noqa: N802
    return service_module.DevicePluginService(ScriptedPlugin("a")).handlers()


@pytest.mark.parametrize("turns", range(6))
async def test_one_that_is_accepted_as_the_server_stops_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The kubelet dialled while a plugin ended, and asyncio left half a connection open."""
    server = DrainableServer(ScriptedPluginHandlers(), folder / "p.sock")
    await server.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)

        async def dialled() -> None:
            peer.connect(str(server.path))
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()

        monkeypatch.setattr(server, "unlink", dialled)
        await server.stop()
        gc.collect()  # one that is left open warns, and warnings are errors
        peer.settimeout(scaled(5))
        with suppress(ConnectionResetError):
            while await anyio.to_thread.run_sync(peer.recv, 4096):
                pass
