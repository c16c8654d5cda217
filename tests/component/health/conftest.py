"""Both ways to NVML for the tests of health."""

import os
from pathlib import Path

import pytest

from tests.component.health import bench
from tests.nvml_double.build import STATE_VARIABLE, build


@pytest.fixture(params=["python", "library"])
def face(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python face, or our libnvidia-ml.so.1 under the real pynvml."""
    name: str = request.param
    if name == "library":
        monkeypatch.setattr(bench.FACE, "library", build(), raising=False)
        monkeypatch.setattr(bench.FACE, "folder", tmp_path, raising=False)
        monkeypatch.setattr(bench.FACE, "use", _point_at, raising=False)
        monkeypatch.setenv(STATE_VARIABLE, "")
    return name


def _point_at(machine: Path) -> None:
    os.environ[STATE_VARIABLE] = str(machine)
