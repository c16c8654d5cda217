"""Fixtures of the tests on a GPU."""

from collections.abc import Iterator

import pytest

from tests.gpu.rig import Rig, make, remove


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The first GPU."""
    made = make()
    yield made
    remove(made)
