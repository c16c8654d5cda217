"""Cleaning one node: only what is the agent's goes, and a running agent or a holder stands in the way."""

import json
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from agent.cleanup import this_node
from agent.cleanup.request import CleanupFailed
from agent.cleanup.this_node import forget_node
from agent.cli.main import main
from agent.cluster.api import KubeApi
from agent.kit.files import exclusive
from agent.mps import leaving
from agent.node.capacity import EFFECT, TAINT
from agent.nvml.port import NvmlPort
from agent.settings import Settings, load


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Folders of a node below a folder of the test's."""
    for name in ("kubelet/plugins_registry", "kubelet/device-plugins", "run/mps", "state", "cdi"):
        (tmp_path / name).mkdir(parents=True)
    return load(
        None,
        {},
        [
            f"kubelet.root={tmp_path}/kubelet",
            f"host.run={tmp_path}/run",
            f"host.state={tmp_path}/state",
            f"host.cdi={tmp_path}/cdi",
            "cluster.access=off",
            "modes.mps=false",  # the folder's path is too long for the sockets of a daemon
        ],
    )


def cleaned(settings: Settings, users: AbstractSet[str] = frozenset()) -> bool:
    """Whether all was removed. No daemon is there, so that NVML is not asked."""
    anyio.run(this_node.leave_modes, settings, cast("NvmlPort", None))
    return this_node.remove_files(settings, users)


def test_only_our_files_go(settings: Settings, tmp_path: Path) -> None:
    ours = (
        "kubelet/plugins_registry/gna-nvidia.com-gpu.sock",
        "run/agent.sock",
        "run/mps/GPU-1/log/control.log",
        "state/verdicts.json",
        "state/bin/nvidia-cdi-hook",
        "cdi/gpu-node-agent.json",
        "cdi/gpu-node-agent-gpus.json",
    )
    foreign = (
        "kubelet/plugins_registry/csi.sock",
        "kubelet/device-plugins/kubelet.sock",
        "kubelet/device-plugins/kubelet_internal_checkpoint",
        "cdi/nvidia.yaml",
    )
    for name in (*ours, *foreign):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    cleaned(settings)
    assert [name for name in ours if (tmp_path / name).exists()] == []
    assert [name for name in foreign if not (tmp_path / name).exists()] == []
    assert list((tmp_path / "run").iterdir()) == []
    cleaned(settings)


def test_nothing_is_left_of_a_killed_agent_and_of_daemons_in_a_driver_root(
    settings: Settings, tmp_path: Path
) -> None:
    """Drafts in the shared CDI folder, and the folders on which daemons had theirs; the driver's own stay."""
    driver = tmp_path / "driver"
    points = driver / (tmp_path / "run").relative_to("/")
    (points / "mps" / "GPU-1").mkdir(parents=True)
    (driver / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "cdi" / ".gpu-node-agent-x1").touch()
    (tmp_path / "cdi" / ".other").touch()
    there = msgspec.structs.replace(
        settings, driver=msgspec.structs.replace(settings.driver, root=str(driver))
    )
    leaving.remove_files(there)
    assert this_node.remove_files(there)
    assert [each.name for each in (tmp_path / "cdi").iterdir()] == [".other"]
    assert not points.exists()
    assert (driver / "usr" / "lib").is_dir()


def test_files_of_others_in_a_driver_root_stay(settings: Settings, tmp_path: Path) -> None:
    points = tmp_path / "driver" / (tmp_path / "run").relative_to("/")
    (points / "mps").mkdir(parents=True)
    (points / "somebody").touch()
    there = msgspec.structs.replace(
        settings, driver=msgspec.structs.replace(settings.driver, root=str(tmp_path / "driver"))
    )
    leaving.remove_files(there)
    assert this_node.remove_files(there)
    assert [each.name for each in points.iterdir()] == ["somebody"]


