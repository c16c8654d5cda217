"""Containers with figures, made up: for pages of any size."""

from collections.abc import Sequence

from agent.model.modes import Mode
from agent.telemetry.container_use import ContainerUse, Uses
from agent.telemetry.containers import Attribution, ContainerShare, Use
from agent.telemetry.sampler import Span

MIB = 1 << 20


def many_uses(uuids: Sequence[str], per_gpu: int) -> Uses:
    """So many containers on each GPU, no two with the same figures."""
    found = []
    for index, uuid in enumerate(uuids):
        for number in range(per_gpu):
            share = ContainerShare(
                "team", f"pod-{index}-{number}", "main", uuid, index, Mode.VGPU, 0.01, 512 * MIB
            )
            ratio = (number + 1) / (per_gpu + 1) / 7
            use = Use(
                share, number * 3 * MIB + index, Attribution.MEASURED, ratio, Attribution.MEASURED, (1,)
            )
            found.append(ContainerUse(use, Span(use.memory / 2, use.memory), Span(ratio / 2, ratio)))
    return Uses(tuple(found))
