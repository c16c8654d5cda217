"""Memory of programs on the CUDA double shows in NVML, to the byte, and ends with them."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from agent.nvml.port import NvmlCode, NvmlNotSupported
from tests.component.nvml.conftest import Faces
from tests.cuda_double.build import build
from tests.cuda_double.fixtures import CACHE
from tests.cuda_double.layout import STATE_VARIABLE
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import Program, program
from tests.pace import scaled


@pytest.fixture
def cuda(faces: Faces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaMachine:
    """The CUDA double's file for the first two GPUs of the machine."""
    machine = CudaMachine.create(tmp_path / "cuda", [CudaGpu(uuid=uuid) for uuid in faces.uuids[:2]])
    monkeypatch.setenv(STATE_VARIABLE, str(machine.path))
    return machine


@pytest.fixture
def app(cuda: CudaMachine) -> Iterator[Program]:
    with program(build(CACHE), cuda.environment) as started:
        started("init(1)", "one = alloc(64)")
        yield started


def device(faces: Faces, number: int) -> pynvml.c_nvmlDevice_t:
    return pynvml.nvmlDeviceGetHandleByUUID(faces.uuids[number])


def test_memory_of_a_program_is_used_memory(faces: Faces, app: Program) -> None:
    v1, v2 = pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2
    before, with_app = v1(device(faces, 0), version=v2), v1(device(faces, 1), version=v2)
    assert with_app.used - before.used == 364 * MIB
    assert before.free - with_app.free == 364 * MIB
    assert with_app.total == before.total
    older = v1(device(faces, 1))
    assert older.used == with_app.used + with_app.reserved
    app.kill()
    assert v1(device(faces, 1), version=v2).used == before.used


@pytest.mark.parametrize("function", ["", "_v2", "_v3"])
def test_a_program_stands_in_every_form_of_the_list(faces: Faces, app: Program, function: str) -> None:
    library = pynvml.nvmlLib
    size = 16 if function == "" else 24
    count, buffer = ctypes.c_uint(8), (ctypes.c_uint64 * 64)()
    call = getattr(library, f"nvmlDeviceGetComputeRunningProcesses{function}")
    assert call(device(faces, 1), ctypes.byref(count), buffer) == 0
    assert (count.value, buffer[0] & 0xFFFFFFFF, buffer[1]) == (1, app.pid, 364 * MIB)
    assert buffer[size // 8] == 0, "nothing was written behind it"
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(device(faces, 0)) == []
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(device(faces, 1)) == []


def test_work_of_a_program_is_sampled(faces: Faces, cuda: CudaMachine, app: Program) -> None:
    """A period in which it had the GPU all the time is one of 100 percent, of that GPU and process alone."""
    cuda.start_clock(ClockMode.WALL)
    app("kernel = function(b'work_60000ms')", "launch(kernel)")
    deadline = time.monotonic() + scaled(30)
    found: list[tuple[int, int]] = []
    while (app.pid, 100) not in found and time.monotonic() < deadline:
        app("call('cuStreamQuery', u64())")  # the GPU's time moves on with each look
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(device(faces, 1), 0)
        except pynvml.NVMLError_NotFound:
            continue  # nobody worked in the last period
        found = [(each.pid, each.smUtil) for each in samples]
    assert found == [(app.pid, 100)]
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(device(faces, 0), 0)


class Limits:
    """The two calls of r615 for one cgroup."""

    def __init__(self, faces: Faces, cgroup: Path) -> None:
        self.device = device(faces, 1)
        self.cgroup = str(cgroup).encode()

    def set(self, soft: int, hard: int) -> None:
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=self.cgroup, softLimit=soft, hardLimit=hard)
        pynvml.nvmlDeviceSetMemoryLimits_v1(self.device, limits)

    def get(self) -> tuple[int, int, int]:
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=self.cgroup)
        pynvml.nvmlDeviceGetMemoryLimits_v1(self.device, limits)
        return limits.softLimit, limits.hardLimit, limits.currentUsed


@pytest.fixture
def limits(faces: Faces, app: Program, tmp_path: Path) -> Limits:
    faces.machine.mapping.state.driver_version = b"615.10"
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text(f"1\n{app.pid}\n")
    return Limits(faces, cgroup)


def test_a_limit_of_a_cgroup_is_set_read_and_cleared(limits: Limits) -> None:
    with pytest.raises(pynvml.NVMLError_NotFound):
        limits.get()
    limits.set(0, 1024 * MIB)
    assert limits.get() == (0, 1024 * MIB, 364 * MIB)
    limits.set(0, 2048 * MIB)
    assert limits.get()[1] == 2048 * MIB
    limits.set(0, 2**64 - 1)
    with pytest.raises(pynvml.NVMLError_NotFound):
        limits.get()


def test_both_faces_limit_cgroups_alike(faces: Faces, limits: Limits, tmp_path: Path) -> None:
    uuid, cgroup = faces.uuids[1], tmp_path / "cgroup"
    assert faces.agree("memory_limit", uuid, cgroup) is None
    faces.agree("set_memory_limit", uuid, cgroup, 1024 * MIB)
    assert faces.agree("memory_limit", uuid, cgroup) == 1024 * MIB
    assert limits.get()[:2] == (0, 1024 * MIB)  # nothing is reserved
    assert faces.agree("memory_limit", uuid, tmp_path) is None
    faces.machine.mapping.state.driver_version = b"614.99"
    refused = (NvmlNotSupported, NvmlCode.NOT_SUPPORTED)
    assert faces.agree("memory_limit", uuid, cgroup) == (*refused, "nvmlDeviceGetMemoryLimits")
    assert faces.agree("set_memory_limit", uuid, cgroup, MIB) == (*refused, "nvmlDeviceSetMemoryLimits")


def test_a_limit_that_cannot_be_is_refused(faces: Faces, limits: Limits, tmp_path: Path) -> None:
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        limits.set(2, 1)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        limits.set(0, 1 << 60)
    with pytest.raises(pynvml.NVMLError_OperatingSystem):
        Limits(faces, tmp_path / "no-such").set(0, MIB)
    faces.machine.mapping.state.driver_version = b"614.99"
    with pytest.raises(pynvml.NVMLError_NotSupported):
        limits.set(0, MIB)
