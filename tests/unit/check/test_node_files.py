"""Facts about runtimes, toolkits and kubelets from files as nodes have them."""

from pathlib import Path

import pytest

from agent.check.host import HostFiles, Runtimes, host_of, runtimes, toolkit_version
from agent.check.kubelet import topology_manager
from agent.kit.files import inside
from agent.settings import load
from tests.unit.check.conftest import CONTAINERD, written

POLICY = "kind: KubeletConfiguration\ntopologyManagerPolicy: {0}\n"


def found(root: Path, files: dict[str, str]) -> tuple[str, str]:
    read = runtimes(HostFiles(written(root, files)))
    assert read is not None
    return read.file, read.default


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("/etc/docker/daemon.json", '{"default-runtime": "nvidia"}', "nvidia"),
        ("/etc/docker/daemon.json", "{}", "runc"),
        ("/etc/crio/crio.conf.d/99.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n', "nvidia"),
        ("/etc/containerd/config.toml", "version = 2\n", "runc"),
    ],
)
def test_default_runtimes(tmp_path: Path, file: str, text: str, name: str) -> None:
    assert found(tmp_path, {file: text}) == (file, name)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 10_000])
def test_files_that_are_none_are_not_known(tmp_path: Path, text: str) -> None:
    names = ("/etc/docker/daemon.json", "/etc/containerd/config.toml", "/var/lib/kubelet/config.yaml")
    host = HostFiles(written(tmp_path, dict.fromkeys(names, text)))
    for version, file in (("docker://28.1", names[0]), ("containerd://2.4.2", names[1]), ("", names[1])):
        read = runtimes(host, version)
        assert read is not None
        assert read.unread == (file,)
    assert topology_manager(host) is None


K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("version", "file"),
    [
        ("containerd://2.4.2", "/etc/containerd/config.toml"),
        ("containerd://2.0.5-k3s1", K3S),
        ("docker://28.1", "/etc/docker/daemon.json"),
        ("cri-o://1.33.0", "/etc/crio/crio.conf.d/00-default"),
    ],
)
def test_of_several_runtimes_the_kubelet_s_own_counts(tmp_path: Path, version: str, file: str) -> None:
    process(tmp_path, 70, "/usr/bin/containerd")  # Docker's beside that of k3s
    files = {
        "/etc/containerd/config.toml": CONTAINERD.format(runtime="runc"),
        K3S: CONTAINERD.format(runtime="runc"),
        "/etc/docker/daemon.json": "{}",
        "/etc/crio/crio.conf.d/00-default": "[crio.runtime]\n",
    }
    host = HostFiles(written(tmp_path, files))
    read = runtimes(host, version)
    assert read is not None
    assert (read.file, read.default) == (file, "runc")
    (tmp_path / file.lstrip("/")).unlink()
    assert runtimes(host, version) is None or version.startswith("containerd://2.4")


def test_cri_o_s_files_without_a_suffix_are_read(tmp_path: Path) -> None:
    folder = "/etc/crio/crio.conf.d"
    files = {
        f"{folder}/00-default": '[crio.runtime]\ncdi_spec_dirs = ["/a"]\n',
        f"{folder}/99-nvidia.conf": '[crio.runtime]\ndefault_runtime = "nvidia"\n',
    }
    read = runtimes(HostFiles(written(tmp_path, files)))
    assert read == Runtimes(f"{folder}/99-nvidia.conf", "nvidia", cdi_folders=("/a",))


@pytest.mark.parametrize("pattern", ["/etc/containerd/conf.d/*.toml", "conf.d/*.toml"])
def test_a_file_that_containerd_imports_has_the_last_word(tmp_path: Path, pattern: str) -> None:
    files = {
        "/etc/containerd/config.toml": f'imports = ["{pattern}"]\n' + CONTAINERD.format(runtime="runc"),
        "/etc/containerd/conf.d/99-nvidia.toml": CONTAINERD.format(runtime="nvidia"),
    }
    assert found(tmp_path, files) == ("/etc/containerd/conf.d/99-nvidia.toml", "nvidia")


def test_later_files_of_cri_o_go_over_earlier_ones(tmp_path: Path) -> None:
    files = {
        "/etc/crio/crio.conf": '[crio.runtime]\ndefault_runtime = "runc"\n',
        "/etc/crio/crio.conf.d/10-crio.conf": '[crio.runtime]\ndefault_runtime = "crun"\n',
        "/etc/crio/crio.conf.d/99-nvidia.conf": '[crio.runtime]\ndefault_runtime = "nvidia"\n',
    }
    assert found(tmp_path, files) == ("/etc/crio/crio.conf.d/99-nvidia.conf", "nvidia")


def test_the_switch_and_the_folders_of_cdi_are_read(tmp_path: Path) -> None:
    text = '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\ncdi_spec_dirs = ["/a", "/b"]\n'
    read = runtimes(HostFiles(written(tmp_path, {"/etc/containerd/config.toml": text})))
    assert read == Runtimes("/etc/containerd/config.toml", "runc", cdi=True, cdi_folders=("/a", "/b"))


