"""Event sets: who sees which event, and that waiting costs nothing and wakes."""

import resource
import threading
import time

import pytest

from agent.nvml.port import EventKind, NvmlError, NvmlEvent
from agent.simulator import events
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.simulator.state import EVENT_SLOTS


@pytest.fixture
def machine() -> SimulatedMachine:
    return SimulatedMachine.create("dgx-h200")


def watching(machine: SimulatedMachine, *slots: int) -> SimulatedNvml:
    nvml = SimulatedNvml(machine)
    nvml.open()
    for slot in slots:
        assert nvml.watch(machine.uuid(slot)) == set(EventKind)
    return nvml


def test_each_kind_of_event(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 0, 1)
    machine.xid(1, 94)
    machine.ecc_double(0)
    machine.ecc_single(0)
    assert nvml.wait(0) == NvmlEvent(machine.uuid(1), EventKind.XID, 94)
    assert nvml.wait(0) == NvmlEvent(machine.uuid(0), EventKind.ECC_DOUBLE)
    assert nvml.wait(0) == NvmlEvent(machine.uuid(0), EventKind.ECC_SINGLE)
    assert nvml.wait(0) is None


def test_only_registered_gpus_and_kinds_are_told(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 0)
    machine.xid(1, 31)
    machine.event(0, events.PSTATE)
    assert nvml.wait(0) is None


def test_nothing_from_before_the_registration(machine: SimulatedMachine) -> None:
    machine.xid(0, 13)
    nvml = watching(machine, 0)
    machine.xid(1, 14)
    nvml.watch(machine.uuid(1))
    machine.xid(1, 15)
    assert nvml.wait(0) == NvmlEvent(machine.uuid(1), EventKind.XID, 15)
    assert nvml.wait(0) is None


def test_a_gpu_that_fell_off_the_bus_still_says_xid_79(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 4)
    machine.fall_off_bus(4)
    assert nvml.wait(0) == NvmlEvent(machine.uuid(4), EventKind.XID, 79)
    machine.restore(4)
    machine.fall_off_bus(4, xid=False)
    assert nvml.wait(0) is None


def test_every_reader_has_its_own_cursor(machine: SimulatedMachine) -> None:
    one, other = watching(machine, 0), watching(machine, 0)
    machine.xid(0, 48)
    assert one.wait(0) == other.wait(0) == NvmlEvent(machine.uuid(0), EventKind.XID, 48)


def test_a_dropped_set_forgets(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 0)
    machine.xid(0, 48)
    nvml.unwatch_all()
    with pytest.raises(NvmlError, match="no GPU is registered"):
        nvml.wait(0)
    nvml.watch(machine.uuid(0))
    assert nvml.wait(0) is None


def test_a_reader_far_behind_loses_the_oldest(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 0)
    for number in range(EVENT_SLOTS + 10):
        machine.xid(0, number)
    seen = []
    while (event := nvml.wait(0)) is not None:
        seen.append(event.data)
    assert seen == list(range(10, EVENT_SLOTS + 10))


def test_a_waiter_wakes_for_an_event(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 2)
    got: list[NvmlEvent | None] = []
    thread = threading.Thread(target=lambda: got.append(nvml.wait(30_000)))
    thread.start()
    time.sleep(0.05)
    machine.xid(3, 1)  # wakes the waiter in vain
    machine.xid(2, 63)
    thread.join(10)
    assert got == [NvmlEvent(machine.uuid(2), EventKind.XID, 63)]


def test_waiting_ends_and_needs_no_processor(machine: SimulatedMachine) -> None:
    nvml = watching(machine, 0)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    begun = time.monotonic()
    assert nvml.wait(300) is None
    assert time.monotonic() - begun >= 0.3
    after = resource.getrusage(resource.RUSAGE_THREAD)
    switches = after.ru_nvcsw - before.ru_nvcsw
    assert switches < 20  # one sleep, not a poll