def test_what_running_containers_name_stays(settings: Settings, tmp_path: Path, logs: Any) -> None:
    named = ("state/bin/nvidia-cdi-hook", "cdi/gpu-node-agent-gpus.json")
    for name in (*named, "state/verdicts.json", "cdi/gpu-node-agent.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert not cleaned(settings, {"team/training"})
    assert all((tmp_path / name).exists() for name in named)
    assert not (tmp_path / "state/verdicts.json").exists()
    assert not (tmp_path / "cdi/gpu-node-agent.json").exists()
    assert [(each["event"], each["pods"]) for each in logs] == [("gpu_specification_kept", "team/training")]
    assert cleaned(settings)
    assert not any((tmp_path / name).exists() for name in named)


def test_what_vgpu_containers_have_mounted_stays(settings: Settings, tmp_path: Path) -> None:
    """Without the file a runtime makes a folder of its name, which no container takes for a limit file."""
    mounted = ("state/lib/libgna-limits-0.so", "run/limits/GPU-1-0/limits")
    for name in mounted:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert not cleaned(settings, {"team/training"})
    assert all((tmp_path / name).exists() for name in mounted)
    assert cleaned(settings)
    assert not any((tmp_path / name).exists() for name in mounted)


def test_holders_without_our_specification_keep_nothing(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "state/bin").mkdir()
    assert cleaned(settings, {"team/training"})
    assert not (tmp_path / "state/bin").exists()


def test_what_pods_have_left_is_removed_and_nothing_behind_it(settings: Settings, tmp_path: Path) -> None:
    """Links lead out of the folder, and it is deeper than a path may be long or Python may recurse."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    pipe = tmp_path / "run" / "mps" / "GPU-1" / "pipe"
    pipe.mkdir(parents=True)
    (pipe / "link").symlink_to(precious)
    (tmp_path / "state" / "link").symlink_to(precious)
    descriptor = os.open(pipe, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d" * 100, dir_fd=descriptor)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    this_node.remove_files(settings)
    assert list((tmp_path / "run").iterdir()) == list((tmp_path / "state").iterdir()) == []
    assert (precious / "file").exists()


def test_a_running_agent_stands_in_the_way(settings: Settings) -> None:
    async def enter() -> None:
        async with this_node.without_agent(settings, 0.0):
            pass

    with (
        exclusive(Path(settings.host.run) / this_node.LOCK),
        pytest.raises(CleanupFailed, match="stop it first"),
    ):
        anyio.run(enter)
    anyio.run(enter)


async def test_unknown_holders_stand_in_the_way(settings: Settings) -> None:
    with pytest.raises(CleanupFailed, match="who holds MPS shares is not known"):
        await this_node.refuse_holders(settings, None)


def test_command_says_why(tmp_path: Path, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        f"--set=kubelet.root={tmp_path}/kubelet",
        f"--set=host.run={tmp_path}/run",
        "--set=cluster.access=off",
        "--set=modes.mps=false",
    ]
    assert main(["cleanup", "node", *flags]) == 1
    assert "who holds MPS shares is not known" in capsys.readouterr().err


def test_a_cluster_that_is_required_and_out_of_reach_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--set=host.run={tmp_path}/run", "--set=cluster.access=required", "--set=modes.mps=false"]
    assert main(["cleanup", "node", *flags, "--set=cluster.kubeconfig=/nonexistent"]) == 1
    assert "cluster.access is required, but kubeconfig /nonexistent" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class _Node(KubeApi):
    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(None, None)
        self.labels = dict(labels)
        self.taints: list[dict[str, str]] = []
        self.patches: list[tuple[str, Any]] = []
        self.taint_patches: list[list[tuple[object, object]]] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0) -> bytes:
        annotations = {"gpu-node-agent.io/state": "{}", "example.com/mine": "1"}
        metadata = {"name": "n", "uid": "u", "labels": self.labels, "annotations": annotations}
        return json.dumps({"items": [{"metadata": metadata, "spec": {"taints": self.taints}}]}).encode()

    async def merge_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
        self.patches.append((path, body))
        return b"{}"

    async def json_patch(
        self, path: str, operations: Sequence[Mapping[str, object]], deadline: float = 5.0
    ) -> bytes:
        self.taint_patches.append([(each["op"], each["value"]) for each in operations])
        return b"{}"

    async def strategic_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
        self.patches.append((path, body))
        return b"{}"


LABELS = {
    "gpu-node-agent.io/mode": "mps",
    "cuda-major-version": "12",
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.deploy.driver": "true",
    "nvidia-device-enable": "mps",
    "kubernetes.io/os": "linux",
}


async def test_labels_of_others_stay() -> None:
    api = _Node(LABELS)
    await forget_node(api, "n")
    (path, metadata), (status_path, status) = api.patches
    assert path == "/api/v1/nodes/n"
    assert set(metadata["metadata"]["labels"]) == {
        "gpu-node-agent.io/mode",
        "cuda-major-version",
        "nvidia.com/gpu.product",
    }
    assert set(metadata["metadata"]["labels"].values()) == {None}
    assert metadata["metadata"]["annotations"] == {"gpu-node-agent.io/state": None}
    assert status_path == "/api/v1/nodes/n/status"
    assert status == {"status": {"conditions": [{"type": "GPUModeReady", "$patch": "delete"}]}}


async def test_what_is_to_be_kept_is_kept() -> None:
    api = _Node({})
    await forget_node(api, "n", keep=["gpu-node-agent.io/state"])
    assert [path for path, _ in api.patches] == ["/api/v1/nodes/n/status"]


async def test_labels_of_gpu_feature_discovery_stay() -> None:
    api = _Node({**LABELS, "nvidia.com/gfd.timestamp": "1"})
    await forget_node(api, "n")
    assert "nvidia.com/gpu.product" not in api.patches[0][1]["metadata"]["labels"]


async def test_our_taint_goes_and_those_of_others_stay() -> None:
    api = _Node(LABELS)
    api.taints = [{"key": "a", "effect": "NoSchedule"}, {"key": TAINT, "effect": EFFECT}]
    await forget_node(api, "n")
    assert api.taint_patches == [[("test", api.taints), ("add", api.taints[:1])]]
