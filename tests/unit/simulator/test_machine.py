"""The simulated machine through its Python face: figures, sickness, plugging, processes, files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.nvml.port import (
    NvmlCode,
    NvmlDriverMismatch,
    NvmlError,
    NvmlGpuLost,
    NvmlLibraryMissing,
    NvmlNotSupported,
)
from agent.simulator.machine import SimulatedMachine
from agent.simulator.mapping import SIZE, MappingError
from agent.simulator.nvml import SimulatedNvml
from agent.simulator.state import ProcessKind

MIB = 1 << 20


@pytest.fixture
def machine() -> SimulatedMachine:
    return SimulatedMachine.create("dgx-h200")


@pytest.fixture
def nvml(machine: SimulatedMachine) -> SimulatedNvml:
    nvml = SimulatedNvml(machine)
    nvml.open()
    return nvml


def test_figures_come_through(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.load(
        2, utilization=91, memory_utilization=40, memory_used_mib=1000, power_w=612.5, temperature_c=71
    )
    sample = nvml.sample(machine.uuid(2))
    assert (sample.gpu_utilization_ratio, sample.memory_utilization_ratio) == (0.91, 0.40)
    assert sample.memory_used_bytes == 1000 * MIB
    assert (sample.power_watts, sample.temperature_celsius) == (612.5, 71.0)
    machine.load(2, utilization=10)
    assert nvml.sample(machine.uuid(2)) == replace(sample, gpu_utilization_ratio=0.10)
    assert nvml.sample(machine.uuid(1)).gpu_utilization_ratio == 0.0


def test_memory_in_use_leaves_room_for_the_driver(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.load(0, memory_used_mib=10**9)
    sample = nvml.sample(machine.uuid(0))
    assert sample.memory_used_bytes == sample.memory_total_bytes - machine.gpu(0).memory_reserved


@pytest.mark.parametrize("sicken", [SimulatedMachine.lose, SimulatedMachine.fall_off_bus])
def test_a_lost_gpu_is_counted_and_answers_nothing(
    machine: SimulatedMachine, nvml: SimulatedNvml, sicken: Callable[[SimulatedMachine, int], None]
) -> None:
    lost, other = machine.uuid(3), machine.uuid(4)
    sicken(machine, 3)
    assert nvml.count() == 8
    calls: list[Callable[[], object]] = [
        lambda: nvml.describe(3),
        lambda: nvml.probe(lost),
        lambda: nvml.sample(lost),
        lambda: nvml.links(lost),
        lambda: nvml.ancestor(lost, other),
        lambda: nvml.ancestor(other, lost),
        lambda: nvml.watch(lost),
    ]
    for call in calls:
        with pytest.raises(NvmlGpuLost) as caught:
            call()
        assert caught.value.code == NvmlCode.GPU_IS_LOST
    assert nvml.describe(4).uuid == other
    machine.restore(3)
    assert nvml.describe(3).uuid == lost


def test_errors_of_memory_are_probed_and_healed_by_a_reset(
    machine: SimulatedMachine, nvml: SimulatedNvml
) -> None:
    uuid = machine.uuid(5)
    machine.ecc_double(5, 2)
    machine.remap_pending(5, failed=True)
    sick = nvml.probe(uuid)
    assert (sick.ecc_uncorrected, sick.remap_pending, sick.remap_failed) == (2, True, True)
    assert sick.retirement_pending is None  # Hopper remaps rows
    machine.restore(5)
    healed = nvml.probe(uuid)
    assert (healed.ecc_uncorrected, healed.remap_pending) == (0, False)
    assert machine.gpu(5).ecc_aggregate_uncorrected == 2  # the lifetime counter stays


def test_gpus_before_ampere_retire_pages() -> None:
    machine = SimulatedMachine.create("t4-4")
    nvml = SimulatedNvml(machine)
    nvml.open()
    machine.remap_pending(0)
    probe = nvml.probe(machine.uuid(0))
    assert (probe.remap_pending, probe.remap_failed, probe.retirement_pending) == (None, None, True)


def test_mig_mode(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.set_mig(6, enabled=True)
    assert nvml.describe(6).mig_enabled
    assert nvml.sample(machine.uuid(6)).gpu_utilization_ratio is None  # NVML offers it per instance only
    with pytest.raises(ValueError, match="Tesla T4 has no MIG mode"):
        SimulatedMachine.create("t4-4").set_mig(0, enabled=True)


def test_a_hidden_gpu_moves_the_others_up_and_comes_back_in_its_place(
    machine: SimulatedMachine, nvml: SimulatedNvml
) -> None:
    before = machine.uuids
    machine.hide(2)
    assert nvml.count() == 7
    assert machine.uuids == before[:2] + before[3:]
    assert (nvml.describe(2).uuid, nvml.describe(2).minor) == (before[3], 3)
    with pytest.raises(NvmlGpuLost):
        nvml.probe(before[2])
    machine.add(2)
    assert machine.uuids == before


def test_a_machine_may_start_with_empty_slots() -> None:
    machine = SimulatedMachine.create("dgx-h200", hidden=[0, 7])
    assert machine.uuids == tuple(machine.uuid(slot) for slot in range(1, 7))
    machine.add(7)
    assert machine.uuids == tuple(machine.uuid(slot) for slot in range(1, 8))


def test_renumbering_keeps_uuids(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    one, two = machine.uuid(0), machine.uuid(1)
    machine.renumber([1, 0, 2, 3, 4, 5, 6, 7], minors={0: 9})
    first, second = nvml.describe(0), nvml.describe(1)
    assert (first.uuid, first.minor) == (two, 1)
    assert (second.uuid, second.minor) == (one, 9)


def test_a_driver_that_enumerates_when_opened(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.enumerates_at_open()
    machine.hide(0)
    assert nvml.count() == 8
    with pytest.raises(NvmlGpuLost):
        nvml.describe(0)
    nvml.close()
    nvml.open()
    assert nvml.count() == 7


def test_library_that_comes_and_goes(machine: SimulatedMachine) -> None:
    nvml = SimulatedNvml(machine)
    machine.library_missing()
    with pytest.raises(NvmlLibraryMissing):
        nvml.open()
    machine.library_missing(missing=False)
    machine.driver_mismatch()
    with pytest.raises(NvmlDriverMismatch):
        nvml.open()
    machine.driver_mismatch(present=False)
    assert nvml.open().version == "580.95.05"


def test_nothing_answers_before_open_and_after_close(machine: SimulatedMachine) -> None:
    nvml = SimulatedNvml(machine)
    with pytest.raises(NvmlError, match="uninitialized"):
        nvml.count()
    nvml.open()
    nvml.close()
    nvml.close()
    with pytest.raises(NvmlError, match="uninitialized"):
        nvml.probe(machine.uuid(0))


def test_an_index_beyond_the_last(nvml: SimulatedNvml) -> None:
    with pytest.raises(NvmlError) as caught:
        nvml.describe(8)
    assert caught.value.code == NvmlCode.INVALID_ARGUMENT


def test_parts_that_a_gpu_does_not_offer_never_hide_it(
    machine: SimulatedMachine, nvml: SimulatedNvml
) -> None:
    whole = nvml.describe(1)
    for call in ("MinorNumber", "Name", "MemoryInfo", "CudaComputeCapability", "MigMode", "PciInfo"):
        machine.fail(f"nvmlDeviceGet{call}", NvmlCode.NOT_SUPPORTED, gpu=1)
    bare = nvml.describe(1)
    assert (bare.uuid, bare.index, bare.minor) == (whole.uuid, 1, 1)
    assert (bare.product, bare.memory_bytes, bare.pci_bus_id) == ("unknown NVIDIA GPU", 0, "")
    machine.fail("nvmlDeviceGetSupportedEventTypes", NvmlCode.NOT_SUPPORTED, gpu=1)
    with pytest.raises(NvmlNotSupported):
        nvml.watch(whole.uuid)


def test_processes_use_memory_until_they_end(machine: SimulatedMachine, nvml: SimulatedNvml) -> None:
    machine.processes.start(0, 4711, memory_mib=300)
    machine.processes.start(0, 4712, ProcessKind.MPS, memory_mib=200)
    machine.processes.start(1, 4711, memory_mib=50)
    assert nvml.probe(machine.uuid(0)).memory_used_bytes == 500 * MIB
    machine.processes.stop(4711)
    machine.processes.stop(4711)
    assert nvml.probe(machine.uuid(0)).memory_used_bytes == 200 * MIB
    assert nvml.probe(machine.uuid(1)).memory_used_bytes == 0
    assert machine.mapping.state.process_count == 1
    assert machine.mapping.state.processes[0].pid == 4712


def test_the_state_is_shared_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine"
    machine = SimulatedMachine.create("l40s-2", path)
    other = SimulatedMachine.attach(path)
    nvml = SimulatedNvml(other)
    nvml.open()
    machine.load(0, utilization=50)
    assert nvml.sample(machine.uuid(0)).gpu_utilization_ratio == 0.5
    assert other.profile.name == "l40s-2"
    assert list(tmp_path.iterdir()) == [path]  # the draft is gone


def test_a_new_machine_under_an_old_name_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "machine"
    old = SimulatedMachine.create("l40s-2", path)
    SimulatedMachine.create("t4-4", path)
    assert len(old.uuids) == 2
    assert len(SimulatedMachine.attach(path).uuids) == 4


def test_files_that_are_no_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine"
    path.write_bytes(b"short")
    with pytest.raises(MappingError, match="has 5 bytes"):
        SimulatedMachine.attach(path)
    path.write_bytes(bytes(SIZE))
    with pytest.raises(MappingError, match="no simulated machine of this version"):
        SimulatedMachine.attach(path)


def test_unknown_gpus_and_calls_are_named(machine: SimulatedMachine) -> None:
    with pytest.raises(ValueError, match="no GPU 11"):
        machine.lose(11)
    with pytest.raises(ValueError, match="did you mean nvmlDeviceGetUUID"):
        machine.hang("nvmlDeviceGetUuid")
