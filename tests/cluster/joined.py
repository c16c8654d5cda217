"""A further node of a running cluster: a kubelet and a runtime of its own in a namespace of its own."""

import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import host, node
from tests.cluster.api import ApiClient
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace, Program
from tests.cluster.objects import Objects
from tests.cluster.pki import Authority
from tests.cluster.rig import Cluster, free_ports
from tests.cluster.waiting import NotYet, RigError, eventually


class Joined(Objects):
    """What `Cluster` is for its own node; as a context manager. It ends with the cluster at the latest."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        """`node` is its name; below the cluster's folder, so keep it short."""
        self._cluster = cluster
        self.node = node
        self.layout = Layout(cluster.layout.root / node)
        self.namespace = Namespace(cluster.parts.program("pause"))
        self._programs: dict[str, Program] = {}

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _up(self) -> None:
        cluster, layout = self._cluster, self.layout
        layout.make(self.node)
        # The API server finds the kubelet by this name, for logs; the file is mounted, so no new one.
        with cluster.layout.hosts.open("a") as hosts:
            hosts.write(f"127.0.0.1 {self.node}\n")
        self.namespace.start()
        cluster.adopt(self.namespace.init.pid)
        for source, target in layout.binds().items():
            self.namespace.bind(source, target)
        cgroup = f"{cluster.cgroup}/{self.node}"
        host.make_cgroup(cgroup)
        shutil.copytree(cluster.layout.certificates, layout.certificates)
        node.make_certificates(Authority(layout.certificates), self.node, cluster.server)
        node.install_cni(layout, cluster.options)
        env = {"PATH": cluster.parts.search_path, "HOME": str(layout.root), "LANG": "C.UTF-8"}
        (port,) = free_ports(1)
        self._programs = node.programs(
            cluster.parts, self.namespace, layout, self.node, cgroup, port, cluster.options, env
        )
        self.start("containerd")
        ctr = [str(cluster.parts.program("ctr")), "--address", str(layout.containerd_socket)]

        def answers() -> None:
            try:
                self.namespace.run([*ctr, "version"])
            except RigError as error:
                raise NotYet(f"{error}; {self.log_tail('containerd')}") from error

        eventually(answers, timeout=30, what=f"containerd of {self.node} answers", interval=0.1)
        for archive in cluster.parts.images:
            self.namespace.run([*ctr, "--namespace", "k8s.io", "images", "import", str(archive)], timeout=120)
        self.start("kubelet")
        self.wait_node_ready(timeout=60)
        eventually(self._schedulable, timeout=60, what=f"pods can be sent to {self.node}")

    def _schedulable(self) -> None:
        if taints := self.get("Node", self.node)["spec"].get("taints"):
            raise NotYet(f"node has taints {taints}")

    def down(self) -> None:
        """End all that runs here, and have the cluster forget the node; its cgroups go with the cluster's."""
        self.namespace.stop()
        for program in self._programs.values():
            program.stop()
        shutil.rmtree(self.layout.root, ignore_errors=True)
        self.delete("Node", self.node)

    # Single programs

    def start(self, name: str) -> None:
        """Start one of this node's programs, or of the cluster's."""
        self._program(name).start()

    def stop(self, name: str) -> None:
        """Stop one and wait until it is gone; pods run on."""
        self._program(name).stop()

    def restart_kubelet(self, down_seconds: float = 0) -> None:
        """As the cluster's, of this node."""
        self.stop("kubelet")
        time.sleep(down_seconds)
        self.start("kubelet")

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last lines of one program's log."""
        return self._program(name).log_tail(lines)

    def adopt(self, pid: int) -> None:
        """Have a process end with the cluster at the latest."""
        self._cluster.adopt(pid)

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            raise RigError(f"{name} is no program of {self.node}: ask the cluster")
        return self._programs[name]

    # Where things are

    @property
    def kubelet_root(self) -> Path:
        """What the kubelet calls /var/lib/kubelet."""
        return self.layout.kubelet

    @property
    def podresources_socket(self) -> Path:
        return self.kubelet_root / "pod-resources" / "kubelet.sock"

    @property
    def cdi_dir(self) -> Path:
        """The container runtime reads CDI specifications here."""
        return self.layout.cdi

    @property
    def kubeconfig(self) -> Path:
        """For an administrator."""
        return self._cluster.kubeconfig

    @property
    def api(self) -> ApiClient:
        return self._cluster.api

    def kubectl(self, *arguments: str, timeout: float = 30, stdin: str | None = None) -> str:
        """As the cluster's."""
        return self._cluster.kubectl(*arguments, timeout=timeout, stdin=stdin)


AnyNode = Cluster | Joined
"""A node of a cluster: its own one, which the cluster itself stands for, or one that joined."""
