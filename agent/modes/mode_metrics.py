"""Metrics of modes."""

from collections.abc import Iterator

from agent.modes.switch_state import Phase
from agent.modes.switcher import ModeSwitcher
from agent.modes.unexplained import Unexplained
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


def modes_collector(switcher: ModeSwitcher, unexplained: Unexplained) -> Iterator[Series]:
    """The switcher's metrics: the mode of each GPU, the node's phase, how often GPUs flipped."""
    state = switcher.state
    for gpu in state.value.gpus:
        active, wanted = gpu.active, gpu.wanted
        yield d.GPU_MODE, 1, (gpu.uuid, str(gpu.index), active.mode.value, wanted.mode.value)
        yield d.GPU_SELLING, active.offered and active.mode is wanted.mode, (gpu.uuid, str(gpu.index))
        if gpu.uuid in unexplained.counts:
            yield d.GPU_UNEXPLAINED, unexplained.counts[gpu.uuid], (gpu.uuid, str(gpu.index))
    for phase in Phase:
        yield d.MODE_STATE, state.value.phase is phase, (phase.value,)
    yield d.MODE_SWITCHES, switcher.switches, ()
