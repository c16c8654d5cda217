"""NVML in a container, and so nvidia-smi: its cap as the memory, and its own processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.simulator.machine import SimulatedMachine
from tests.component.caps.conftest import Programs
from tests.component.caps.container import make
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.nvml_double.build import STATE_VARIABLE, build

CACHE = Path(__file__).parents[3] / "build"
ASK = """
import json, sys, pynvml
sys.stdin.readline()
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
v1 = pynvml.nvmlDeviceGetMemoryInfo(gpu)
v2 = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
print(json.dumps({
    "v1": [v1.total, v1.free, v1.used],
    "v2": [v2.total, v2.free, v2.used],
    "compute": {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)},
    "graphics": len(pynvml.nvmlDeviceGetGraphicsRunningProcesses(gpu)),
    "others": pynvml.nvmlDeviceGetCount(),
}))
"""


@pytest.fixture
def machine(tmp_path: Path) -> CudaMachine:
    """One GPU of the simulated machine that NVML shows, too."""
    simulated = SimulatedMachine.create("dgx-h200", tmp_path / "machine")
    uuid = simulated.mapping.state.gpus[0].uuid.decode()
    return CudaMachine.create(tmp_path / "cuda-state", [CudaGpu(uuid=uuid)])


def test_nvml_shows_the_cap_and_the_container_alone(
    tmp_path: Path, library: Path, machine: CudaMachine, programs: Programs
) -> None:
    uuid = machine.state.devices[0].uuid.decode()
    gpus = [CudaGpu(uuid=uuid)]
    mine = make(tmp_path / "mine", library, (1024,), gpus=gpus)
    other = make(tmp_path / "other", library, (2048,), gpus=gpus)
    program, stranger = programs(mine, "init()", "alloc(200)"), programs(other, "init()", "alloc(1000)")
    nvml = build(CACHE)
    environment = {
        **machine.environment,
        **mine.environment,
        STATE_VARIABLE: str(tmp_path / "machine"),
        "LD_LIBRARY_PATH": str(nvml.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, uuid],
        env=environment,
        input="\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    cap = [1024 * MIB, 524 * MIB, 500 * MIB]
    assert told["v1"] == told["v2"] == cap
    assert told["compute"] == {str(program.pid): 500 * MIB}
    assert str(stranger.pid) not in told["compute"]
    assert told["graphics"] == 0
    assert told["others"] == 8
