"""An embedded kubelet in a folder with a short path."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.simulator.kubelet import EmbeddedKubelet, Timings
from tests.pace import scaled

FAST = Timings(
    registry_poll=0.02,
    registry_retry=0.05,
    first_status=0.5,
    container_retry=0.05,
    first_pods=0.0,
    scheduling=0.0,
    watch=0.0,
)


@pytest.fixture
def root() -> Iterator[Path]:
    """A kubelet root; unix socket paths have at most 107 bytes, which pytest's folders may exceed."""
    folder = Path(tempfile.mkdtemp(prefix="gna-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def kubelet(root: Path) -> EmbeddedKubelet:
    """Not running yet: `async with kubelet.running()`."""
    return EmbeddedKubelet(root, status_tick=0.02, timings=replace(FAST, get_info=scaled(1.0)))
