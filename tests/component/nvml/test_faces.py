"""The real binding over the C library and the Python face agree, well and sick, on every machine."""

import random
from collections.abc import Callable
from typing import cast

import pytest

from agent.model.gpu import Gpu
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import (
    ComputeMode,
    EventKind,
    GpuProcess,
    NvmlCode,
    NvmlError,
    NvmlEvent,
    NvmlGpuLost,
    Sample,
    SampleRequest,
)
from agent.nvml.sampling import mean_use
from agent.nvml.sweep import ProcessSweep
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml_functions import CALLS
from agent.simulator.profiles import PROFILES
from agent.simulator.state import ProcessKind
from tests.component.nvml.conftest import Faces, outcome

every_machine = pytest.mark.parametrize("faces", list(PROFILES), indirect=True)


def everything(faces: Faces) -> list[object]:
    """Every answer of the port about every GPU, agreed on by both faces."""
    answers = [faces.agree("count")]
    answers += [faces.agree("describe", index) for index in range(len(faces.machine.slots) + 1)]
    for uuid in faces.uuids:
        answers += [faces.agree("probe", uuid)]
        answers += [faces.agree("sample", uuid)]
        answers += [faces.agree("processes", uuid)]
        answers += [faces.agree("links", uuid)]
        answers += [faces.agree("compute_mode", uuid)]
        answers += [faces.agree("ancestor", uuid, other) for other in faces.uuids]
    return answers


@every_machine
def test_a_healthy_machine(faces: Faces) -> None:
    answers = everything(faces)
    errors = [answer for answer in answers if isinstance(answer, tuple) and NvmlError in answer]
    assert errors == [(NvmlError, NvmlCode.INVALID_ARGUMENT, "nvmlDeviceGetHandleByIndex")]  # beyond the last
    for uuid in faces.uuids:
        assert faces.agree("watch", uuid) == set(EventKind)
    assert faces.agree("wait", 0) is None


@every_machine
def test_a_machine_at_work(faces: Faces) -> None:
    seeded = random.Random(7)
    idle = everything(faces)
    for uuid in faces.uuids:
        faces.machine.load(
            uuid,
            utilization=seeded.randrange(101),
            memory_utilization=seeded.randrange(101),
            memory_used_mib=seeded.randrange(20_000),
            power_w=seeded.uniform(20, 600),
            temperature_c=seeded.randrange(25, 95),
        )
        faces.machine.remap_pending(uuid)
        faces.machine.ecc_double(uuid, seeded.randrange(8))
    assert everything(faces) != idle


@every_machine
def test_processes_clocks_and_links(faces: Faces) -> None:
    machine = faces.machine
    for slot, uuid in enumerate(faces.uuids):
        gpu = machine.gpu(uuid)
        gpu.event_reasons, gpu.energy_mj = 0x68, 12_345_000 + slot
        gpu.pcie_tx_kib_s, gpu.pcie_rx_kib_s = 1000, 2000 + slot
        for link in gpu.links[: gpu.link_count]:
            link.tx_kib, link.rx_kib, link.replay_errors = 10, 20, 1
        machine.processes.start(slot, 1000 + slot, memory_mib=100)
        machine.processes.start(slot, 2000 + slot, ProcessKind.MPS, 200)
        machine.processes.start(slot, 3000 + slot, ProcessKind.GRAPHICS, 10)
        machine.processes.work(2000 + slot, 37)
    for slot, uuid in enumerate(faces.uuids):
        sample = faces.agree("sample", uuid, SampleRequest(0, pcie=True))
        assert isinstance(sample, Sample)
        assert sample.processes is not None
        volta = machine.gpu(uuid).cc_major >= 7
        assert [(each.pid, each.mps) for each in sample.processes][:1] == [(1000 + slot, False)]
        assert (GpuProcess(2000 + slot, 200 << 20, True) in sample.processes) == volta
        assert sample.busy == ((2000 + slot, 0.37),)
        assert sample.throttle == 0x68
        assert sample.pcie_bytes_per_second == (1000 * 1024.0, (2000 + slot) * 1024.0)
        assert faces.agree("sample", uuid, SampleRequest(sample.newest_us)) != sample
        gpu = machine.gpu(uuid)
        if gpu.link_count:
            assert sample.nvlink is not None
            assert sample.nvlink.sent_bytes == gpu.link_count * 10 * 1024
            assert sample.nvlink.errors["replay"] == gpu.link_count


