"""Which way containers get their GPUs, and what they get by each."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.node import NodeInfo
from agent.injection.inject import Injector, choose, toolkit_devices
from agent.injection.toolkit import Devices
from agent.kit.tasks import Cell
from agent.kubelet.wire import Allocation, DeviceNode, Mount
from agent.model.gpu import Gpu
from agent.settings import DriverFiles, HostSettings, Injection, Settings, Simulator

NEW = NodeInfo("v1.36.3", "containerd://2.4.2")
NAMED = frozenset({"GPU-a", "0", "all"})


def _gpu(number: int) -> Gpu:
    return Gpu(f"GPU-{number}", number, number + 4, f"0000:{number:02x}:00.0", "NVIDIA H200", 2**37, (9, 0))


def _auto() -> Settings:
    return Settings(injection=Injection(strategy="auto"))


@pytest.mark.parametrize(
    ("kubelet", "runtime", "cdi"),
    [
        ("v1.36.3", "containerd://2.4.2", True),
        ("v1.29.0", "containerd://2.0.0-rc.1", True),
        ("v1.28.15", "containerd://2.4.2", False),
        ("v1.36.3", "containerd://1.7.27-k3s1", False),
        ("v1.33.1-eks-595af52", "containerd://2.1.4+unknown", True),
        ("v1.33.1+k3s1", "cri-o://1.33.0", True),
        ("v1.33.1", "cri-o://1.22.9", False),
        ("v1.33.1", "docker://27.0.1", False),
        ("v1.33.1", "", False),
        ("", "containerd://2.4.2", False),
        ("garbage", "containerd://x.y", False),
    ],
)
def test_auto_takes_cdi_only_where_kubelet_and_runtime_do_it(kubelet: str, runtime: str, cdi: bool) -> None:
    choice = choose(_auto(), NodeInfo(kubelet, runtime), NAMED)
    assert choice.cdi is cdi
    assert choice.reason


@pytest.mark.parametrize(
    ("software", "names", "reason"),
    [
        (NEW, frozenset[str](), "no CDI specification of kind nvidia.com/gpu was found"),
        (NEW, frozenset({"0", "1", "all"}), "--device-name-strategy=uuid"),
        (None, NAMED, "versions of kubelet and container runtime are not known"),
    ],
)
def test_auto_says_what_is_missing(software: NodeInfo | None, names: frozenset[str], reason: str) -> None:
    choice = choose(_auto(), software, names)
    assert not choice.cdi
    assert reason in choice.reason


def test_what_is_configured_is_not_questioned() -> None:
    for strategy, cdi in (("cdi", True), ("envvar", False)):
        settings = Settings(injection=Injection(strategy=strategy))  # type: ignore[arg-type]
        assert choose(settings, None, frozenset()).cdi is cdi


def test_specifications_of_the_toolkit_are_found(tmp_path: Path, logs: Any) -> None:
    first, second = tmp_path / "etc", tmp_path / "run"
    first.mkdir()
    second.mkdir()
    (first / "nvidia.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: GPU-a\n- name: 0\n"
    )
    (second / "nvidia.json").write_text(
        json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-b"}]})
    )
    (second / "mig.yml").write_text("kind: nvidia.com/mig\ndevices: [{name: m}]")
    (second / "notes.txt").write_text("kind: nvidia.com/gpu\ndevices: [{name: no}]")
    assert toolkit_devices([first, second, tmp_path / "missing"]) == {"GPU-a", "0", "GPU-b"}
    assert logs == []


GARBAGE = {
    "empty.json": b"",
    "list.json": b"[1, 2]",
    "text.yaml": b"just a word",
    "binary.yaml": bytes(range(256)),
    "utf16.json": '{"kind": "nvidia.com/gpu"}'.encode("utf-16"),
    "cut.json": b'{"kind": "nvidia.com/gpu", "devices": [',
    "no-devices.json": b'{"kind": "nvidia.com/gpu"}',
    "null-devices.json": b'{"kind": "nvidia.com/gpu", "devices": null}',
    "odd-devices.json": b'{"kind": "nvidia.com/gpu", "devices": ["a", 7]}',
    "nameless.json": b'{"kind": "nvidia.com/gpu", "devices": [{}]}',
    "date.yaml": b"kind: 2001-99-99",
    "deep.json": b"[" * 5_000,
    "object.yaml": b"!!python/object/apply:os.system ['false']",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bad_files_are_told_and_harm_no_other(tmp_path: Path, name: str, logs: Any) -> None:
    (tmp_path / name).write_bytes(GARBAGE[name])
    (tmp_path / "good.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-a"}]}')
    assert toolkit_devices([tmp_path]) == {"GPU-a"}
    assert [(one["event"], one["file"]) for one in logs] == [
        ("cdi_specification_unreadable", str(tmp_path / name))
    ]
    assert "\n" not in logs[0]["problem"]


def test_pipes_folders_and_dead_links_are_passed_by(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dead.json").symlink_to("nowhere")
    assert toolkit_devices([tmp_path, tmp_path / "pipe.json"]) == frozenset()


def test_the_environment_variable_names_gpus_in_the_order_given() -> None:
    injector = Injector(Settings(injection=Injection(strategy="envvar")))
    assert injector.allocation([_gpu(2), _gpu(0)]) == Allocation(
        environment={"NVIDIA_VISIBLE_DEVICES": "GPU-2,GPU-0"}
    )


def test_cdi_names_gpus_and_sets_nothing_else() -> None:
    injector = Injector(Settings(injection=Injection(strategy="cdi")))
    assert injector.allocation([_gpu(2), _gpu(0)]) == Allocation(
        cdi_devices=("nvidia.com/gpu=GPU-2", "nvidia.com/gpu=GPU-0")
    )


def test_device_nodes_follow_the_minor_number(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-uvm-tools").touch()
    settings = Settings(
        injection=Injection(strategy="envvar", device_nodes=True), driver=DriverFiles(dev_root=str(tmp_path))
    )
    nodes = Injector(settings).allocation([_gpu(1)]).device_nodes
    names = ("nvidia5", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    assert nodes == tuple(DeviceNode(f"/dev/{name}", f"{tmp_path}/dev/{name}") for name in names)


def test_looking_again_follows_the_node(tmp_path: Path, logs: Any) -> None:
    settings = Settings(injection=Injection(strategy="auto"), host=HostSettings(cdi=str(tmp_path)))
    injector = Injector(settings)
    chosen = []
    for software in (None, NEW, NEW):
        injector.look(software)
        chosen.append(injector.choice.cdi)
        named = '{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}]}'
        (tmp_path / "nvidia.json").write_text(named)
    assert chosen == [False, True, True]
    assert injector.software == NEW
    told = [one["cdi"] for one in logs if one["event"] == "injection_chosen"]
    assert told in ([True], [False, True])  # each change once


def _with_own(settings: Settings, *names: str) -> Injector:
    injector = Injector(settings, Cell(Devices(frozenset(names))))
    injector.look(NEW)
    return injector


def test_own_devices_come_with_the_variable_for_runtimes_that_ignore_cdi(tmp_path: Path) -> None:
    injector = _with_own(Settings(host=HostSettings(cdi=str(tmp_path))), "GPU-0", "GPU-2")
    assert injector.choice.cdi
    assert "gpu-node-agent.io/gpu" in injector.choice.reason
    assert injector.allocation([_gpu(2), _gpu(0)]) == Allocation(
        environment={"NVIDIA_VISIBLE_DEVICES": "GPU-2,GPU-0"},
        cdi_devices=("gpu-node-agent.io/gpu=GPU-2", "gpu-node-agent.io/gpu=GPU-0"),
    )


def test_kinds_are_not_mixed_where_our_own_lacks_a_gpu() -> None:
    injector = _with_own(Settings(injection=Injection(strategy="cdi")), "GPU-0")
    assert injector.allocation([_gpu(0), _gpu(1)]).cdi_devices == (
        "nvidia.com/gpu=GPU-0",
        "nvidia.com/gpu=GPU-1",
    )


def test_own_devices_are_of_no_use_to_software_without_cdi() -> None:
    choice = choose(
        _auto(), NodeInfo("v1.28.1", "containerd://2.4.2"), frozenset(), Devices(frozenset({"GPU-0"}))
    )
    assert not choice.cdi
    assert "kubelet v1.28.1" in choice.reason


def test_simulated_gpus_are_named_to_no_runtime() -> None:
    for strategy in ("auto", "cdi"):
        injection = Injection(strategy=strategy)
        settings = Settings(injection=injection, simulator=Simulator(profile="dgx-h200"))
        assert not choose(settings, NEW, NAMED, Devices(frozenset({"GPU-0"}))).cdi


def test_why_our_own_are_missing_is_told() -> None:
    choice = choose(_auto(), NEW, frozenset(), Devices(problem="no libcuda"))
    assert "no libcuda" in choice.reason


def test_mounts_for_runtimes_that_read_no_variable() -> None:
    injection = Injection(strategy="envvar", volume_mounts=True, driver_mount="/home/kubernetes/bin/nvidia")
    assert Injector(Settings(injection=injection)).allocation([_gpu(1)]).mounts == (
        Mount("/var/run/nvidia-container-devices/GPU-1", "/dev/null"),
        Mount("/usr/local/nvidia", "/home/kubernetes/bin/nvidia"),
    )
    with_cdi = Injection(strategy="cdi", volume_mounts=True, driver_mount="/home/kubernetes/bin/nvidia")
    assert not _with_own(Settings(injection=with_cdi), "GPU-1").allocation([_gpu(1)]).mounts
