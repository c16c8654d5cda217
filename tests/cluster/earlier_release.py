"""The agent of an earlier release, from this repository's own history."""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.cluster.rig import REPOSITORY

COMMIT_0_1_0 = "1d3645155279eaf06e1359ae573c2adcb39aabe5"
"""0.1.0 was never tagged: this is the last commit whose CHANGELOG the section 0.1.0 repeats."""
FETCH_SECONDS = 60


def agent_of(commit: str, folder: Path) -> Path:
    """Put the package `agent` of a commit into `folder`, which is then a checkout to run it in.

    Fails the test in words where neither this clone nor the one that it was made from has the commit.
    """
    archive = _archive(commit)
    if archive is None:  # a shallow clone: its origin may have what it lacks
        _git("fetch", "--quiet", "--depth=1", "origin", commit)
        archive = _archive(commit)
    if archive is None:
        pytest.fail(
            f"the history of {REPOSITORY} has no commit {commit}, whose agent this test starts with: "
            "run it in a clone with its whole history (git fetch --unshallow)",
            pytrace=False,
        )
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def _archive(commit: str) -> bytes | None:
    """The package as a tar archive; None: git cannot make one."""
    return _git("archive", "--format=tar", commit, "agent")


def _git(*arguments: str) -> bytes | None:
    # The tests run as root, perhaps on somebody else's clone: git needs leave to read it.
    done = subprocess.run(
        ["git", "-c", f"safe.directory={REPOSITORY}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=FETCH_SECONDS,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None
