"""Injected faults: which calls they strike, how often, and how they end."""

import threading
import time

import pytest

from agent.nvml.port import NvmlCode, NvmlError, NvmlGpuLost
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.simulator.state import FAULT_SLOTS


@pytest.fixture
def machine() -> SimulatedMachine:
    return SimulatedMachine.create("t4-4")


@pytest.fixture
def nvml(machine: SimulatedMachine) -> SimulatedNvml:
    nvml = SimulatedNvml(machine)
    nvml.open()
    return nvml


def test_a_failure_strikes_the_named_call_and_gpu_only(
    machine: SimulatedMachine, nvml: SimulatedNvml
) -> None:
    fault = machine.fail("nvmlDeviceGetMemoryInfo", NvmlCode.UNKNOWN, gpu=1)
    for _ in range(3):
        with pytest.raises(NvmlError) as caught:
            nvml.probe(machine.uuid(1))
        assert (caught.value.code, caught.value.call) == (999, "nvmlDeviceGetMemoryInfo")
    nvml.probe(machine.uuid(0))
    nvml.links(machine.uuid(1))
    fault.release()
    nvml.probe(machine.uuid(1))


def test_a_counted_failure_ends_by_itself(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    fault = machine.fail("nvmlDeviceGetHandleByUUID", NvmlCode.GPU_IS_LOST, times=2)
    for _ in range(2):
        assert fault.active
        with pytest.raises(NvmlGpuLost):
            nvml.probe(machine.uuid(2))
    assert not fault.active
    nvml.probe(machine.uuid(2))


def test_a_failure_of_everything_on_one_gpu(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.fail(None, NvmlCode.RESET_REQUIRED, gpu=3)
    assert nvml.count() == 4
    with pytest.raises(NvmlError, match="reset required"):
        nvml.describe(3)
    nvml.describe(2)


def test_a_failing_event_wait_goes_on_failing(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    nvml.watch(machine.uuid(0))
    machine.fail("nvmlEventSetWait", NvmlCode.UNKNOWN)
    for _ in range(100):
        with pytest.raises(NvmlError):
            nvml.wait(1000)
    machine.clear_faults()
    assert nvml.wait(0) is None


def test_slow_calls_take_their_time(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.slow("nvmlDeviceGetPowerUsage", 50, gpu=0)
    begun = time.monotonic()
    nvml.sample(machine.uuid(0))
    assert time.monotonic() - begun >= 0.05


def test_a_hung_call_blocks_nobody_else_and_goes_on_when_released(
    machine: SimulatedMachine, nvml: SimulatedNvml
) -> None:
    fault = machine.hang("nvmlDeviceGetMemoryInfo", gpu=1)
    answered = threading.Event()

    def probe() -> None:
        nvml.probe(machine.uuid(1))
        answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    assert not answered.wait(0.1)
    nvml.probe(machine.uuid(0))
    other = machine.fail("nvmlDeviceGetName", NvmlCode.UNKNOWN)
    other.release()  # another fault's end is not the end of this one
    assert not answered.wait(0.1)
    fault.release()
    assert answered.wait(5)
    thread.join(5)


def test_an_event_wait_that_never_returns(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    nvml.watch(machine.uuid(0))
    fault = machine.hang("nvmlEventSetWait")
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(nvml.wait(0)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    fault.release()
    thread.join(5)
    assert results == [None]


def test_one_lost_gpu_may_break_the_lookup_of_all(machine: SimulatedMachine) -> None:
    machine.lost_breaks_uuid_lookup()
    machine.lose(0)
    nvml = SimulatedNvml(machine)
    nvml.open()
    with pytest.raises(NvmlGpuLost):
        nvml.probe(machine.uuid(1))
    # Once described, a GPU is found by its PCI address.
    nvml.describe(1)
    nvml.probe(machine.uuid(1))
    with pytest.raises(NvmlGpuLost):
        nvml.probe(machine.uuid(0))


def test_the_table_of_faults_has_an_end(machine: SimulatedMachine) -> None:
    for _ in range(FAULT_SLOTS):
        machine.slow("nvmlInit", 0)
    with pytest.raises(RuntimeError, match="release some"):
        machine.slow("nvmlInit", 0)
    machine.clear_faults()
    machine.slow("nvmlInit", 0)
