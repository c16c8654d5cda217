"""A further node of a running cluster: a kubelet and a runtime of its own in a namespace of its own."""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import host, node
from tests.cluster.api import ApiClient
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace
from tests.cluster.pki import Authority
from tests.cluster.rig import Cluster, free_ports
from tests.cluster.rig_node import RigNode
from tests.cluster.waiting import eventually


class Joined(RigNode):
    """A further node; a context manager. It ends with the cluster at the latest."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        """`node` is its name; below the cluster's folder, so keep it short."""
        namespace = Namespace(cluster.parts.program("pause"))
        super().__init__(node, cluster.parts, Layout(cluster.layout.root / node), namespace)
        self._cluster = cluster

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
        self._lay_out()
        # The API server finds the kubelet by this name, for logs; the file is mounted, so no new one.
        with cluster.layout.hosts.open("a") as hosts:
            hosts.write(f"127.0.0.1 {self.node}\n")
        cgroup = f"{cluster.cgroup}/{self.node}"
        host.make_cgroup(cgroup)
        shutil.copytree(cluster.layout.certificates, layout.certificates)
        node.make_certificates(Authority(layout.certificates), self.node, cluster.server)
        node.install_cni(layout, cluster.options)
        env = {"PATH": self.parts.search_path, "HOME": str(layout.root), "LANG": "C.UTF-8"}
        (port,) = free_ports(1)
        self._programs = node.programs(
            self.parts, self.namespace, layout, self.node, cgroup, port, cluster.options, env
        )
        self.start("containerd")
        self._import_images(self.parts.images)
        self.start("kubelet")
        self.wait_node_ready(timeout=60)
        eventually(self._untainted, timeout=60, what=f"pods can be sent to {self.node}")

    def down(self) -> None:
        """End all that runs here, and have the cluster forget the node; its cgroups go with the cluster's."""
        self._end_programs()
        shutil.rmtree(self.layout.root, ignore_errors=True)
        self.delete("Node", self.node)

    def adopt(self, pid: int) -> None:
        """See RigNode."""
        self._cluster.adopt(pid)

    # What is the cluster's

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
