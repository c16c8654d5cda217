"""Whole GPUs that change while the kubelet is asked who holds them, which may take seconds."""

from collections.abc import Callable

import pytest

from agent.model.holding import Record
from agent.model.modes import GpuMode, Mode
from tests.unit.whole.test_plugin import Parts


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda parts: parts.set_mode(0, GpuMode(Mode.VGPU)), "is not offered as nvidia.com/gpu now"),
        (lambda parts: parts.fall_ill(0), "is unhealthy: Xid 79"),
    ],
    ids=["mode", "health"],
)
async def test_a_gpu_that_changes_during_the_reading_is_not_handed_out(
    change: Callable[[Parts], None], told: str
) -> None:
    parts = Parts(2)
    parts.hold("GPU-0")
    parts.truth = Record((), ())  # its holder has ended: what remains is to ask
    look = parts.look

    async def slow(deadline: float = 1.0) -> Record:
        change(parts)
        return await look(deadline)

    parts.look = slow  # type: ignore[method-assign]
    assert told in str(await parts.refusal("GPU-0"))
