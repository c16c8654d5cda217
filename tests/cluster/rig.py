"""A whole cluster on this machine: one node, everything real, nothing left behind.

    with Cluster(build_parts()) as cluster:
        cluster.apply(pod)
        cluster.wait_pod("demo", "Running")

All calls block; a test on an event loop wraps them in a thread.
"""

import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import control_plane, host, network, node
from tests.cluster.api import ApiClient, ApiError
from tests.cluster.build import Parts
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace
from tests.cluster.options import Options
from tests.cluster.pki import Authority
from tests.cluster.processes import Identity, alive, identify, resident_mib
from tests.cluster.rig_node import RigNode
from tests.cluster.waiting import NotYet, RigError, eventually

NODE = "node1"
REPOSITORY = Path(__file__).parents[2]
PORTS = range(20_000, 32_000)
PORTS_OF_A_WORKER = 2_000


class Cluster(RigNode):
    """One Kubernetes cluster with one node; `up()` and `down()` once each, or use it as a context manager."""

    def __init__(self, parts: Parts, options: Options | None = None) -> None:
        self._record = host.Record(secrets.token_hex(2), host.boot_id(), _this_process())
        options = options or Options()
        namespace = Namespace(parts.program("pause"), options.private_network)
        super().__init__(NODE, parts, Layout(self._record.folder), namespace)
        self.options = options
        self.timings: dict[str, float] = {}
        """Seconds from the start until each stage was reached."""
        self._recording = threading.Lock()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._api: ApiClient | None = None
        self._ports: control_plane.Ports | None = None

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Life of the cluster

    def up(self) -> None:
        """Start everything; returns when a pod can be scheduled. Nothing is left when it fails."""
        if os.geteuid() != 0:
            raise RigError("the test cluster needs namespaces, mounts and cgroups: run it as root")
        started = time.monotonic()

        def reached(stage: str) -> None:
            self.timings[stage] = time.monotonic() - started

        try:
            host.claim(self._record)
            self._start(reached)
        except BaseException:
            self.save_logs(logs_folder())
            self.down()
            raise

    def _start(self, reached: Callable[[str], None]) -> None:
        self._start_reaper()
        self._lay_out()
        api, etcd_client, etcd_peer, kubelet = free_ports(4)
        if self.options.private_network:
            api = 443  # as pods get it; without kube-proxy nothing translates addresses
            for command in network.commands(control_plane.SERVICE_ADDRESS):
                self.namespace.run(command)
        ports = control_plane.Ports(api, etcd_client, etcd_peer)
        self._prepare(ports, kubelet)
        reached("prepared")
        for name in ("etcd", "containerd", "api"):
            self.start(name)
        self._import_images(self.parts.images)
        reached("images imported")
        self._ports = ports
        self._api = self.client()
        eventually(self._api_ready, timeout=60, what="API server ready")
        reached("API server ready")
        for name in ("kcm", "sched", "kubelet"):
            self.start(name)
        self.wait_node_ready(timeout=60)
        reached("node ready")
        eventually(self._schedulable, timeout=60, what="first pod can be scheduled")
        reached("schedulable")

    def _prepare(self, ports: control_plane.Ports, kubelet_port: int) -> None:
        authority = Authority(self.layout.certificates)
        authority.create()
        control_plane.make_certificates(authority, ports.server)
        node.make_certificates(authority, self.node, ports.server)
        node.install_cni(self.layout, self.options)
        env = {"PATH": self.parts.search_path, "HOME": str(self.layout.root), "LANG": "C.UTF-8"}
        self._programs = control_plane.programs(
            self.parts, self.namespace, self.layout, ports, self.options, env
        ) | node.programs(
            self.parts,
            self.namespace,
            self.layout,
            self.node,
            self._record.cgroup,
            kubelet_port,
            self.options,
            env,
        )

    def _start_reaper(self) -> None:
        argv = [sys.executable, "-m", "tests.cluster.reaper", self._record.name]
        self._reaper = subprocess.Popen(
            argv, stdin=subprocess.PIPE, cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL
        )

    def down(self) -> None:
        """Stop everything and remove every trace; harmless when called again."""
        if self._api is not None:
            self._api.close()
        try:
            self._end_programs()
        finally:
            if self.layout.root.exists():
                host.release(self._record)
            if self._reaper is not None:
                assert self._reaper.stdin is not None
                self._reaper.stdin.close()
                self._reaper.wait(10)
                self._reaper = None

    def adopt(self, pid: int) -> None:
        """See RigNode."""
        if not (identity := identify(pid)):
            return
        with self._recording:  # agents of several nodes start side by side
            living = tuple(process for process in self._record.processes if alive(process))
            self._record = replace(self._record, processes=(*living, identity))
            self._record.write()

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of every running program, in MiB."""
        return {
            name: resident_mib(program.pid) for name, program in self._programs.items() if program.running
        }

    # How it is reached

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def cgroup(self) -> str:
        """Name of the cluster's cgroup in every hierarchy."""
        return self._record.cgroup

    @property
    def kubeconfig(self) -> Path:
        """For an administrator."""
        return self.layout.certificates / "admin.kubeconfig"

    @property
    def api(self) -> ApiClient:
        if self._api is None:
            raise RigError("the cluster is not up")
        return self._api

    @property
    def server(self) -> str:
        """The API server's URL."""
        if self._ports is None:
            raise RigError("the cluster is not up")
        return self._ports.server

    def client(self, token: str = "") -> ApiClient:
        """A client of the API server: of the administrator, or of the owner of a token."""
        if self._ports is None:
            raise RigError("the cluster is not up")
        private = self.options.private_network
        how = network.dial_inside(self.namespace.init.pid) if private else network.dial
        return ApiClient(self._ports.api, self.layout.certificates, how=how, token=token)

    def kubectl(self, *arguments: str, timeout: float = 30, stdin: str | None = None) -> str:
        """Run kubectl as administrator; return its standard output. Raises RigError when it fails."""
        fixed = [f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.layout.root}/kubectl-cache"]
        done = subprocess.run(
            self.reaching_api([str(self.parts.program("kubectl")), *fixed, *arguments]),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RigError(
                f"kubectl {' '.join(arguments)}: exit code {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def reaching_api(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that reaches the API server, with the files of this machine."""
        if not self.options.private_network:
            return list(argv)
        return ["nsenter", f"--target={self.namespace.init.pid}", "--net", "--", *argv]

    # Stages of the start

    def _api_ready(self) -> None:
        for name in ("etcd", "api"):
            if not self._programs[name].running:
                raise RigError(f"{name} ended; end of its log:\n{self.log_tail(name)}")
        try:
            self.api.request("GET", "/readyz", timeout=5)
        except (OSError, ApiError) as error:
            raise NotYet(str(error)) from error

    def _schedulable(self) -> None:
        self._untainted()
        if self.find("ServiceAccount", "default") is None:
            raise NotYet("no default service account")


def _this_process() -> Identity:
    identity = identify(os.getpid())
    assert identity is not None
    return identity


def worker() -> str:
    """Name of this worker of pytest-xdist (`gw0`, `gw1`, ...); empty where there is but one process."""
    return os.environ.get("PYTEST_XDIST_WORKER", "")


def logs_folder() -> Path:
    """Where programs' logs of failed runs are kept."""
    return REPOSITORY / "build" / "cluster-logs" / worker()


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on, below the range from which the kernel gives out ports by itself.

    Workers draw from ranges of their own: between a draw and its use another might draw the same.
    """
    first = PORTS.start + int(worker().removeprefix("gw") or 0) * PORTS_OF_A_WORKER % len(PORTS)
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(first, first + PORTS_OF_A_WORKER)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found
