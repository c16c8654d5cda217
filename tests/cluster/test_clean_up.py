"""A cluster leaves nothing behind, however it ends. Named so as to run before the session's cluster is up."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import host
from tests.cluster.build import Parts
from tests.cluster.manifests import container, pod
from tests.cluster.processes import PROC, alive, children, identify
from tests.cluster.rig import REPOSITORY, Cluster
from tests.cluster.waiting import NotYet, eventually

OTHERS = ("gna-test-", "gpu-node-agent")
"""Names of cgroups that other tests of this project make, perhaps at this very moment."""


def traces() -> dict[str, set[Any]]:
    """Everything on this machine that a cluster might change, as sets by subject.

    Other tests may run on the machine at the same time: what they are known to make is left out.
    """
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = {path.name for root in host.hierarchies() for path in root.iterdir() if path.is_dir()}
    found: dict[str, set[Any]] = {
        "mounts": {line.split(" ", 4)[4] for line in lines if tempfile.gettempdir() not in line},
        "cgroups": {name for name in groups if not name.startswith(OTHERS)},
        "links": set(socket.if_nameindex()),
        "routes": set(Path("/proc/net/route").read_text().splitlines()),
    }
    if not host.records():  # what clusters share is undone with the last one
        settings = {name: Path("/proc/sys") / name for name in host.SYSCTLS}
        found["settings"] = {(name, path.read_text()) for name, path in settings.items() if path.exists()}
        found["mount points"] = {point for point in host.MOUNT_POINTS if Path(point).exists()}
    return found


def processes_naming(text: str) -> list[str]:
    """Command lines and environments are where a left process would name its cluster's folder."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()) and identify(int(entry.name)):
            spoken = b""
            # Some processes of the machine show their environment to nobody.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                spoken = (entry / "cmdline").read_bytes()
                spoken += (entry / "environ").read_bytes()
            if text.encode() in spoken:
                found.append(spoken.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def assert_no_trace(record: host.Record, before: dict[str, set[Any]]) -> None:
    assert not record.folder.exists()
    assert not any(alive(process) for process in record.processes)
    assert processes_naming(str(record.folder)) == []
    assert not [root for root in host.hierarchies() if (root / record.cgroup).exists()]
    after = traces()
    for subject in before.keys() & after.keys():
        assert not after[subject] - before[subject], subject


@contextmanager
def cluster_of_another_process() -> Iterator[tuple[subprocess.Popen[str], host.Record]]:
    """A cluster owned by a process of its own, up and ready."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", "up"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        for line in owner.stdout:
            if line.startswith("Ctrl-C"):
                break
        else:
            pytest.fail(f"the cluster of another process did not start (exit code {owner.wait()})")
        yield owner, next(record for record in host.records() if record.owner.pid == owner.pid)
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def reaper_of(owner: int) -> int:
    return next(pid for pid in children(owner) if b"reaper" in (PROC / str(pid) / "cmdline").read_bytes())


def test_cluster_leaves_nothing_behind(parts: Parts) -> None:
    before = traces()
    volume = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    mount = {"volumeMounts": [{"name": "memory", "mountPath": "/memory"}]}
    with Cluster(parts) as cluster:
        cluster.apply(pod("left", container("main") | mount, volumes=[volume]))
        cluster.wait_pod("left")
        # The pod is left running: its processes, cgroups and mounts have to go with the cluster.
        record = next(record for record in host.records() if record.name == cluster.name)
        assert [root for root in host.hierarchies() if (root / cluster.cgroup).exists()]
        assert processes_naming(str(record.folder)) != []
    assert_no_trace(record, before)


def test_killed_owner_is_cleaned_up_after(parts: Parts) -> None:
    before = traces()
    with cluster_of_another_process() as (owner, record):
        reaper = identify(reaper_of(owner.pid))
        assert reaper
        owner.kill()

        def ended() -> None:
            if alive(reaper):
                raise NotYet("the reaper is at work")

        eventually(ended, timeout=20, what="clean-up by the reaper")
    assert_no_trace(record, before)


def test_next_start_sweeps_what_no_reaper_could(parts: Parts) -> None:
    before = traces()
    # Locked, or else the start of a cluster of another test might sweep it first.
    with cluster_of_another_process() as (owner, record), host.locked():
        os.kill(reaper_of(owner.pid), signal.SIGKILL)
        owner.kill()
        owner.wait()
        assert all(alive(process) for process in record.processes)
        assert record.name in host.sweep_locked()
    assert_no_trace(record, before)


def test_interrupted_start_leaves_nothing_behind(parts: Parts) -> None:
    before = traces()
    owner = subprocess.Popen([sys.executable, "-m", "tests.cluster", "up"], cwd=REPOSITORY)

    def half_up() -> host.Record:
        for record in host.records():
            if record.owner.pid == owner.pid and (record.folder / "log" / "api.log").exists():
                return record
        raise NotYet("no API server yet")

    try:
        record = eventually(half_up, timeout=30, what="cluster half up")
        owner.send_signal(signal.SIGINT)
        owner.wait(30)
        assert_no_trace(record, before)
    finally:
        owner.kill()
        owner.wait()
