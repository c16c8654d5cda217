"""The agent's NVML calls, against the real driver."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.gpu import Driver, Gpu
from agent.nvml.binding import NvmlBinding
from agent.nvml.port import NvmlNotSupported, PcieLevel
from tests.gpu.programs import binding

pytestmark = pytest.mark.gpu


@pytest.fixture
def nvml() -> Iterator[NvmlBinding]:
    """Not opened yet; closed at the end."""
    found = binding()
    yield found
    found.close()


@pytest.fixture
def gpus(nvml: NvmlBinding) -> tuple[Gpu, ...]:
    """Every GPU of this machine, NVML open."""
    nvml.open()
    return tuple(nvml.describe(index) for index in range(nvml.count()))


def test_the_driver_tells_its_versions(nvml: NvmlBinding) -> None:
    driver = nvml.open()
    assert isinstance(driver, Driver)
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", driver.version)
    assert driver.cuda_version >= (11, 0)


def test_every_gpu_is_described(gpus: tuple[Gpu, ...]) -> None:
    assert gpus, "the driver lists no GPU"
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
    for index, gpu in enumerate(gpus):
        assert gpu.index == index
        assert gpu.uuid.startswith("GPU-")
        assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", gpu.pci_bus_id)
        assert gpu.memory_bytes > 2**30
        assert gpu.compute_capability >= (3, 5)
        assert Path(f"/dev/nvidia{gpu.minor}").exists()


def test_moving_figures_are_in_their_ranges(nvml: NvmlBinding, gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        sample = nvml.sample(gpu.uuid)
        assert sample.memory_total_bytes == gpu.memory_bytes
        assert 0 <= sample.memory_used_bytes <= sample.memory_total_bytes
        for ratio in (sample.gpu_utilization_ratio, sample.memory_utilization_ratio):
            assert ratio is None or 0 <= ratio <= 1
        assert sample.power_watts is None or 0 < sample.power_watts < 2000
        assert sample.temperature_celsius is None or 0 < sample.temperature_celsius < 120


def test_health_counters_are_read(nvml: NvmlBinding, gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        probe = nvml.probe(gpu.uuid)
        assert probe.memory_used_bytes >= 0
        assert probe.ecc_uncorrected is None or probe.ecc_uncorrected >= 0


def test_the_event_wait_returns_in_time(nvml: NvmlBinding, gpus: tuple[Gpu, ...]) -> None:
    watched = 0
    for gpu in gpus:
        try:
            assert nvml.watch(gpu.uuid)
            watched += 1
        except NvmlNotSupported:
            continue
    if watched:
        event = nvml.wait(200)
        assert event is None or event.uuid in {gpu.uuid for gpu in gpus}
    nvml.unwatch_all()


def test_links_and_ancestors_of_every_pair(nvml: NvmlBinding, gpus: tuple[Gpu, ...]) -> None:
    for one, other in itertools.combinations(gpus, 2):
        assert nvml.ancestor(one.uuid, other.uuid) in PcieLevel
    for gpu in gpus:
        for link in nvml.links(gpu.uuid):
            assert link.remote_bus_id != gpu.pci_bus_id


def test_it_closes_and_opens_again(nvml: NvmlBinding) -> None:
    first = nvml.open()
    nvml.close()
    assert nvml.open() == first
    assert nvml.count() >= 1