@every_machine
def test_activity_is_that_between_two_samples(faces: Faces) -> None:
    for uuid in faces.uuids:
        gpu = faces.machine.gpu(uuid)
        gpu.activity[:] = [90, 70, 30, 55]
        asked = SampleRequest(0, activity=True)
        first, second = faces.agree("sample", uuid, asked), faces.agree("sample", uuid, asked)
        assert isinstance(first, Sample)
        assert isinstance(second, Sample)
        assert first.activity is None
        found = {"engine": 0.9, "sm": 0.7, "tensor": 0.3, "memory": 0.55}
        assert second.activity == (found if gpu.cc_major >= 9 else None)
        for call in ("nvmlGpmSampleGet", "nvmlGpmQueryDeviceSupport"):
            fault = faces.machine.fail(call, NvmlCode.UNKNOWN)
            sample = faces.agree("sample", uuid, asked)
            assert isinstance(sample, Sample)
            assert call.endswith("Support") or sample.activity is None
            assert sample.power_watts
            fault.release()


def test_one_missing_function_takes_nothing_else(faces: Faces) -> None:
    uuid = faces.uuids[0]
    whole = faces.agree("sample", uuid, SampleRequest(0))
    for call in (
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMPSComputeRunningProcesses",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetEnforcedPowerLimit",
    ):
        fault = faces.machine.fail(call, NvmlCode.FUNCTION_NOT_FOUND)
        sample = faces.agree("sample", uuid, SampleRequest(0))
        assert isinstance(sample, Sample)
        assert sample.memory_total_bytes
        assert sample.power_watts
        assert call.endswith("MPSComputeRunningProcesses") or sample != whole
        fault.release()


def test_counters_are_left_out_when_not_configured(faces: Faces) -> None:
    sample = faces.agree("sample", faces.uuids[0], SampleRequest(0, counters=False))
    assert isinstance(sample, Sample)
    assert (sample.energy_joules, sample.ecc_corrected, sample.nvlink) == (None, None, None)
    assert sample.power_watts is not None


def test_mean_use_of_processes() -> None:
    samples = [(7, 100, 50), (7, 200, 100), (8, 300, 4000), (9, 10, 77)]
    assert mean_use(samples, 50) == (((7, 0.75), (8, 1.0)), 300, ((100, 200), (300,)))
    assert mean_use(samples, 300) == ((), 0, ())
    # After a clock was set back, entries of before it lie in the future.
    assert mean_use(samples, 50, 250) == (((7, 0.75),), 200, ((100, 200),))


def _sicknesses(machine: SimulatedMachine, seeded: random.Random) -> list[Callable[[], object]]:
    slot = seeded.randrange(8)
    call = seeded.choice(CALLS)
    code = seeded.choice(list(NvmlCode))
    gpu = seeded.choice([None, slot])
    return [
        lambda: machine.lose(slot),
        lambda: machine.fall_off_bus(slot),
        lambda: machine.restore(slot),
        lambda: machine.ecc_double(slot),
        lambda: machine.remap_pending(slot, failed=seeded.random() < 0.5),
        lambda: machine.hide(slot),
        lambda: machine.add(slot),
        lambda: machine.renumber(
            seeded.sample(machine.slots, len(machine.slots)), minors={slot: seeded.randrange(99)}
        ),
        lambda: machine.set_mig(slot, enabled=seeded.random() < 0.5),
        lambda: machine.fail(call, code, gpu),
        lambda: machine.lost_breaks_uuid_lookup(broken=seeded.random() < 0.5),
        machine.clear_faults,
    ]


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_sicknesses(faces: Faces, seed: int) -> None:
    seeded = random.Random(seed)
    for _ in range(30):
        seeded.choice(_sicknesses(faces.machine, seeded))()
        everything(faces)


