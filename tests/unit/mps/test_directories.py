"""Paths of a daemon's folders."""

from pathlib import Path

import pytest

from agent.model.cuda import LONGEST_SOCKET
from agent.mps.directories import SOCKETS, Directories
from agent.mps.mps_errors import BadFolder
from tests.component.mps.keeping import UUID


def test_path_that_sockets_cannot_have_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"host\.run"):
        Directories.of(tmp_path / ("x" * 60), UUID)


def test_the_settings_know_the_longest_of_its_sockets() -> None:
    folders = Directories.of(Path("/run"), UUID)
    longest = max(len(str(folders.pipe / name)) for name in SOCKETS)
    assert longest == len("/run") + len(LONGEST_SOCKET)
    assert len(UUID) == len(LONGEST_SOCKET.split("/")[2])
