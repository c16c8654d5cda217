"""The life of a resource's socket against the embedded kubelet: found, lost, found again, gone."""

import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.to_thread
import pytest

from agent.kubelet import endpoint as endpoint_module
from agent.kubelet.endpoint import Endpoint
from agent.simulator.kubelet import EmbeddedKubelet, Timings
from tests.component.kubelet_room.parts import GPU, Peer, ScriptedPlugin, eventually, listing, running_tasks
from tests.pace import scaled

FAST = Timings(registry_poll=0.02, registry_retry=0.05, first_status=0.5)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(endpoint_module, "FOLDER_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(endpoint_module, "ASKED_SECONDS", 0.1)
    monkeypatch.setattr(endpoint_module, "BLIND_LOOK_SECONDS", 0.05)


def _kubelet(folder: Path, timings: Timings = FAST) -> EmbeddedKubelet:
    return EmbeddedKubelet(folder, status_tick=0.02, timings=timings)


def _endpoint(folder: Path, resource: str = GPU) -> Endpoint:
    return Endpoint(ScriptedPlugin("a", "b", resource=resource), folder, folder / "device-plugins")


@asynccontextmanager
async def _life(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """The endpoint running; at the end its socket must be gone."""
    async with anyio.create_task_group() as group:
        group.start_soon(endpoint.run)
        try:
            yield endpoint
        finally:
            group.cancel_scope.cancel()
    assert not endpoint.path.exists()


def _listed(kubelet: EmbeddedKubelet, count: int = 2) -> bool:
    return kubelet.allocatable.get(GPU) == count


def _ours(folder: Path) -> set[str]:
    """Names of our sockets in both folders, hidden ones included."""

    def names() -> Iterator[str]:
        for place in ("plugins_registry", "device-plugins"):
            if (folder / place).is_dir():
                yield from (
                    f"{place}/{path.name}" for path in (folder / place).iterdir() if "gna-" in path.name
                )

    return set(names())


async def test_the_kubelet_finds_the_socket(folder: Path, logs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "ASKED_SECONDS", 60.0)
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        assert endpoint.registered
        assert endpoint.blocker is None
        assert _ours(folder) == {"plugins_registry/gna-nvidia-gpu.sock"}
        endpoint.plugin.lists.publish(listing("a"))
        await eventually(lambda: _listed(kubelet, 1))
    assert [event["log_level"] for event in logs if event["event"] == "registration_waits"] == ["info"]


async def test_a_kubelet_that_does_not_look_is_told_of(folder: Path) -> None:
    """It has another root folder than the agent believes."""
    kubelet, believed = _kubelet(folder), folder / "elsewhere"
    await anyio.Path(believed / "plugins_registry").mkdir(parents=True)
    ours = Endpoint(ScriptedPlugin("a", "b"), believed, folder / "device-plugins")
    async with kubelet.running(), _life(ours) as endpoint:
        await eventually(lambda: "serves, but has not asked" in (endpoint.blocker or ""))
        assert _ours(believed) == {"plugins_registry/gna-nvidia-gpu.sock"}
        assert not _ours(folder)  # nothing else is tried


async def test_a_kubelet_that_is_down_is_told_of_and_waited_for(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running():
        await kubelet.stop()
        assert (folder / "device-plugins/kubelet.sock").is_socket()  # as a dead kubelet leaves it
        async with _life(_endpoint(folder)) as endpoint:
            await eventually(lambda: "does not serve" in (endpoint.blocker or ""))
            await kubelet.start()
            await eventually(lambda: _listed(kubelet))


@pytest.mark.parametrize("down", [0.0, 1.0])
async def test_the_kubelet_restarts(folder: Path, down: float) -> None:
    """Down for longer than the silence is borne, too, and we are found again."""
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        for _ in range(2):
            opened = endpoint.service.stats.streams_opened
            await kubelet.restart(down)
            await eventually(lambda: endpoint.service.stats.streams_opened > opened)  # noqa: B023
            await eventually(lambda: _listed(kubelet))


async def test_a_kubelet_that_is_down_for_long_finds_the_same_socket(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        before = endpoint.path.stat()
        await kubelet.stop()
        await anyio.sleep(1.0)  # thrice the silence
        after = endpoint.path.stat()
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
        assert "it may be restarting" in (endpoint.blocker or "")
        await kubelet.start()
        await eventually(lambda: _listed(kubelet))


async def test_our_socket_is_deleted(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        await anyio.sleep(0.05)  # the watch stands
        opened = endpoint.service.stats.streams_opened
        await anyio.to_thread.run_sync(endpoint.path.unlink)
        await eventually(endpoint.path.exists)
        await eventually(lambda: endpoint.service.stats.streams_opened > opened)
        await eventually(lambda: _listed(kubelet))


async def test_a_node_out_of_inotify_instances(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(_: Path) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(endpoint_module, "watching", exhausted)
    monkeypatch.setattr(endpoint_module, "SILENCE_SECONDS", min(scaled(0.3), 3.0))
    monkeypatch.setattr(endpoint_module, "ASKED_SECONDS", min(scaled(0.3), 3.0))
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        await anyio.sleep(endpoint_module.SILENCE_SECONDS)
        assert endpoint.service.stats.streams_opened == 1  # it does not take that for a lost socket
        await anyio.to_thread.run_sync(endpoint.path.unlink)
        await eventually(lambda: endpoint.service.stats.streams_opened > 1)


async def test_the_agent_is_there_before_the_kubelet_ever_was(folder: Path) -> None:
    root = folder / "k"
    async with _life(_endpoint(root)) as endpoint:
        await eventually(lambda: "does not exist; is the kubelet running" in (endpoint.blocker or ""))
        assert not root.exists()
        kubelet = _kubelet(root)
        async with kubelet.running():
            await eventually(lambda: _listed(kubelet))


async def test_the_folder_vanishes_and_comes_back(folder: Path) -> None:
    kubelet = _kubelet(folder, Timings(registry_poll=0.2, first_status=0.1))
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        await anyio.sleep(0.05)
        await kubelet.stop()
        await anyio.to_thread.run_sync(lambda: endpoint.path.parent.rename(folder / "old"))
        await eventually(lambda: "does not exist" in (endpoint.blocker or ""))
        await kubelet.start()
        await eventually(lambda: _listed(kubelet))


async def test_a_refused_registration_is_told_and_tried_again_ever_more_slowly(folder: Path) -> None:
    kubelet = _kubelet(folder)
    endpoint = _endpoint(folder, resource="kubernetes.io/gpu")
    async with kubelet.running(), _life(endpoint):
        await eventually(
            lambda: 'the ResourceName "kubernetes.io/gpu" is invalid' in (endpoint.blocker or "")
        )
        assert (endpoint.blocker or "").startswith("kubernetes.io/gpu is not registered with the kubelet: ")
        await anyio.sleep(1.0)
        assert not endpoint.registered
        assert endpoint.service.infos_given.value < 30


async def test_the_socket_of_a_dead_agent_is_replaced(folder: Path) -> None:
    (folder / "plugins_registry").mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "plugins_registry/gna-nvidia-gpu.sock"))
    stale.close()
    kubelet = _kubelet(folder)
    async with kubelet.running():
        await anyio.sleep(0.1)  # the kubelet dials it in vain
        async with _life(_endpoint(folder)):
            await eventually(lambda: _listed(kubelet))


async def test_a_kubelet_that_drops_our_stream_and_lives_is_made_to_find_us_again(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        stats = endpoint.service.stats
        for _ in range(3):
            await eventually(lambda: endpoint.registered and _listed(kubelet))
            opened = stats.streams_opened
            assert kubelet._life is not None
            kubelet._life._plugins.disconnect(GPU)
            await eventually(lambda: stats.streams_opened > opened)  # noqa: B023
        await eventually(lambda: _listed(kubelet))


async def test_short_gaps_between_streams_do_not_touch_the_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that listens again soon enough finds the same socket."""
    monkeypatch.setattr(endpoint_module, "SILENCE_SECONDS", 60.0)  # a busy machine's gaps are short beside it
    monkeypatch.setattr(endpoint_module, "ASKED_SECONDS", 60.0)
    (folder / "plugins_registry").mkdir()
    async with _life(_endpoint(folder)) as endpoint:
        await eventually(endpoint.path.exists)
        before = endpoint.path.stat().st_ino
        for opened in range(1, 11):
            async with Peer(endpoint.path) as kubelet:
                kubelet.listen()
                await eventually(lambda: endpoint.service.stats.streams_opened == opened)  # noqa: B023
            await eventually(lambda: not endpoint.registered)
        assert endpoint.path.stat().st_ino == before


async def test_a_restart_by_the_supervisor_serves_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet = _kubelet(folder)
    endpoint = _endpoint(folder)

    async def fail(_: object) -> None:
        raise RuntimeError("a fault of the agent")

    async with kubelet.running():
        with monkeypatch.context() as patched:
            patched.setattr(endpoint, "_while_registered", fail)
            with pytest.raises(RuntimeError):
                await endpoint.run()
        assert _ours(folder) == set()
        await eventually(lambda: _listed(kubelet, 0))
        async with _life(endpoint):
            await eventually(lambda: _listed(kubelet))
            await anyio.sleep(0.1)
            assert endpoint.registered  # streams do not end at once, as in a drain


@pytest.mark.parametrize("answering", [True, False])
async def test_cancellation_at_any_moment_leaves_no_socket_and_no_task(folder: Path, answering: bool) -> None:
    kubelet = _kubelet(folder, Timings(registry_poll=0.005, first_status=0.1))
    async with kubelet.running():
        if not answering:
            await kubelet.stop()
        for turns in (*range(0, 40, 2), *range(40, 120, 8)):
            endpoint = _endpoint(folder)
            async with anyio.create_task_group() as group:
                group.start_soon(endpoint.run)
                for _ in range(turns):
                    await anyio.sleep(0 if turns < 40 else 0.0005)
                group.cancel_scope.cancel()
            assert _ours(folder) == set()
            assert endpoint.service.streams.value == 0
        await kubelet.stop()
        await eventually(lambda: running_tasks() <= 3)


async def test_registered_anew_on_request(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), _life(_endpoint(folder)) as endpoint:
        await eventually(lambda: _listed(kubelet))
        infos = endpoint.service.infos_given.value
        endpoint.register_again()
        await eventually(lambda: endpoint.service.infos_given.value > infos and endpoint.registered)
        await eventually(lambda: _listed(kubelet))
        assert _ours(folder) == {f"plugins_registry/{endpoint.path.name}"}
