"""The GPU tier's steps with MIG=yes, on the double of NVML; and that the GPU is put back when they fail."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.nvml.port import NvmlCode
from agent.simulator.machine import SimulatedMachine
from tests.component.caps.conftest import CACHE
from tests.gpu import parting as module
from tests.gpu.parting import Parting, part
from tests.nvml_double import build as nvml_double

pytestmark = pytest.mark.timeout(180)


class Double:
    def __init__(self, folder: Path) -> None:
        self.machine = SimulatedMachine.create("dgx-h200", folder / "machine")
        self.machine.write_sysfs(folder / "sys")
        more = {"driver.root": str(folder), "host.sysfs": str(folder / "sys")}
        self.parting = Parting(folder, nvml_double.build(CACHE), more)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    with tempfile.TemporaryDirectory(prefix="gm-", dir="/tmp") as folder:
        monkeypatch.setenv(nvml_double.STATE_VARIABLE, f"{folder}/machine")
        yield Double(Path(folder))


async def test_steps_on_the_double(double: Double) -> None:
    await part(double.parting)
    assert not double.machine.gpu(0).mig_mode


async def test_a_failure_leaves_the_gpu_as_it_was(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 2.0)
    double.machine.set_mig(0, enabled=True)
    double.machine.fail("nvmlGpuInstanceCreateComputeInstance", NvmlCode.UNKNOWN, 0)
    with pytest.RaisesGroup(pytest.RaisesExc(TimeoutError, match="on offer")):
        await part(double.parting)
    assert double.machine.gpu(0).mig_mode
    assert not any(each.used or each.bare for each in double.machine.gpu(0).instances)


@pytest.mark.parametrize(
    ("taken", "says"), [("instance", "has 1 instances"), ("process", "is not free: 4711")]
)
def test_a_gpu_that_somebody_uses_is_left_alone(double: Double, taken: str, says: str) -> None:
    if taken == "instance":
        double.machine.set_mig(0, enabled=True)
        double.machine.make_instance(0, "1g.18gb")
    else:
        double.machine.processes.start(0, 4711)
    with pytest.raises(AssertionError, match=says):
        double.parting.free()
