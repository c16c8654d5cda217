"""Metrics of modes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from agent.kit.cell import Cell
from agent.modes.switch_state import Phase, SwitchState
from agent.modes.unexplained import Unexplained
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


class Patching(Protocol):
    """Somebody who patches the Node object, and counts."""

    patches: int
    failures: int


def modes_collector(
    state: Cell[SwitchState],
    switches: Callable[[], int],
    writers: Mapping[str, Patching],
    unexplained: Unexplained,
) -> Iterator[Series]:
    """The switcher's metrics: the mode of each GPU, the node's phase, how often GPUs flipped.

    `writers`: who patches which part of the Node object.
    """
    for gpu in state.value.gpus:
        active, wanted = gpu.active, gpu.wanted
        yield d.GPU_MODE, 1, (gpu.uuid, str(gpu.index), active.mode.value, wanted.mode.value)
        yield d.GPU_SELLING, active.offered and active.mode is wanted.mode, (gpu.uuid, str(gpu.index))
        if gpu.uuid in unexplained.counts:
            yield d.GPU_UNEXPLAINED, unexplained.counts[gpu.uuid], (gpu.uuid, str(gpu.index))
    for phase in Phase:
        yield d.MODE_STATE, state.value.phase is phase, (phase.value,)
    yield d.MODE_SWITCHES, switches(), ()
    for name, writer in writers.items():
        yield d.NODE_PATCHES, writer.patches, (name, "ok")
        yield d.NODE_PATCHES, writer.failures, (name, "failed")