def process(root: Path, pid: int, *words: str, parent: int = 1) -> None:
    files = {
        f"/proc/{pid}/cmdline": "\0".join(words) + "\0",
        f"/proc/{pid}/stat": f"{pid} (a) b) S {parent} 1",
    }
    written(root, files)


@pytest.mark.parametrize(
    "words", [("--config=/opt/c.toml",), ("-c", "/opt/c.toml"), ("--config", "/opt/c.toml")]
)
def test_containerd_s_command_line_names_its_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    process(tmp_path, 70, "/usr/bin/containerd", *words)
    files = {
        "/opt/c.toml": CONTAINERD.format(runtime="nvidia"),
        "/etc/containerd/config.toml": CONTAINERD.format(runtime="runc"),
    }
    assert found(tmp_path, files) == ("/opt/c.toml", "nvidia")


def test_the_kubelet_s_command_line_goes_before_its_files(tmp_path: Path) -> None:
    host = HostFiles(written(tmp_path, {"/opt/k.yaml": POLICY.format("restricted")}))
    process(tmp_path, 80, "/usr/bin/kubelet", "--config=/opt/k.yaml", "--config-dir=/opt/d")
    assert topology_manager(host) == ("/opt/k.yaml", "restricted")
    written(
        tmp_path, {"/opt/d/10.conf": "kind: KubeletConfiguration\n", "/opt/d/20.conf": POLICY.format("none")}
    )
    assert topology_manager(host) == ("/opt/d/20.conf", "none")
    process(tmp_path, 80, "kubelet", "--config=/opt/k.yaml", "--topology-manager-policy", "best-effort")
    assert topology_manager(host) == ("the kubelet's command line", "best-effort")
    process(tmp_path, 80, "kubelet")
    assert topology_manager(host) == ("the kubelet's command line", "none")
    process(tmp_path, 80, "kubelet", "--config=/opt/none.yaml")
    assert topology_manager(host) is None


def test_a_container_s_process_is_not_taken_for_the_kubelet(tmp_path: Path) -> None:
    process(tmp_path, 90, "kubelet", "--topology-manager-policy=restricted", parent=4711)
    assert topology_manager(HostFiles(tmp_path)) is None


@pytest.mark.parametrize("folder", ["/var/lib/rancher/k3s/agent/etc/kubelet.conf.d"])
def test_a_kubelet_within_another_program_is_known_by_its_drop_ins(tmp_path: Path, folder: str) -> None:
    host = HostFiles(written(tmp_path, {f"{folder}/00-k3s-defaults.conf": "kind: KubeletConfiguration\n"}))
    assert topology_manager(host) == (folder, "none")
    written(tmp_path, {f"{folder}/50.conf": POLICY.format("best-effort")})
    assert topology_manager(host) == (f"{folder}/50.conf", "best-effort")


def test_a_runtime_that_pods_must_name_is_known(tmp_path: Path) -> None:
    runtime = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]\nruntime_type = "x"\n'
    text = CONTAINERD.format(runtime="runc") + runtime
    read = runtimes(HostFiles(written(tmp_path, {"/etc/containerd/config.toml": text})))
    assert read is not None
    assert read.names == {"nvidia"}


def test_toolkit_tells_its_version(tmp_path: Path) -> None:
    written(tmp_path, {"/opt/nvidia-ctk": "not a program"}).joinpath("opt/nvidia-ctk").chmod(0o755)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/nvidia-ctk").symlink_to("/opt/nvidia-ctk")
    assert toolkit_version(HostFiles(tmp_path)) == ("nvidia-ctk", None)
    assert toolkit_version(HostFiles(tmp_path / "usr")) is None
    # A root of its own without a loader: it is asked from here.
    (tmp_path / "opt/nvidia-ctk").write_text("#!/bin/sh\necho NVIDIA Container Toolkit CLI version 1.20.1\n")
    assert toolkit_version(HostFiles(tmp_path)) == ("nvidia-ctk", (1, 20, 1))
    assert toolkit_version(HostFiles(None)) is None


@pytest.mark.parametrize(
    ("link", "target", "seen"),
    [
        ("var/run", "/run", "run/cdi"),
        ("var/run", "../run", "run/cdi"),
        ("var/run", "../../../../../run", "run/cdi"),  # no link leads out
        ("var/run", "run", "var/run/cdi"),  # not there, and a link to itself is none
    ],
)
def test_links_count_from_the_root(tmp_path: Path, link: str, target: str, seen: str) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / link).symlink_to(target)
    if target == "run":
        with pytest.raises(OSError, match="loop"):
            inside(tmp_path, "/var/run/cdi")
        assert HostFiles(tmp_path).file("/var/run/cdi") is None
    else:
        assert inside(tmp_path, "/var/run/cdi") == tmp_path / seen


def test_where_the_node_s_root_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_of(load(None, {}, []), tmp_path) == HostFiles(tmp_path, named=True)
    assert host_of(load(None, {}, []), None) == HostFiles(Path("/"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert host_of(load(None, {}, []), None) == HostFiles(None)
    mounted = load(None, {}, [f"driver.root={tmp_path}"])
    assert host_of(mounted, None) == HostFiles(None)  # a driver container's
    (tmp_path / "var/lib/kubelet").mkdir(parents=True)
    assert host_of(mounted, None) == HostFiles(tmp_path)
