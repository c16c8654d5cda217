"""GPUs as plain values."""

import pytest

from agent.model.gpu import normalise_bus_id


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
