"""Instances are made and destroyed alike by the real binding over the C library and by the Python face."""

from dataclasses import replace

import pytest

from agent.nvml.port import MigProfile, NvmlCode, NvmlError, Partition
from agent.simulator.profile import Profile
from agent.simulator.profiles import profile_named
from tests.component.nvml.conftest import Faces, outcome

H200 = profile_named("dgx-h200")


def machine(product: str, memory_mib: int, architecture: int) -> Profile:
    model = replace(H200.model, product=product, memory_mib=memory_mib, architecture=architecture)
    return replace(H200, model=model)


MODELS = {
    "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb": profile_named("dgx-a100"),
    "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb": machine("NVIDIA A100-SXM4-80GB", 81920, 7),
    "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb ": machine("NVIDIA H100 80GB HBM3", 81559, 9),
    "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb": H200,
    "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb": machine("NVIDIA B200", 183359, 10),
}


def read(faces: Faces) -> Partition:
    found = faces.agree("partition", faces.uuids[0])
    assert isinstance(found, Partition)
    return found


def profile(faces: Faces, slices: int, size: int) -> MigProfile:
    profiles = read(faces).profiles
    return next(each for each in profiles if (each.slices, each.size) == (slices, size))


@pytest.mark.parametrize(
    ("faces", "names"), [(model, names) for names, model in MODELS.items()], indirect=["faces"]
)
def test_profiles_are_nvidias(faces: Faces, names: str) -> None:
    faces.machine.set_mig(0, enabled=True)
    profiles = read(faces).profiles
    assert {each.name for each in profiles if "+" not in each.name} == set(names.split())
    media = next(each for each in profiles if each.name.endswith("+me"))
    assert (media.slices, media.most) == (1, 1)
    places = {each.name: (each.starts, each.size, each.most) for each in profiles if each.slices > 1}
    assert sorted(places.values()) == [((0,), 4, 1), ((0,), 8, 1), ((0, 2, 4), 2, 3), ((0, 4), 4, 2)]


def test_an_instance_is_made_and_destroyed(faces: Faces) -> None:
    faces.machine.set_mig(0, enabled=True)
    uuid, three = faces.uuids[0], profile(faces, 3, 4)
    for maker, other in ((faces.real, faces.python), (faces.python, faces.real)):
        number = maker.make_instance(uuid, three, 4)
        found = read(faces)
        (one,) = found.instances
        assert (one.number, one.start, one.size, one.whole) == (number, 4, 4, True)
        (device,) = found.devices
        assert (device.gpu_instance, device.profile) == (number, "3g.71gb")
        assert faces.agree("describe", 0)
        for nvml in (maker, other):
            assert outcome(nvml, "make_instance", uuid, three, 4) == (
                NvmlError,
                NvmlCode.INSUFFICIENT_RESOURCES,
                "nvmlDeviceCreateGpuInstanceWithPlacement",
            )
        other.destroy_instance(uuid, one, device.uuid)
        assert not read(faces).instances
        assert not read(faces).devices
    gone = faces.agree("destroy_instance", uuid, one, device.uuid)
    assert isinstance(gone, tuple)
    assert gone[1] == NvmlCode.NOT_FOUND


@pytest.mark.parametrize("changed", ["profile", "start", "computes", "device"])
def test_an_instance_in_the_place_of_the_expected_one_is_not_destroyed(faces: Faces, changed: str) -> None:
    """Once it is destroyed its number is given to the next one, which may be of others."""
    faces.machine.set_mig(0, enabled=True)
    uuid = faces.uuids[0]
    faces.real.make_instance(uuid, profile(faces, 1, 1), 2)
    before = read(faces)
    (one,), (device,) = before.instances, before.devices
    other = {
        "profile": replace(one, profile=9),
        "start": replace(one, start=0),
        "computes": replace(one, computes=()),
    }
    expected = other.get(changed, one)
    refused = faces.agree("destroy_instance", uuid, expected, "MIG-x" if changed == "device" else device.uuid)
    assert isinstance(refused, tuple)
    assert refused[1] == NvmlCode.NOT_FOUND
    assert read(faces) == before
    faces.real.destroy_instance(uuid, one, device.uuid)


def test_all_that_has_room_is_made(faces: Faces) -> None:
    faces.machine.set_mig(0, enabled=True)
    uuid, small = faces.uuids[0], profile(faces, 1, 1)
    for start in small.starts:
        (faces.real if start % 2 else faces.python).make_instance(uuid, small, start)
    assert sorted(each.start for each in read(faces).instances) == list(range(7))
    assert len({each.number for each in read(faces).instances}) == 7


