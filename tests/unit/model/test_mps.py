"""Gates, ceilings and limits of MPS."""

from dataclasses import replace

import pytest

from agent.model.cuda import client_ceiling, limits, refusal
from agent.model.gpu import Driver, Gpu

H200 = Gpu("GPU-1", 0, 0, "0000:1b:00.0", "NVIDIA H200", 143771 << 20, (9, 0))
P100 = replace(H200, product="Tesla P100", compute_capability=(6, 0))
DRIVER = Driver("580.95.05", "13.580.95.05", (13, 0))


def test_gates_name_cause_and_remedy() -> None:
    assert refusal(H200, DRIVER) is None
    assert refusal(H200, None) is None
    assert refusal(replace(H200, compute_capability=(7, 0)), DRIVER) is None
    assert "compute capability 7.0" in (refusal(P100, DRIVER) or "")
    assert "nvidia-smi -mig 0" in (refusal(replace(H200, mig_enabled=True), DRIVER) or "")
    old = refusal(H200, Driver("470.57.02", "11.470.57.02", (11, 4)))
    assert old is not None
    assert "CUDA 11.5" in old
    assert "update the driver" in old
    assert refusal(H200, Driver("495.29.05", "11.495.29.05", (11, 5))) is None
    assert refusal(H200, DRIVER, "the program is missing") == "the program is missing"


@pytest.mark.parametrize(
    ("capability", "cuda", "clients"),
    [
        ((6, 1), (13, 1), 16),
        ((7, 0), (12, 4), 48),
        ((7, 5), (13, 0), 48),
        ((9, 0), (13, 1), 60),
        ((10, 0), (13, 4), 60),
    ],
)
def test_client_ceiling(capability: tuple[int, int], cuda: tuple[int, int], clients: int) -> None:
    gpu = replace(H200, compute_capability=capability)
    assert client_ceiling(gpu, replace(DRIVER, cuda_version=cuda)) == clients
    assert client_ceiling(gpu, None) == (16 if capability < (7, 0) else 48)


def test_memory_limit_has_one_entry_for_the_only_visible_gpu() -> None:
    assert limits(15, 0) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "15"}
    assert limits(0, 4) == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"}
    assert not limits(15, 0).keys() & limits(0, 4).keys()
