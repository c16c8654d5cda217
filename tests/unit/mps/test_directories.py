"""Paths of a daemon's folders."""

from pathlib import Path

import pytest

from agent.mps.directories import Directories
from agent.mps.errors import BadFolder
from tests.component.mps.keeping import UUID


def test_path_that_sockets_cannot_have_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"host\.run"):
        Directories.of(tmp_path / ("x" * 60), UUID)
