"""The binding in its own process life: threads, hung calls, closing, another machine under it."""

import threading
from pathlib import Path

import pynvml
import pytest

from agent.nvml.port import EventKind, LinkPeer, NvmlCode, NvmlDriverMismatch, NvmlError, NvmlEvent
from agent.simulator.machine import SimulatedMachine
from agent.simulator.state import ProcessKind
from tests.component.nvml.conftest import Faces
from tests.nvml_double.build import STATE_VARIABLE


def open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def test_a_waiting_thread_wakes_for_an_event(faces: Faces) -> None:
    faces.real.watch(faces.uuids[2])
    got: list[NvmlEvent | None] = []
    thread = threading.Thread(target=lambda: got.append(faces.real.wait(30_000)))
    thread.start()
    # The other thread of the agent goes on calling meanwhile: the wait holds no lock and no GIL.
    for _ in range(50):
        faces.real.sample(faces.uuids[0])
    faces.machine.xid(2, 63)
    thread.join(10)
    assert got == [NvmlEvent(faces.uuids[2], EventKind.XID, 63)]


def test_a_hung_call_blocks_no_other_gpu(faces: Faces) -> None:
    fault = faces.machine.hang("nvmlDeviceGetMemoryInfo", gpu=1)
    answered = threading.Event()

    def probe() -> None:
        faces.real.probe(faces.uuids[1])
        answered.set()

    threading.Thread(target=probe, daemon=True).start()
    assert not answered.wait(0.1)
    faces.real.probe(faces.uuids[0])
    faces.real.watch(faces.uuids[0])
    faces.machine.xid(0, 31)
    assert faces.real.wait(1000) == NvmlEvent(faces.uuids[0], EventKind.XID, 31)
    fault.release()
    assert answered.wait(5)


def test_closing_lets_go_of_the_driver(faces: Faces) -> None:
    faces.real.watch(faces.uuids[0])
    pynvml.nvmlInit()  # somebody else in the process: initialisations are counted
    faces.real.close()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    faces.real.open()
    assert faces.real.count() == 8
    assert faces.real.watch(faces.uuids[0])


def test_the_driver_is_held_while_open_and_not_after(faces: Faces, tmp_path: Path) -> None:
    # The simulated driver file is held open as /dev/nvidia* would be; the machine's own mapping is dropped.
    held = sum(name.startswith(str(tmp_path)) for name in map(str, _links()))
    faces.real.close()
    assert sum(name.startswith(str(tmp_path)) for name in map(str, _links())) == held - 1


def _links() -> list[Path]:
    return [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def test_reopened_on_another_machine(faces: Faces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faces.real.close()
    SimulatedMachine.create("l40s-2", tmp_path / "other")
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "other"))
    assert faces.real.open().version == "550.127.05"
    assert faces.real.count() == 2
    assert faces.real.describe(0).product == "NVIDIA L40S"


def test_a_library_that_does_not_fit_the_driver(faces: Faces) -> None:
    faces.real.close()
    faces.machine.driver_mismatch()
    with pytest.raises(NvmlDriverMismatch):
        faces.real.open()
    faces.machine.driver_mismatch(present=False)
    faces.real.open()


def test_a_driver_that_is_not_loaded(faces: Faces) -> None:
    faces.real.close()
    faces.machine.fail("nvmlInit", NvmlCode.DRIVER_NOT_LOADED, times=1)
    with pytest.raises(NvmlError) as caught:
        faces.real.open()
    assert caught.value.code == NvmlCode.DRIVER_NOT_LOADED
    faces.real.open()


def test_an_opening_that_fails_half_way_leaves_nothing_open(faces: Faces) -> None:
    faces.real.close()
    faces.machine.fail("nvmlSystemGetNVMLVersion", NvmlCode.UNKNOWN, times=1)
    with pytest.raises(NvmlError):
        faces.real.open()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_a_gpu_under_another_address_is_not_taken_for_the_old_one(faces: Faces) -> None:
    faces.real.describe(0)
    faces.real.describe(1)
    one, other = faces.machine.gpu(0), faces.machine.gpu(1)
    one.bus, other.bus = other.bus, one.bus
    faces.machine.fail("nvmlDeviceGetHandleByUUID", NvmlCode.GPU_IS_LOST)
    with pytest.raises(NvmlError, match=r"is GPU-\S+ now, not GPU-"):
        faces.real.probe(faces.uuids[0])


