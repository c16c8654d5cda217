"""Fixtures for tests against the real control daemon. The MPS server needs a GPU: a stand-in plays it."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.mps import processes, shared_memory
from agent.mps.binary import Program
from tests.mps_binaries import SUITES, control_program

# It does what a server does for its daemon as long as no client comes: it lives.
STAND_IN_SERVER = "#!/bin/sh\ntrap 'exit 0' TERM\nwhile :; do sleep 0.1; done\n"


@pytest.fixture(scope="session", params=sorted(SUITES))
def program(request: pytest.FixtureRequest) -> Program:
    """The real program of each driver generation. No package, no test: this fails, it never skips."""
    return Program(control_program(request.param))


@pytest.fixture(scope="session")
def newest() -> Program:
    """The newest real program, for what is the same in all."""
    return Program(control_program(max(SUITES)))


@pytest.fixture(scope="session")
def oldest() -> Program:
    """The oldest real program, which says nothing of its server's state."""
    return Program(control_program(min(SUITES)))


@pytest.fixture(autouse=True)
def seen_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run where mounts do not reach process 1, as in a container: a tmpfs is tried all the same."""
    monkeypatch.setattr(shared_memory, "_seen_by_host", lambda _: True)


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A run folder with a short path. What a test left there is ended and unmounted, and fails the test."""
    folder = Path(tempfile.mkdtemp(prefix="gm-", dir="/tmp"))
    yield folder
    left: list[object] = []
    for pipe in folder.glob("mps/*/pipe"):
        for process in (*processes.daemons(pipe), *processes.servers(pipe)):
            left.append(process)
            process.send(signal.SIGKILL)
    for mount in (*folder.glob("mps/*/shm"), *folder.glob("mps/*/log")):
        if mount.is_mount():
            left.append(mount)
            shared_memory.unmount(mount)
    shutil.rmtree(folder)
    assert not left, "the test left these behind"


@pytest.fixture
def stand_in_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-cuda-mps-server on the PATH of daemons that are started from now on."""
    path = tmp_path / "stand-in" / "nvidia-cuda-mps-server"
    path.parent.mkdir()
    path.write_text(STAND_IN_SERVER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path
