"""The extender's process beside a cluster, and a kube-scheduler that is told of it."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.build import Parts
from tests.cluster.options import Options
from tests.cluster.rig import REPOSITORY, Cluster
from tests.cluster.waiting import NotYet, eventually

CONFIG = REPOSITORY / "config" / "scheduler"


class Replica:
    """The extender's process; `start` may be called again after its end."""

    def __init__(self, cluster: Cluster, port: int, log: Path) -> None:
        self._cluster = cluster
        self.port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns when it leads and its ledger is complete."""
        flags = {
            "http.address": "127.0.0.1",
            "http.port": self.port,
            "cluster.kubeconfig": self._cluster.kubeconfig,
            "lease.namespace": "default",
            "lease.durationSeconds": 3,
            "lease.renewSeconds": 2,
            "lease.retrySeconds": 0.3,
        }
        argv = [sys.executable, "-m", "agent", "extender"]
        argv += [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=log, env=os.environ)
        self._cluster.adopt(self._process.pid)
        eventually(self._ready, timeout=60, what="the extender serves")

    def _ready(self) -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2).close()
        except (urllib.error.URLError, OSError) as error:
            raise NotYet(f"{error}; {self._log.read_text()[-500:]}") from error

    def end(self, how: signal.Signals) -> None:
        """Send a signal and wait."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


@contextmanager
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler was started with the shipped configuration, but for the address."""
    (entry,) = yaml.safe_load((CONFIG / "extender.yaml").read_text())["extenders"]
    plain = {key: value for key, value in entry.items() if key not in ("tlsConfig", "enableHTTPS")}
    plain["urlPrefix"] = f"http://127.0.0.1:{port}/scheduler"
    running = Cluster(parts, Options(scheduler_config={"extenders": [plain], "podMaxBackoffSeconds": 2}))
    running.up()
    try:
        yield running
    finally:
        running.down()
