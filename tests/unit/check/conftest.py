"""The files of a node, below a folder that stands for its root."""

from pathlib import Path

import pytest

CONTAINERD = """
version = 3
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "{runtime}"
"""


def written(root: Path, files: dict[str, str]) -> Path:
    """`files` below `root`, by their paths on the node."""
    for name, text in files.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a good node; /var/run is a link, as on most."""
    files = {
        "/etc/containerd/config.toml": CONTAINERD.format(runtime="nvidia"),
        "/var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\ntopologyManagerPolicy: best-effort\n",
        "/run/cdi/.keep": "",
        "/var/lib/kubelet/pod-resources/kubelet.sock": "",
        "/var/lib/kubelet/plugins_registry/.keep": "",
        "/var/lib/kubelet/device-plugins/.keep": "",
        "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "/usr/bin/nvidia-cuda-mps-control": "#!/bin/sh\n",
    }
    written(tmp_path, files)
    (tmp_path / "var/run").symlink_to("/run")
    (tmp_path / "usr/bin/nvidia-cuda-mps-control").chmod(0o755)
    return tmp_path
