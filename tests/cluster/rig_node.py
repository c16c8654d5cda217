"""One node of the rig: a kubelet, a container runtime, and where their things are."""

import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.cluster.build import Parts
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace, Program
from tests.cluster.objects import Objects
from tests.cluster.waiting import NotYet, RigError, eventually


class RigNode(Objects):
    """The common part of the cluster, which stands for its own node, and of nodes that join it."""

    def __init__(self, name: str, parts: Parts, layout: Layout, namespace: Namespace) -> None:
        self.node = name
        self.parts = parts
        self.layout = layout
        self.namespace = namespace
        self._programs: dict[str, Program] = {}

    @property
    @abstractmethod
    def kubeconfig(self) -> Path:
        """For an administrator."""

    @abstractmethod
    def adopt(self, pid: int) -> None:
        """Have a process outside the namespace end with the cluster at the latest, pytest killed or not."""

    # Stages of the start and the end

    def _lay_out(self) -> None:
        """Make the node's folders and its namespace, in which they stand where a node has them."""
        self.layout.make(self.node)
        self.namespace.start()
        self.adopt(self.namespace.init.pid)
        for source, target in self.layout.binds().items():
            self.namespace.bind(source, target)

    def _end_programs(self) -> None:
        # Nothing is gained by stopping in order: process 1 dies and takes every program and pod with it.
        self.namespace.stop()
        for program in self._programs.values():
            program.stop()

    def _import_images(self, archives: Iterable[Path]) -> None:
        def answers() -> None:
            if not self._program("containerd").running:
                raise RigError(f"containerd ended; end of its log:\n{self.log_tail('containerd')}")
            try:
                self.namespace.run([*self._ctr, "version"])
            except RigError as error:
                raise NotYet(str(error)) from error

        eventually(answers, timeout=30, what=f"containerd of {self.node} answers", interval=0.1)
        for archive in archives:
            self.import_image(archive)

    def _untainted(self) -> None:
        if taints := self.get("Node", self.node)["spec"].get("taints"):
            raise NotYet(f"{self.node} has taints {taints}")

    # Single programs

    def start(self, name: str) -> None:
        """Start one of containerd, kubelet; of a cluster also etcd, api, kcm, sched."""
        self._program(name).start()

    def stop(self, name: str) -> None:
        """Stop one program and wait until it is gone; pods run on."""
        self._program(name).stop()

    def restart_kubelet(self, down_seconds: float = 0, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Stop the kubelet, wait, start it; returns when it exists, not when it is ready.

        `meanwhile` is called once it has stopped.
        """
        self.stop("kubelet")
        meanwhile()
        time.sleep(down_seconds)
        self.start("kubelet")

    def pid(self, name: str) -> int:
        """Pid (on the host) of one program."""
        return self._program(name).pid

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last lines of one program's log."""
        return self._program(name).log_tail(lines)

    def save_logs(self, folder: Path) -> None:
        """Copy every program's log into `folder`, where they outlive the cluster."""
        if self.layout.logs.exists():
            shutil.copytree(self.layout.logs, folder, dirs_exist_ok=True)

    def import_image(self, archive: Path) -> None:
        """Give the node an image (OCI archive)."""
        command = [*self._ctr, "--namespace", "k8s.io", "images", "import", str(archive)]
        self.namespace.run(command, timeout=120)

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            raise RigError(f"no program {name} on {self.node}; there are: {', '.join(self._programs)}")
        return self._programs[name]

    @property
    def _ctr(self) -> list[str]:
        return [str(self.parts.program("ctr")), "--address", str(self.layout.containerd_socket)]

    # Where things are, as seen from outside the namespace

    @property
    def kubelet_root(self) -> Path:
        """The path of /var/lib/kubelet for the kubelet."""
        return self.layout.kubelet

    @property
    def podresources_socket(self) -> Path:
        return self.kubelet_root / "pod-resources" / "kubelet.sock"

    @property
    def cdi_dir(self) -> Path:
        """The container runtime reads CDI specifications here, at every container creation."""
        return self.layout.cdi