def test_links_without_details(faces: Faces) -> None:
    faces.machine.fail("nvmlDeviceGetNvLinkRemotePciInfo", NvmlCode.NOT_SUPPORTED)
    links = faces.real.links(faces.uuids[0])
    assert [(link.peer, link.remote_bus_id) for link in links] == [(LinkPeer.SWITCH, "")] * 18
    faces.machine.gpu(0).links[3].active = 0
    assert len(faces.real.links(faces.uuids[0])) == 17


@pytest.mark.parametrize(("content", "node"), [("-1\n", None), ("1\n", 1), ("", None), ("x", None)])
def test_numa_node_from_sysfs(faces: Faces, tmp_path: Path, content: str, node: int | None) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node").write_text(content)
    assert faces.real.describe(0).numa_node == node


def test_no_sysfs_no_node(faces: Faces, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0/numa_node").unlink()
    assert faces.real.describe(0).numa_node is None


def test_calls_for_later_capabilities(faces: Faces) -> None:
    """Calls of MPS and monitoring: compute mode, processes, clocks, links; straight through pynvml."""
    machine = faces.machine
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetComputeMode(gpu, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert pynvml.nvmlDeviceGetComputeMode(gpu) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert machine.gpu(0).compute_mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    pynvml.nvmlDeviceSetComputeMode(gpu, pynvml.NVML_COMPUTEMODE_DEFAULT)

    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    for pid in range(1000, 1100):
        machine.processes.start(0, pid, ProcessKind.MPS, memory_mib=100)
    machine.processes.start(0, 999, memory_mib=28)
    machine.processes.start(1, 998)
    assert [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)] == [999]
    clients = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)
    assert [client.pid for client in clients] == list(range(1000, 1100))
    assert {client.usedGpuMemory for client in clients} == {100 << 20}
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).used == 10_028 << 20
    reserved = machine.gpu(0).memory_reserved
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == (10_028 << 20) + reserved

    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)
    machine.processes.work(1003, 37, 12)
    (sample,) = pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)
    assert (sample.pid, sample.smUtil, sample.memUtil) == (1003, 37, 12)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetProcessUtilization(gpu, sample.timeStamp)

    machine.gpu(0).event_reasons = pynvml.nvmlClocksEventReasonSwPowerCap
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) == pynvml.nvmlClocksEventReasonSwPowerCap
    assert pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 1980
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == 700_000
    assert pynvml.nvmlDeviceGetTemperatureV(gpu, pynvml.NVML_TEMPERATURE_GPU) == 28
    assert pynvml.nvmlDeviceGetEccMode(gpu) == [1, 1]

    machine.gpu(0).links[2].replay_errors = 5
    machine.gpu(0).links[2].tx_kib = 4096
    assert pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, 2, pynvml.NVML_NVLINK_ERROR_DL_REPLAY) == 5
    values = pynvml.nvmlDeviceGetFieldValues(
        gpu,
        [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 2), pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX],
    )
    assert values[0].nvmlReturn == 0
    assert values[0].value.ullVal == 4096


def test_whole_gpus_name_no_instance_in_events(faces: Faces) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(3)
    event_set = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, event_set)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(event_set, 1)
    faces.machine.xid(3, 119)
    data = pynvml.nvmlEventSetWait(event_set, 1000)
    assert (data.eventData, data.gpuInstanceId, data.computeInstanceId) == (119, 0xFFFFFFFF, 0xFFFFFFFF)
    assert pynvml.nvmlDeviceGetUUID(data.device) == faces.uuids[3]
    pynvml.nvmlEventSetFree(event_set)
