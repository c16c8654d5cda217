"""Instances of a real GPU, with MIG=yes alone: its MIG mode is switched, which may reset it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.parting import Parting, part

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def parting() -> Iterator[Parting]:
    with tempfile.TemporaryDirectory(prefix="gm-", dir="/tmp") as folder:
        yield Parting(Path(folder))


async def test_a_layout_changes_around_a_held_instance(parting: Parting) -> None:
    await part(parting)
