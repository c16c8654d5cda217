"""A peer's program as a process of the test, with rights of an administrator."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.rig import Cluster
from tests.cluster.waiting import RigError


@contextmanager
def running(
    cluster: Cluster, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run it while the context is open; fails where it ended by itself."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), **(env or {})},
        )
    cluster.adopt(process.pid)
    try:
        yield process
        if process.poll() is not None:
            raise RigError(f"{argv[0]} ended by itself: {log.read_text()[-2000:]}")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def documents(*paths: Path) -> Iterator[dict[str, Any]]:
    """Objects of YAML files, or of all files in folders."""
    for path in paths:
        for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path]:
            yield from (each for each in yaml.safe_load_all(file.read_text()) if each)