def test_an_instance_at_work_is_not_destroyed(faces: Faces) -> None:
    faces.machine.set_mig(0, enabled=True)
    uuid = faces.uuids[0]
    numbers = [faces.real.make_instance(uuid, profile(faces, 1, 1), start) for start in (0, 1)]
    faces.machine.processes.start(0, 4711, gpu_instance=numbers[0])
    before = read(faces)
    first, second = ((each, "") for each in sorted(before.instances, key=lambda each: each.start))
    assert faces.agree("destroy_instance", uuid, *first) == (
        NvmlError,
        NvmlCode.IN_USE,
        "nvmlDeviceGetComputeRunningProcesses",
    )
    with pytest.raises(NvmlError, match="processes are on it: 4711"):
        faces.real.destroy_instance(uuid, *first)
    assert read(faces) == before
    faces.real.destroy_instance(uuid, *second)
    faces.machine.processes.stop(4711)
    faces.real.destroy_instance(uuid, *first)
    assert read(faces).instances == ()


@pytest.mark.parametrize("name", ["real", "python"])
@pytest.mark.parametrize(
    "call", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
def test_a_creation_that_fails_leaves_nothing(faces: Faces, name: str, call: str) -> None:
    faces.machine.set_mig(0, enabled=True)
    uuid, small, nvml = faces.uuids[0], profile(faces, 1, 1), getattr(faces, name)
    faces.machine.fail(call, NvmlCode.UNKNOWN, times=1)
    with pytest.raises(NvmlError, match=call):
        nvml.make_instance(uuid, small, 0)
    assert read(faces).instances == ()
    # What cannot even be taken back stays half made, and is no device of anybody.
    faces.machine.fail("nvmlGpuInstanceCreateComputeInstance", NvmlCode.UNKNOWN, times=1)
    faces.machine.fail("nvmlGpuInstanceDestroy", NvmlCode.UNKNOWN, times=1)
    with pytest.raises(NvmlError, match="cannot be destroyed"):
        nvml.make_instance(uuid, small, 0)
    (half,) = read(faces).instances
    assert (half.computes, half.whole, read(faces).devices) == ((), False, ())
    nvml.destroy_instance(uuid, half, "")
    assert read(faces).instances == ()


def test_mig_mode_is_switched(faces: Faces) -> None:
    uuid = faces.uuids[0]
    assert faces.agree("partition", uuid)[1] == NvmlCode.NOT_SUPPORTED  # type: ignore[index]
    assert faces.agree("describe", 0).mig_switch == "live"  # type: ignore[attr-defined]
    faces.machine.gpu(0).mig_needs_reset = 1
    assert faces.agree("describe", 0).mig_switch == "reset"  # type: ignore[attr-defined]
    faces.machine.processes.start(0, 4711)
    for nvml in (faces.real, faces.python):
        with pytest.raises(NvmlError, match="in use"):
            nvml.set_mig_mode(uuid, True)
        assert faces.machine.gpu(0).mig_pending == 0
    faces.machine.processes.stop(4711)
    faces.real.set_mig_mode(uuid, True)
    assert read(faces).instances == ()
    faces.real.make_instance(uuid, profile(faces, 1, 1), 0)
    for nvml in (faces.real, faces.python):
        with pytest.raises(NvmlError, match="in use"):
            nvml.set_mig_mode(uuid, False)
    # What failed does not come with the next reset.
    assert faces.machine.gpu(0).mig_pending == 1
    (one,) = read(faces).instances
    faces.real.destroy_instance(uuid, one, "")
    faces.python.set_mig_mode(uuid, False)
    assert faces.agree("partition", uuid)[1] == NvmlCode.NOT_SUPPORTED  # type: ignore[index]


@pytest.mark.parametrize("faces", ["t4-4"], indirect=True)
def test_a_gpu_without_mig_says_so(faces: Faces) -> None:
    uuid = faces.uuids[0]
    assert faces.agree("partition", uuid)[1] == NvmlCode.NOT_SUPPORTED  # type: ignore[index]
    assert faces.agree("describe", 0).mig_switch == ""  # type: ignore[attr-defined]
    for nvml in (faces.real, faces.python):
        with pytest.raises(NvmlError, match="not supported"):
            nvml.set_mig_mode(uuid, True)
