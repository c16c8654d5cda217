"""The extender's process beside a cluster, and a kube-scheduler that is configured for it."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.build import Parts
from tests.cluster.options import Options
from tests.cluster.pki import Authority
from tests.cluster.rig import REPOSITORY, Cluster, free_ports
from tests.cluster.service import Service
from tests.cluster.waiting import NotYet, eventually

# kube-scheduler's own gangs: beta and off in 1.37.
GANGS = "--feature-gates=GenericWorkload=true"
CONFIG = REPOSITORY / "config" / "scheduler"


class Replica:
    """The extender's process; `start` may be called again after its end."""

    def __init__(
        self, cluster: Cluster, port: int, log: Path, interpreter: Sequence[str] = (sys.executable,)
    ) -> None:
        """`interpreter`: Python and its options."""
        self._cluster = cluster
        self._interpreter = tuple(interpreter)
        self.port = port  # of HTTPS, where kube-scheduler comes
        self.plain = free_port()  # of probes and metrics
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, lead: bool = True) -> None:
        """Start it; returns when it leads and its ledger is complete, without `lead` when it answers."""
        pki = self._cluster.layout.certificates
        flags = {
            "http.address": "127.0.0.1",
            "http.port": self.plain,
            "http.verbs": "false",
            "tls.port": self.port,
            "tls.certificate": pki / "extender.crt",
            "tls.key": pki / "extender.key",
            "tls.clientAuthority": pki / "ca.crt",
            "cluster.kubeconfig": self._cluster.kubeconfig,
            "lease.namespace": "default",
            "lease.durationSeconds": 3,
            "lease.renewSeconds": 2,
            "lease.retrySeconds": 0.3,
        }
        argv = [*self._interpreter, "-m", "agent", "extender"]
        argv += [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=log, env=os.environ)
        self._cluster.adopt(self._process.pid)
        page, what = ("serving", "the extender serves") if lead else ("healthz", "the extender runs")
        eventually(lambda: self._look(page), timeout=60, what=what)

    def serves(self) -> bool:
        """Whether it is ready now, as its Service would ask."""
        try:
            self._look("serving")
        except NotYet:
            return False
        return True

    def _look(self, page: str) -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.plain}/{page}", timeout=2).close()
        except (urllib.error.URLError, OSError) as error:
            raise NotYet(f"{error}; {self._log.read_text()[-500:]}") from error

    def end(self, how: signal.Signals) -> None:
        """Send a signal and wait."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replicas behind one address."""

    leader: Replica
    follower: Replica


@contextmanager
def pair(cluster: Cluster, port: int, folder: Path) -> Iterator[Pair]:
    """Two replicas, the first of which leads, behind `port`; both are gone afterwards."""
    both = Pair(*(Replica(cluster, free_port(), folder / f"{name}.log") for name in ("leader", "follower")))

    def ready() -> int | None:
        return next((each.port for each in (both.leader, both.follower) if each.serves()), None)

    try:
        both.leader.start()
        both.follower.start(lead=False)
        assert not both.follower.serves()
        with Service(port, ready):
            yield both
    finally:
        for each in (both.leader, both.follower):
            each.end(signal.SIGKILL)


def shipped(name: str) -> list[dict[str, Any]]:
    """The extenders of one of the configurations that we ship for kube-scheduler."""
    found: list[dict[str, Any]] = yaml.safe_load((CONFIG / name).read_text())["extenders"]
    return found


def profiles() -> list[dict[str, Any]]:
    """The profiles of kube-scheduler that we ship."""
    found: list[dict[str, Any]] = yaml.safe_load((CONFIG / "extender.yaml").read_text())["profiles"]
    return found


def free_port() -> int:
    """A port that nothing listens on, and that the kernel gives to no connection meanwhile."""
    return free_ports(1)[0]


@contextmanager
def serving(cluster: Cluster, port: int, log: Path) -> Iterator[Replica]:
    """One extender, serving."""
    made = Replica(cluster, port, log)
    try:
        made.start()
        yield made
    finally:
        made.end(signal.SIGKILL)


@contextmanager
def directed(parts: Parts, port: int, queries_per_second: float = 50) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler has the shipped configuration, but for address and certificates.

    `queries_per_second`: what kube-scheduler allows itself at the API server (its default).
    """
    (entry,) = shipped("extender.yaml")
    running = Cluster(parts)
    pki = running.layout.certificates
    files = {"certFile": "scheduler.crt", "keyFile": "scheduler.key", "caFile": "ca.crt"}
    assert entry["tlsConfig"].keys() == files.keys()
    entry["tlsConfig"] = {key: str(pki / name) for key, name in files.items()}
    entry["urlPrefix"] = f"https://127.0.0.1:{port}/scheduler"
    limits = {"qps": queries_per_second, "burst": round(2 * queries_per_second)}
    config = {
        "extenders": [entry],
        "profiles": profiles(),
        "podMaxBackoffSeconds": 2,
        "clientConnection": {"kubeconfig": f"{pki}/scheduler.kubeconfig", **limits},
    }
    running.options = Options(
        scheduler_config=config,
        scheduler_flags=(GANGS,),
        apiserver_flags=(GANGS, "--runtime-config=scheduling.k8s.io/v1beta1=true"),
    )
    running.up()
    try:
        Authority(pki).sign("extender", "/CN=extender", usage="serverAuth", alternatives="IP:127.0.0.1")
        yield running
    finally:
        running.down()
