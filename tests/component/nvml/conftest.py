"""The C library, built once and cached; a machine in a file; both faces of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.nvml.binding import NvmlBinding
from agent.nvml.port import NvmlError, NvmlPort
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.nvml_double.build import STATE_VARIABLE, build


@pytest.fixture(scope="session")
def nvml_library() -> Path:
    """The simulated libnvidia-ml.so.1."""
    return build()


@dataclass
class Faces:
    """One machine, seen by the real binding over the C library, and by the Python face."""

    machine: SimulatedMachine
    real: NvmlBinding
    python: SimulatedNvml

    def agree(self, method: str, *args: object) -> object:
        """The answer of both to a method of the port, or the error; fails when they differ."""
        real, python = outcome(self.real, method, *args), outcome(self.python, method, *args)
        assert real == python
        return real

    @property
    def uuids(self) -> list[str]:
        """UUIDs of all GPUs that the machine ever had, hidden ones included."""
        count = len(self.machine.profile.places)
        return [self.machine.uuid(slot) for slot in range(count)]


def outcome(nvml: NvmlPort, method: str, *args: object) -> object:
    """A method's answer, or what kind of error it ended with."""
    try:
        return getattr(nvml, method)(*args)
    except NvmlError as error:
        return (type(error), error.code, error.call)


@pytest.fixture
def faces(
    request: pytest.FixtureRequest, nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Faces]:
    """Both faces of a DGX H200, or of the profile that the test is parametrised with; open."""
    path = tmp_path / "machine"
    machine = SimulatedMachine.create(getattr(request, "param", "dgx-h200"), path)
    monkeypatch.setenv(STATE_VARIABLE, str(path))
    sysfs = machine.write_sysfs(tmp_path / "sys")
    faces = Faces(machine, NvmlBinding(nvml_library, sysfs=sysfs), SimulatedNvml(machine))
    faces.agree("open")
    yield faces
    machine.clear_faults()
    faces.real.close()
