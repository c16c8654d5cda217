"""The rig of the GPU tier on a machine that the doubles of libcuda and NVML play."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.model.gpu import Gpu
from agent.nvml.binding import NvmlBinding
from agent.simulator.machine import SimulatedMachine
from tests.component.caps.conftest import CACHE
from tests.cuda_double import layout
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.gpu import limits
from tests.gpu.rig import Rig
from tests.nvml_double import build as nvml_double


@dataclass(frozen=True, slots=True)
class Doubles:
    """The substitute for the driver."""

    machine: CudaMachine
    nvml: Path

    def binding(self) -> NvmlBinding:
        """NVML's, not opened yet."""
        return NvmlBinding(self.nvml)


def doubles(
    folder: Path, patch: pytest.MonkeyPatch, library: Path, clock: ClockMode = ClockMode.OFF
) -> Doubles:
    """A machine of one GPU for this process and those that it starts, and the library for its containers."""
    simulated = SimulatedMachine.create("dgx-h200", folder / "machine")
    machine = CudaMachine.create(
        folder / "cuda", [CudaGpu(uuid=simulated.uuids[0], pool_chunk=32 * MIB)], clock=clock
    )
    built = folder / "library"
    built.mkdir()
    (built / limits.NAME).symlink_to(library)
    nvml = nvml_double.build(CACHE)
    known = os.environ.get("LD_LIBRARY_PATH")
    variables: Mapping[str, str] = {
        nvml_double.STATE_VARIABLE: str(folder / "machine"),
        limits.VARIABLE: str(built),
        "LD_LIBRARY_PATH": f"{nvml.parent}:{known}" if known else str(nvml.parent),
        **machine.environment,
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    return Doubles(machine, nvml)


def rig(folder: Path, driver: Path, made: Doubles) -> Rig:
    """In a folder that is there, with a copy of the driver that finds the machine in any environment."""
    copy = folder / "driver"
    copy.mkdir()
    library = shutil.copy(driver, copy)
    (copy / layout.STATE_BESIDE_LIBRARY).symlink_to(made.machine.path)
    gpu = CudaGpu()
    uuid = made.machine.state.devices[0].uuid.decode()
    return Rig(Gpu(uuid, 0, 0, "", gpu.name, gpu.total, (9, 0)), "580", folder, str(library))
