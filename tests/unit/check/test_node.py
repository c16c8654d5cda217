"""`check node` on simulated machines with files as real nodes have them."""

import json
import os
from pathlib import Path

import pytest

from agent.check import node_files
from agent.check.node import Grade, Look, look
from agent.cli.main import main
from agent.plugins.inject import NodeSoftware
from agent.settings import Settings, load
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml

GOOD = NodeSoftware("v1.36.3", "containerd://2.4.2")
CONTAINERD = """
version = 3
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "{runtime}"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a good node."""
    files = {
        "etc/containerd/config.toml": CONTAINERD.format(runtime="nvidia"),
        "var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\ntopologyManagerPolicy: best-effort\n",
        "run/cdi/nvidia.json": json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-1"}]}),
        "kubelet/pod-resources/kubelet.sock": "",
        "kubelet/plugins_registry/.keep": "",
        "kubelet/device-plugins/.keep": "",
        "cgroup/cgroup.controllers": "cpu memory",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = tmp_path / "usr/bin/nvidia-cuda-mps-control"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def settings(root: Path, *more: str) -> Settings:
    flags = [
        f"driver.root={root}",
        f"kubelet.root={root}/kubelet",
        f"host.cdi={root}/run/cdi",
        f"host.cgroups={root}/cgroup",
        *more,
    ]
    return load(None, {}, flags)


def looked(
    root: Path, *more: str, software: NodeSoftware | None = GOOD, profile: str = "dgx-h200"
) -> list[Look]:
    nvml = SimulatedNvml(SimulatedMachine.create(profile))
    return list(look(settings(root, *more), nvml, software))


def of(found: list[Look], what: str) -> Look:
    (one,) = [each for each in found if each.what == what]
    return one


def test_a_good_node_has_no_fault(root: Path) -> None:
    found = looked(root)
    assert not [each.told() for each in found if each.grade is Grade.FAILED]
    assert of(found, "Topology Manager").grade is Grade.OK
    assert of(found, "cgroups").text == "version 2"
    assert "8 x NVIDIA H200" in of(found, "GPUs").text
    assert of(found, "CDI").grade is Grade.OK


def test_wrong_default_runtime_is_found(root: Path) -> None:
    (root / "run/cdi/nvidia.json").unlink()
    (root / "etc/containerd/config.toml").write_text(CONTAINERD.format(runtime="runc"))
    found = of(looked(root), "default runtime")
    assert found.grade is Grade.FAILED
    assert "nvidia-ctk runtime configure" in found.text
    assert of(looked(root, "injection.deviceNodes=true"), "default runtime").grade is Grade.OK


def test_old_versions_are_found(root: Path) -> None:
    old = NodeSoftware("v1.24.17", "containerd://1.6.20")
    found = looked(root, software=old)
    assert of(found, "kubelet").grade is Grade.FAILED
    assert "1.25" in of(found, "kubelet").text
    assert of(found, "CDI").grade is Grade.WARNING


def test_what_cannot_be_seen_is_said(tmp_path: Path) -> None:
    found = looked(tmp_path, software=None)
    unknown = {each.what for each in found if each.grade is Grade.UNKNOWN}
    assert unknown == {"toolkit", "default runtime", "kubelet", "cgroups", "Topology Manager"}
    missing = [each for each in found if each.what == "kubelet's folders"]
    assert {each.grade for each in missing} == {Grade.FAILED}
    assert "kubelet.root" in missing[0].text


def test_missing_driver_ends_the_look_at_gpus(root: Path) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    machine.library_missing()
    found = list(look(settings(root), SimulatedNvml(machine), GOOD))
    assert of(found, "driver").grade is Grade.FAILED
    assert not [each for each in found if each.what == "GPUs"]


def test_mps_program_is_missed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "usr/bin/nvidia-cuda-mps-control").unlink()
    monkeypatch.setenv("PATH", str(root))
    assert of(looked(root), "MPS program").grade is Grade.FAILED
    assert not [each for each in looked(root, "modes.mps=false") if "MPS" in each.what]


def test_numa_without_a_policy_is_a_warning(root: Path) -> None:
    (root / "var/lib/kubelet/config.yaml").write_text("kind: KubeletConfiguration\n")
    found = of(looked(root), "Topology Manager")
    assert found.grade is Grade.WARNING
    assert "best-effort" in found.text


