"""How plugins become known to the embedded kubelet, and how they are forgotten."""

import socket
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import grpc
import pytest

from agent.simulator.kubelet import EmbeddedKubelet, Timings
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, Plugin, register
from tests.component.kubelet.waiting import eventually
from tests.pace import scaled

TWO = {"a": True, "b": True}


async def test_registry_socket_is_asked_and_told(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=TWO).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2 and bool(plugin.statuses))
            order = [call.method for call in plugin.calls]
            assert order[:2] == ["GetInfo", "GetDevicePluginOptions"]
            assert set(order[2:]) == {"ListAndWatch", "NotifyRegistrationStatus"}
            assert plugin.statuses == [(True, "")]
            (info,) = plugin.named("GetInfo")
            assert info.remaining is not None
            assert info.remaining <= scaled(1)
            assert plugin.named("ListAndWatch")[0].remaining is None


async def test_vanished_registry_socket_deregisters(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=TWO).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            await anyio.to_thread.run_sync(plugin.socket.unlink)
            await eventually(lambda: kubelet.allocatable.get(GPU) == 0 and plugin.streams == 0)
            assert kubelet.capacity[GPU] == 2


async def test_ended_stream_with_its_socket_in_place_is_not_retried(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=TWO).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            plugin.end_streams()
            await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
            await anyio.sleep(10 * FAST.registry_poll)
            assert len(plugin.named("GetInfo")) == 1


async def test_recreated_socket_registers_anew(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=TWO).serving():
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
        await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
        with Plugin(root / "plugins_registry/p.sock", devices={**TWO, "c": True}).serving():
            await eventually(lambda: kubelet.allocatable.get(GPU) == 3)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"version": "v1alpha1"}, "not supported by kubelet"),
        ({"resource": "nvidia"}, "is invalid"),
        ({"plugin_type": "CSIPlugin"}, "no handler registered for plugin type: CSIPlugin"),
    ],
)
async def test_registry_refusal_is_told_and_retried(
    kubelet: EmbeddedKubelet, root: Path, fields: dict[str, str], told: str
) -> None:
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=TWO, **fields)  # type: ignore[arg-type]
        with plugin.serving():
            await eventually(lambda: len(plugin.statuses) >= 2)
            assert all(not registered and told in error for registered, error in plugin.statuses)
            assert not plugin.named("ListAndWatch")
            assert kubelet.allocatable == {}


async def test_get_info_slower_than_a_second_fails_and_is_retried(root: Path) -> None:
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=FAST)
    async with kubelet.running():
        slow = threading.Event()
        with Plugin(root / "plugins_registry/p.sock", devices=TWO, info_delay=slow).serving() as plugin:
            await eventually(lambda: len(plugin.named("GetInfo")) >= 2)
            first = plugin.named("GetInfo")[0].remaining
            assert first is not None
            assert first <= 1
            assert kubelet.allocatable == {}
            slow.set()
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)


async def test_hidden_files_and_plain_files_in_the_registry_are_left_alone(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    (root / "plugins_registry").mkdir()
    (root / "plugins_registry/readme").write_text("not a socket")
    async with kubelet.running():
        with Plugin(root / "plugins_registry/.p.sock", devices=TWO).serving() as plugin:
            await anyio.sleep(10 * FAST.registry_poll)
            assert plugin.calls == []


async def test_register_dials_back_before_it_answers(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "device-plugins/p.sock", devices=TWO).serving() as plugin:
            await anyio.to_thread.run_sync(register, root / "device-plugins/kubelet.sock", "p.sock")
            assert plugin.named("GetDevicePluginOptions")
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)


@pytest.mark.parametrize(
    ("resource", "version"),
    [
        (GPU, "v1alpha1"),
        ("nvidia", "v1beta1"),
        ("kubernetes.io/gpu", "v1beta1"),
        ("requests.nvidia.com/gpu", "v1beta1"),
        ("nvidia.com/", "v1beta1"),
    ],
)
async def test_register_refuses_with_unknown(
    kubelet: EmbeddedKubelet, root: Path, resource: str, version: str
) -> None:
    async with kubelet.running():
        with pytest.raises(grpc.RpcError) as refusal:
            await anyio.to_thread.run_sync(
                register, root / "device-plugins/kubelet.sock", "p.sock", resource, version
            )
        assert refusal.value.code() is grpc.StatusCode.UNKNOWN


async def test_register_without_a_server_fails_when_the_dial_gives_up(root: Path) -> None:
    kubelet = EmbeddedKubelet(root, timings=Timings(dial=0.5))
    async with kubelet.running():
        with pytest.raises(grpc.RpcError) as refusal:
            await anyio.to_thread.run_sync(register, root / "device-plugins/kubelet.sock", "p.sock")
        assert refusal.value.code() is grpc.StatusCode.UNKNOWN
        assert "failed to dial device plugin" in refusal.value.details()


async def test_start_removes_sockets_but_no_files(kubelet: EmbeddedKubelet, root: Path) -> None:
    folder = root / "device-plugins"
    folder.mkdir()
    (folder / "notes").write_text("kept")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "old.sock"))
    stale.close()
    async with kubelet.running():
        names = {path.name for path in folder.iterdir()}
        assert "old.sock" not in names
        assert {"notes", "kubelet.sock"} <= names


async def test_stop_ends_streams_and_leaves_the_plugins_socket_until_the_next_start(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "device-plugins/p.sock", devices=TWO).serving() as plugin:
            await anyio.to_thread.run_sync(register, root / "device-plugins/kubelet.sock", "p.sock")
            await eventually(lambda: plugin.streams == 1)
            await kubelet.stop()
            await eventually(lambda: plugin.streams == 0)
            assert plugin.socket.exists()
            await kubelet.start()
            assert not plugin.socket.exists()


async def test_registry_plugins_come_back_by_themselves_after_a_restart(root: Path) -> None:
    # Its first status waits for what it finds at the start, for as long as a busy plugin needs.
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=replace(FAST, first_status=60.0))
    seen: list[int] = []
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=TWO).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            # One that leaves no checkpoint comes back as a new node, whose figures are 0.
            await eventually((root / "device-plugins/kubelet_internal_checkpoint").exists)
            with kubelet.observing_node(lambda _, allocatable: seen.append(allocatable[GPU])):
                await kubelet.restart(down=0.1)
                await eventually(lambda: plugin.streams == 1)
                await anyio.sleep(0.2)
            assert seen == []  # not one change: no dip


async def test_ending_the_first_of_two_streams_closes_the_second(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    """The kubelet's re-registration fault: clients are keyed by resource name alone."""
    async with kubelet.running():
        first = Plugin(root / "plugins_registry/1.sock", devices=TWO)
        second = Plugin(root / "plugins_registry/2.sock", devices={**TWO, "c": True})
        with first.serving():
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            with second.serving():
                await eventually(lambda: kubelet.allocatable.get(GPU) == 3)
                assert (first.streams, second.streams) == (1, 1)
                first.end_streams()
                await eventually(lambda: second.streams == 0)
                await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
                await anyio.sleep(10 * FAST.registry_poll)
                assert len(second.named("ListAndWatch")) == 1  # and there is no retry
