"""GPUs as plain values."""

import pytest

from agent.model.gpu import Gpu, normalise_bus_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00010000:AF:00.0", "10000:af:00.0"),  # domains above ffff exist (VMD)
        (" 0000000F:C3:00.0\n", "000f:c3:00.0"),
    ],
)
def test_bus_ids_are_spelled_as_in_sysfs(text: str, expected: str) -> None:
    assert normalise_bus_id(text) == expected


def test_a_hot_plug_changes_numbers_and_nothing_else() -> None:
    gpu = Gpu("GPU-1", 0, 0, "0000:1b:00.0", "NVIDIA H200", 2**37, (9, 0))
    moved = gpu.renumbered(3, 5)
    assert (moved.index, moved.minor) == (3, 5)
    assert moved.renumbered(0, 0) == gpu
