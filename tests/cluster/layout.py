"""Where a node keeps its files; the paths are the same outside and inside its namespace."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """Folders below a cluster's own. Keep names short: unix sockets (107 bytes) lie below `kubelet`."""

    root: Path

    @property
    def logs(self) -> Path:
        """The folder of all programs' logs."""
        return self.root / "log"

    @property
    def certificates(self) -> Path:
        return self.root / "pki"

    @property
    def kubelet(self) -> Path:
        """Shown as /var/lib/kubelet inside."""
        return self.root / "kubelet"

    @property
    def run(self) -> Path:
        """Shown as /run inside, so that nothing there is shared with the host."""
        return self.root / "run"

    @property
    def cdi(self) -> Path:
        """Shown as /run/cdi inside; the container runtime reads device specifications here."""
        return self.run / "cdi"

    @property
    def cni(self) -> Path:
        return self.root / "cni"

    @property
    def containerd(self) -> Path:
        return self.root / "cd"

    @property
    def containerd_socket(self) -> Path:
        return self.containerd / "containerd.sock"

    @property
    def hosts(self) -> Path:
        """Shown as /etc/hosts inside: the API server finds kubelets by node name."""
        return self.root / "hosts"

    def binds(self) -> dict[Path, Path]:
        """Mounts of the namespace, as own path -> path inside."""
        return {
            self.hosts: Path("/etc/hosts"),
            self.kubelet: Path("/var/lib/kubelet"),
            self.root / "pod-logs": Path("/var/log/pods"),
            self.root / "container-logs": Path("/var/log/containers"),
            self.run: Path("/run"),
        }

    def make(self, node: str) -> None:
        """Make every folder and the hosts file."""
        for folder in (self.logs, self.containerd, self.cdi, *self.binds()):
            if folder != self.hosts:
                folder.mkdir(parents=True, exist_ok=True)
        self.hosts.write_text(f"127.0.0.1 localhost {node}\n::1 localhost\n")
