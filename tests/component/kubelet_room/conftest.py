"""A short folder for sockets."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes, which pytest's folders may exceed."""
    made = Path(tempfile.mkdtemp(prefix="gna-"))
    yield made
    shutil.rmtree(made)