@every_machine
def test_a_lost_gpu_hides_no_other(faces: Faces) -> None:
    healthy = everything(faces)
    faces.machine.lose(0)
    for answer in (
        faces.agree("describe", 0),
        faces.agree("probe", faces.uuids[0]),
    ):
        assert isinstance(answer, tuple)
        assert answer[:2] == (NvmlGpuLost, NvmlCode.GPU_IS_LOST)
    assert faces.agree("describe", 1) in healthy
    faces.machine.restore(0)
    assert everything(faces) == healthy


def test_a_counted_failure_strikes_each_face_alike(faces: Faces) -> None:
    answers = []
    for nvml in (faces.real, faces.python):
        faces.machine.fail("nvmlDeviceGetMemoryInfo", NvmlCode.UNKNOWN, times=2)
        answers.append([outcome(nvml, "probe", faces.uuids[0]) for _ in range(3)])
    assert answers[0] == answers[1]
    assert [isinstance(answer, tuple) for answer in answers[0]] == [True, True, False]


async def test_processes_are_read_whatever_else_fails_and_no_list_is_no_failure(faces: Faces) -> None:
    machine, calls = faces.machine, WorkerThread("test")
    (first, *_), listed = faces.uuids, "nvmlDeviceGetComputeRunningProcesses"
    machine.processes.start(0, 7)
    for sweep in (ProcessSweep(faces.real, calls), ProcessSweep(faces.python, calls)):
        machine.fail("nvmlDeviceGetMemoryInfo", NvmlCode.UNKNOWN, times=1)
        assert await sweep.pids([first]) == {first: [7]}
        machine.clear_faults()
        # It never will say where it has no list, or may not.
        for code in (NvmlCode.UNKNOWN, NvmlCode.NO_PERMISSION, NvmlCode.NOT_SUPPORTED):
            for call in (listed, listed.replace("Compute", "MPSCompute")):
                machine.fail(call, code)
            found = await sweep.pids([first])
            assert [*map(len, found.values())] == ([] if code is NvmlCode.UNKNOWN else [0])
            machine.clear_faults()
        machine.fail(listed.replace("Compute", "MPSCompute"), NvmlCode.NO_PERMISSION)
        assert not await sweep.pids([first])  # the other list had one: it is not said to have gone
        machine.clear_faults()
        machine.fail("nvmlDeviceGetHandleByUUID", NvmlCode.NO_PERMISSION)
        assert not await sweep.pids([first])  # which says nothing of its processes
        machine.clear_faults()
    calls.close()


def test_one_lost_gpu_may_break_the_lookup_of_all(faces: Faces) -> None:
    faces.machine.lost_breaks_uuid_lookup()
    faces.machine.lose(5)
    answer = faces.agree("probe", faces.uuids[1])
    assert isinstance(answer, tuple)
    assert answer[0] is NvmlGpuLost
    everything(faces)
    # Once described, the healthy ones are found by their PCI address.
    found = faces.agree("probe", faces.uuids[1])
    assert not isinstance(found, tuple)


def test_a_driver_that_enumerates_when_opened(faces: Faces) -> None:
    faces.machine.enumerates_at_open()
    faces.machine.hide(0)
    assert faces.agree("count") == 8
    everything(faces)
    faces.agree("close")
    faces.agree("open")
    assert faces.agree("count") == 7
    everything(faces)


def test_events_reach_both_faces(faces: Faces) -> None:
    machine, uuids = faces.machine, faces.uuids
    machine.xid(0, 13)  # before anybody registered
    for uuid in uuids[:3]:
        faces.agree("watch", uuid)
    machine.xid(7, 13)  # of a GPU that nobody registered
    machine.xid(1, 94)
    machine.ecc_double(2)
    machine.ecc_single(0)
    machine.fall_off_bus(2)
    told = [faces.agree("wait", 0) for _ in range(5)]
    assert told == [
        NvmlEvent(uuids[1], EventKind.XID, 94),
        NvmlEvent(uuids[2], EventKind.ECC_DOUBLE),
        NvmlEvent(uuids[0], EventKind.ECC_SINGLE),
        NvmlEvent(uuids[2], EventKind.XID, 79),  # though the GPU cannot be asked for its UUID any more
        None,
    ]
    faces.agree("unwatch_all")
    assert faces.agree("wait", 0) == (NvmlError, NvmlCode.UNINITIALIZED, "nvmlEventSetWait")
    faces.agree("watch", uuids[0])
    machine.xid(0, 48)
    assert faces.agree("wait", 0) == NvmlEvent(uuids[0], EventKind.XID, 48)


