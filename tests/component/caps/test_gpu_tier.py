"""The GPU tier's tests of the enforcement library, run against the doubles of libcuda and NVML."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agent.model.gpu import Gpu
from agent.nvml.binding import Binding
from agent.simulator.machine import SimulatedMachine
from tests.component.caps.conftest import CACHE
from tests.cuda_double.machine import CudaGpu, CudaMachine
from tests.gpu import limits, test_limits
from tests.gpu.rig import Rig
from tests.nvml_double import build as nvml_double

TESTS = {
    name: test for name, test in vars(test_limits).items() if name.startswith("test_") and callable(test)
}


@pytest.fixture
def rig(tmp_path: Path, driver: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig on a machine that both doubles play."""
    simulated = SimulatedMachine.create("dgx-h200", tmp_path / "machine")
    monkeypatch.setenv(nvml_double.STATE_VARIABLE, str(tmp_path / "machine"))
    gpu = CudaGpu(uuid=simulated.uuids[0])
    machine = CudaMachine.create(tmp_path / "cuda", [gpu])
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    built = tmp_path / "library"
    built.mkdir()
    (built / limits.NAME).symlink_to(library)
    monkeypatch.setenv(limits.VARIABLE, str(built))
    nvml = nvml_double.build(CACHE)
    monkeypatch.setattr(test_limits, "binding", lambda: Binding(nvml))
    folder = tmp_path / "rig"
    folder.mkdir()
    return Rig(Gpu(gpu.uuid, 0, 0, "", gpu.name, gpu.total, (9, 0)), "580", folder, str(driver))


@pytest.mark.parametrize("name", TESTS)
async def test_on_the_double(name: str, rig: Rig) -> None:
    test: Callable[[Rig], Awaitable[None]] = TESTS[name]
    await test(rig)


def test_the_tier_has_tests() -> None:
    assert len(TESTS) == 6
