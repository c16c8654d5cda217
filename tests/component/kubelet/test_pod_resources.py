"""The PodResources socket, called by a C-core client."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import grpc
import pytest

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec, podresources_server
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, Plugin, PodResources, pod_resources
from tests.component.kubelet.steps import EIGHT, held, pod, ready, run

T = TypeVar("T")


async def ask(kubelet: EmbeddedKubelet, question: Callable[[PodResources], T]) -> T:
    def call() -> T:
        with pod_resources(kubelet.pod_resources_socket) as lister:
            return question(lister)

    return await anyio.to_thread.run_sync(call)


async def test_one_entry_per_device(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        numa = {device: [0] if device < "e" else [1] for device in EIGHT}
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, numa=numa).serving():
            await ready(kubelet)
            await run(kubelet, pod("p", 8))
            answer = await ask(kubelet, lambda lister: lister.get("p"))
            (container,) = answer.containers
            assert [len(entry.device_ids) for entry in container.devices] == [1] * 8
            nodes = {entry.device_ids[0]: [n.ID for n in entry.topology.nodes] for entry in container.devices}
            assert nodes == numa


async def test_devices_without_numa_have_no_topology(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("p"))
            answer = await ask(kubelet, lambda lister: lister.get("p"))
            assert not answer.containers[0].devices[0].HasField("topology")


async def test_get_of_an_unknown_pod(kubelet: EmbeddedKubelet) -> None:
    async with kubelet.running():
        with pytest.raises(grpc.RpcError) as refusal:
            await ask(kubelet, lambda lister: lister.get("nobody"))
        assert refusal.value.code() is grpc.StatusCode.UNKNOWN
        assert refusal.value.details() == "pod nobody in namespace default not found"


async def test_allocatable_are_all_healthy_devices_free_or_not(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={**EIGHT, "h": False}).serving():
            await ready(kubelet, 7)
            await run(kubelet, pod("p", 5))
            found = await ask(kubelet, lambda lister: lister.allocatable())
            assert found == [(GPU, device) for device in "abcdefg"]


@pytest.mark.parametrize(("face", "listed"), [("1.36", False), ("1.33", True)])
async def test_finished_pods(root: Path, face: str, listed: bool) -> None:
    kubelet = EmbeddedKubelet(root, pod_resources_face=face, status_tick=0.02, timings=FAST)  # type: ignore[arg-type]
    done = PodSpec("done", (ContainerSpec("main", {GPU: 8}, exits=True),))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, done, Phase.SUCCEEDED)
            await run(kubelet, pod("next", 8))
            table = await ask(kubelet, lambda lister: lister.held())
            assert (("done", "main") in table) is listed
            assert not table.get(("done", "main"))  # listed or not, its end has freed its devices
            assert {one for _, one in table["next", "main"]} == held(kubelet, pod("next")) == set(EIGHT)


async def test_calls_above_the_rate_are_refused(
    kubelet: EmbeddedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hammer(lister: PodResources) -> list[grpc.StatusCode]:
        codes = []
        for _ in range(60):
            try:
                lister.held()
            except grpc.RpcError as error:
                codes.append(error.code())
        return codes

    async with kubelet.running():
        with monkeypatch.context() as slow:  # a busy machine asks for no more than 100 a second
            slow.setattr(podresources_server, "RATE", 0.001)
            codes = await ask(kubelet, hammer)
        assert len(codes) == 60 - podresources_server.BURST
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await anyio.sleep(0.1)
        await ask(kubelet, lambda lister: lister.held())  # tokens come back


async def test_the_socket_is_gone_while_the_kubelet_is_down(kubelet: EmbeddedKubelet) -> None:
    async with kubelet.running():
        await kubelet.stop()
        with pytest.raises(grpc.RpcError) as refusal:
            await ask(kubelet, lambda lister: lister.held())
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        await kubelet.start()
        assert await ask(kubelet, lambda lister: lister.held()) == {}