def test_a_node_that_cannot_show_the_enforcement_library_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [f"host.state={root}/state/not/made"]
    assert not [each for each in looked(root, "vgpu.enforcement=off") if each.what == "vGPU limits"]
    (found,) = [each for each in looked(root, *limits) if each.what == "vGPU limits"]
    assert found.grade is Grade.OK

    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda _: NoExec())
    (found,) = [each for each in looked(root, *limits) if each.what == "vGPU limits"]
    assert found.grade is Grade.FAILED
    assert "mounted noexec" in found.text


def test_other_agents_are_named(root: Path) -> None:
    (root / "kubelet/device-plugins/vcore.sock").touch()
    found = looked(root, f"kubelet.devicePlugins={root}/kubelet/device-plugins")
    assert "gpu-manager" in of(found, "other agents").text


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("etc/docker/daemon.json", '{"default-runtime": "nvidia"}', "nvidia"),
        ("etc/docker/daemon.json", "{}", "runc"),
        ("etc/crio/crio.conf.d/99.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n', "nvidia"),
        ("etc/containerd/config.toml", "version = 2\n", "runc"),
    ],
)
def test_default_runtimes(tmp_path: Path, file: str, text: str, name: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = node_files.runtimes(tmp_path)
    assert found is not None
    assert (found.file, found.default) == (f"/{file}", name)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("pattern", ["/etc/containerd/conf.d/*.toml", "conf.d/*.toml"])
def test_a_file_that_containerd_imports_has_the_last_word(tmp_path: Path, pattern: str) -> None:
    main_file = f'imports = ["{pattern}"]\n' + CONTAINERD.format(runtime="runc")
    drop_in = CONTAINERD.format(runtime="nvidia")
    files = {"etc/containerd/config.toml": main_file, "etc/containerd/conf.d/99-nvidia.toml": drop_in}
    found = node_files.runtimes(written(tmp_path, files))
    assert found is not None
    assert (found.file, found.default) == ("/etc/containerd/conf.d/99-nvidia.toml", "nvidia")


def test_later_files_of_cri_o_go_over_earlier_ones(tmp_path: Path) -> None:
    files = {
        "etc/crio/crio.conf": '[crio.runtime]\ndefault_runtime = "runc"\n',
        "etc/crio/crio.conf.d/10-crio.conf": '[crio.runtime]\ndefault_runtime = "crun"\n',
        "etc/crio/crio.conf.d/99-nvidia.conf": '[crio.runtime]\ndefault_runtime = "nvidia"\n',
    }
    found = node_files.runtimes(written(tmp_path, files))
    assert found is not None
    assert (found.file, found.default) == ("/etc/crio/crio.conf.d/99-nvidia.conf", "nvidia")


def test_a_runtime_that_pods_must_name_is_a_warning(root: Path) -> None:
    runtime = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]\nruntime_type = "x"\n'
    (root / "run/cdi/nvidia.json").unlink()
    (root / "etc/containerd/config.toml").write_text(CONTAINERD.format(runtime="runc") + runtime)
    found = of(looked(root), "default runtime")
    assert found.grade is Grade.WARNING
    assert "RuntimeClass" in found.text


def test_toolkit_tells_its_version(tmp_path: Path) -> None:
    program = tmp_path / "usr/bin/nvidia-ctk"
    program.parent.mkdir(parents=True)
    program.write_text("not a program")
    program.chmod(0o755)
    assert node_files.toolkit_version(tmp_path) == ("nvidia-ctk", None)
    assert node_files.toolkit_version(tmp_path / "usr") is None


def test_compat_without_a_driver_asks_for_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = f"driver.library={tmp_path}/none.so"
    assert main(["check", "compat", "--runtime", "12.4", "--set", missing]) == 2
    assert "--driver" in capsys.readouterr().err


@pytest.mark.parametrize(("runtime", "code"), [("12.4", 0), ("12.6", 3), ("13.0", 1)])
def test_compat_tells_by_its_exit_code(runtime: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "compat", "--runtime", runtime, "--driver", "550.144.03"]) == code
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith({0: "allowed", 3: "unstable", 1: "blocked"}[code])


@pytest.mark.parametrize(("enforcement", "code"), [("off", 0), ("report", 0), ("library", 1), ("strict", 1)])
def test_compat_holds_vgpu_to_the_baseline_where_a_library_is_loaded(enforcement: str, code: int) -> None:
    asked = ["check", "compat", "--runtime", "12.6", "--driver", "12.8", "--mode", "vgpu"]
    assert main([*asked, f"--set=vgpu.enforcement={enforcement}"]) == code


def test_check_alone_is_still_about_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("defaultMode: pgpu\n")
    assert main(["check", "--config", str(file)]) == 0
    file.write_text("defaultMode: none of these\n")
    assert main(["check", "--config", str(file)]) == 2
