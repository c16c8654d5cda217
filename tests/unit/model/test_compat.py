"""CUDA versions of vGPU: a warning where the product's baseline is left, never a refusal."""

import pytest

from agent.model.cuda import vgpu_warning
from agent.model.gpu import Driver


def driver(*cuda: int) -> Driver:
    return Driver("580.95.05", "13.580.95.05", (cuda[0], cuda[1]))


@pytest.mark.parametrize("cuda", [(12, 0), (12, 4), (12, 9)])
def test_drivers_of_the_baselines_major_are_fine(cuda: tuple[int, int]) -> None:
    assert vgpu_warning(driver(*cuda)) is None


def test_newer_and_older_drivers_are_told() -> None:
    newer, older = vgpu_warning(driver(13, 0)), vgpu_warning(driver(11, 8))
    assert newer is not None
    assert "serves CUDA 13.0, the baseline of vGPU is 12.4" in newer
    assert older is not None
    assert "update the driver or use older images" in older


def test_no_driver_no_warning() -> None:
    assert vgpu_warning(None) is None
