"""Fixtures of the tests on a GPU."""

import os
from collections.abc import Iterator

import pytest

from tests.gpu.rig import Rig, make, remove

# It switches a setting of the GPU, and needs more packages than the kit brings.
collect_ignore = [] if os.environ.get("MIG") == "yes" else ["test_mig.py"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The first GPU."""
    made = make()
    yield made
    remove(made)
