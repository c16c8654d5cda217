"""A container's environment, and faults that keep it from starting."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, Call, Plugin
from tests.component.kubelet.steps import EIGHT, OTHER, ready, run
from tests.component.kubelet.waiting import eventually

CDI = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
    "devices": [
        {
            "name": name,
            "containerEdits": {
                "deviceNodes": [{"path": f"/dev/{name}", "hostPath": f"/host/{name}"}],
                "mounts": [{"containerPath": "/lib/cuda", "hostPath": "/host/lib"}],
            },
        }
        for name in EIGHT
    ],
}


async def test_environment_devices_and_mounts_arrive(kubelet: EmbeddedKubelet, root: Path) -> None:
    def answer(_: Call) -> dict[str, Any]:
        return {
            "envs": {"MINE": "plugin", "SHARED": "plugin"},
            "devices": [{"container_path": "/dev/x", "host_path": "/dev/x0", "permissions": "rw"}],
            "mounts": [{"container_path": "/m", "host_path": "/h", "read_only": True}],
            "annotations": {"a": "b"},
        }

    spec = PodSpec("p", (ContainerSpec("main", {GPU: 1}, {"SHARED": "pod", "OWN": "pod"}),))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, answer=answer).serving():
            await ready(kubelet)
            await run(kubelet, spec)
            view = kubelet.container(spec, "main")
            assert view.env == {"MINE": "plugin", "SHARED": "pod", "OWN": "pod"}
            assert view.device_nodes == {"/dev/x": "/dev/x0"}
            assert view.mounts == {"/m": "/h"}
            assert view.annotations == {"a": "b"}


async def test_cdi_edits_win_over_the_pod(kubelet: EmbeddedKubelet, root: Path) -> None:
    def answer(call: Call) -> dict[str, Any]:
        return {"cdi_devices": [{"name": f"nvidia.com/gpu={one}"} for one in call.ids]}

    (root / "cdi").mkdir()
    (root / "cdi/nvidia.json").write_text(json.dumps(CDI))
    spec = PodSpec("p", (ContainerSpec("main", {GPU: 2}, {"NVIDIA_VISIBLE_DEVICES": "all"}),))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, answer=answer).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, spec)
            ids = plugin.named("Allocate")[0].ids
            view = kubelet.container(spec, "main")
            assert view.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
            assert view.device_nodes == {f"/dev/{one}": f"/host/{one}" for one in ids}
            assert view.mounts == {"/lib/cuda": "/host/lib"}


async def test_unknown_cdi_device_keeps_the_container_from_starting(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    spec = PodSpec("p", (ContainerSpec("main", {GPU: 1}),))
    async with kubelet.running():
        plugin = Plugin(
            root / "plugins_registry/p.sock",
            devices=EIGHT,
            answer=lambda _: {"cdi_devices": [{"name": "nvidia.com/gpu=nobody"}]},
        )
        with plugin.serving():
            await ready(kubelet)
            kubelet.create_pod(spec)
            await eventually(lambda: bool(kubelet.pod(spec).waiting))
            reason, message = (kubelet.pod(spec).waiting or {})["main"]
            assert reason == "CreateContainerError"
            assert "unresolvable CDI devices nvidia.com/gpu=nobody" in message
            assert kubelet.pod(spec).phase is Phase.PENDING


async def test_two_plugins_that_disagree_win_at_random(kubelet: EmbeddedKubelet, root: Path) -> None:
    seen = set()
    async with kubelet.running():
        one = Plugin(
            root / "plugins_registry/1.sock", GPU, EIGHT, answer=lambda _: {"envs": {"WHO": "1", "A": "1"}}
        )
        two = Plugin(
            root / "plugins_registry/2.sock", OTHER, EIGHT, answer=lambda _: {"envs": {"WHO": "2", "B": "2"}}
        )
        with one.serving(), two.serving():
            await ready(kubelet)
            await ready(kubelet, resource=OTHER)
            for turn in range(8):
                spec = PodSpec(f"p{turn}", (ContainerSpec("main", {GPU: 1, OTHER: 1}),))
                await run(kubelet, spec)
                env = kubelet.container(spec, "main").env
                assert (env["A"], env["B"]) == ("1", "2")
                seen.add(env["WHO"])
    assert seen == {"1", "2"}


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ("all", {"/dev/nvidia0", "/dev/nvidia1"}),
        ("GPU-b", {"/dev/nvidia1"}),
        ("0,1", {"/dev/nvidia0", "/dev/nvidia1"}),
        ("void", set()),
        ("none", set()),
    ],
)
async def test_nvidia_runtime_obeys_the_variable(root: Path, value: str, nodes: set[str]) -> None:
    names = {"GPU-a": "/dev/nvidia0", "GPU-b": "/dev/nvidia1"}
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=FAST, nvidia_nodes=names)
    spec = PodSpec("p", (ContainerSpec("main", env={"NVIDIA_VISIBLE_DEVICES": value}),))
    async with kubelet.running():
        await run(kubelet, spec)
        common = {"/dev/nvidiactl", "/dev/nvidia-uvm"} if nodes else set()
        assert set(kubelet.container(spec, "main").device_nodes) == nodes | common


async def test_pre_start_is_asked_at_every_container_start(kubelet: EmbeddedKubelet, root: Path) -> None:
    spec = PodSpec("p", (ContainerSpec("one", {GPU: 2}), ContainerSpec("two", {GPU: 1})))
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, pre_start=lambda _: None)
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, spec)
            calls = plugin.named("PreStartContainer")
            assert [len(call.ids) for call in calls] == [2, 1]
            assert [set(call.ids) for call in calls] == [set(c.ids) for c in plugin.named("Allocate")]
            assert all(call.remaining is not None and 20 < call.remaining <= 30 for call in calls)


async def test_pre_start_error_is_shown_and_retried_and_holds_up_nobody_else(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    healed = threading.Event()

    def check(_: Call) -> None:
        if not healed.is_set():
            raise RuntimeError("daemon is not ready")

    spec, plain = PodSpec("p", (ContainerSpec("main", {GPU: 1}),)), PodSpec("q", (ContainerSpec("main"),))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, pre_start=check).serving() as plugin:
            await ready(kubelet)
            kubelet.create_pod(spec)
            await eventually(lambda: len(plugin.named("PreStartContainer")) >= 2)
            reason, message = (kubelet.pod(spec).waiting or {})["main"]
            assert reason == "CreateContainerConfigError"
            assert "daemon is not ready" in message
            await run(kubelet, plain)
            healed.set()
            await eventually(lambda: kubelet.pod(spec).phase is Phase.RUNNING)
            assert kubelet.pod(spec).waiting is None