def test_a_gpu_without_events(faces: Faces) -> None:
    faces.machine.gpu(0).supported_events = 0
    faces.machine.gpu(1).supported_events = 0x8
    answer = faces.agree("watch", faces.uuids[0])
    assert isinstance(answer, tuple)
    assert answer[1] == NvmlCode.NOT_SUPPORTED
    assert faces.agree("watch", faces.uuids[1]) == {EventKind.XID}


def test_compute_modes_set_through_either_face(faces: Faces) -> None:
    for setter in (faces.real, faces.python):
        for mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED, ComputeMode.DEFAULT):
            setter.set_compute_mode(faces.uuids[3], mode)
            assert faces.agree("compute_mode", faces.uuids[3]) is mode
    faces.machine.set_mig(3, enabled=True)
    for mode in ComputeMode:
        answer = faces.agree("set_compute_mode", faces.uuids[3], mode)
        assert isinstance(answer, tuple)
        assert answer[1] == NvmlCode.NOT_SUPPORTED


def test_nothing_answers_after_close(faces: Faces) -> None:
    faces.agree("close")
    faces.agree("close")
    for answer in (faces.agree("count"), faces.agree("describe", 0), faces.agree("probe", faces.uuids[0])):
        assert isinstance(answer, tuple)
        assert answer[1] == NvmlCode.UNINITIALIZED


def test_instances_are_the_same_on_both_faces(faces: Faces) -> None:
    faces.machine.set_mig(1, enabled=True)
    made = [faces.machine.make_instance(1, name) for name in ("3g.71gb", "1g.18gb", "1g.18gb+me")]
    faces.agree("open")
    gpu = cast("Gpu", faces.agree("describe", 1))
    assert [each.uuid for each in gpu.instances] == made
    assert [each.profile for each in gpu.instances] == ["3g.71gb", "1g.18gb", "1g.18gb+me"]
    assert [each.gpu_instance for each in gpu.instances] == [1, 2, 3]
    faces.machine.gpu(1).instances[1].memory_used = 5 << 30
    assert faces.agree("instance_memory", made[1]) == 5 << 30
    faces.machine.destroy_instance(1, made[0])
    assert [each.uuid for each in cast("Gpu", faces.agree("describe", 1)).instances] == made[1:]
    assert isinstance(faces.agree("instance_memory", made[0]), tuple)  # an error
    for uuid in faces.uuids:
        faces.agree("watch", uuid)
    faces.machine.xid(1, 95, made[2])
    event = faces.agree("wait", 1000)
    assert event == NvmlEvent(faces.uuids[1], EventKind.XID, 95, (3, 0))


@pytest.mark.parametrize("code", [NvmlCode.NO_PERMISSION, NvmlCode.NOT_FOUND, NvmlCode.UNKNOWN])
def test_an_instance_that_cannot_be_looked_at_hides_no_other(faces: Faces, code: NvmlCode) -> None:
    faces.machine.set_mig(1, enabled=True)
    made = [faces.machine.make_instance(1, "1g.18gb") for _ in range(2)]
    faces.agree("open")
    for face in (faces.real, faces.python):
        faces.machine.fail("nvmlDeviceGetAttributes", code, times=1)
        found = outcome(face, "describe", 1)
        if code is NvmlCode.UNKNOWN:
            assert isinstance(found, tuple)  # an error
        else:
            assert isinstance(found, Gpu)
            assert [each.uuid for each in found.instances] == made[1:]
