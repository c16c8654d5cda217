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
from tests.cluster.waiting import NotYet, RigError, eventually


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


def install_kinds(cluster: Cluster, *paths: Path) -> None:
    """Apply CustomResourceDefinitions, and wait until their kinds are served."""
    names = [cluster.apply(each)["metadata"]["name"] for each in documents(*paths)]

    def served() -> None:
        for name in names:
            found = cluster.get("CustomResourceDefinition", name, api_version="apiextensions.k8s.io/v1")
            conditions = found.get("status", {}).get("conditions") or []
            if {"Established": "True"} not in [{each["type"]: each["status"]} for each in conditions]:
                raise NotYet(name)
            (group, version) = found["spec"]["group"], found["status"]["storedVersions"][0]
            kinds = cluster.api.get(f"/apis/{group}/{version}")["resources"]
            if found["spec"]["names"]["kind"] not in {each["kind"] for each in kinds}:
                raise NotYet(f"{name} is not listed")

    eventually(served, timeout=60, what="the kinds are served", interval=0.3)


def documents(*paths: Path) -> Iterator[dict[str, Any]]:
    """Objects of YAML files, or of all files in folders."""
    for path in paths:
        for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path]:
            yield from (each for each in yaml.safe_load_all(file.read_text()) if each)
