"""The modes' part of a scrape."""

from collections.abc import Callable, Mapping
from typing import Protocol

from agent.kit.cell import Cell
from agent.modes.switch_state import Phase, SwitchState
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add, Collector


class Patching(Protocol):
    """Somebody who patches the Node object, and counts."""

    patches: int
    failures: int


def modes_collector(
    state: Cell[SwitchState], switches: Callable[[], int], writers: Mapping[str, Patching]
) -> Collector:
    """The switcher's metrics: the mode of each GPU, the node's phase, how often GPUs flipped.

    `writers`: who patches which part of the Node object; may grow.
    """

    def read() -> Callable[[Add], None]:
        now, flips = state.value, switches()
        patches = {name: (writer.patches, writer.failures) for name, writer in writers.items()}

        def add(to: Add) -> None:
            for gpu in now.gpus:
                active, wanted = gpu.active, gpu.wanted
                to(d.GPU_MODE, 1, (gpu.uuid, str(gpu.index), active.mode.value, wanted.mode.value))
                to(d.GPU_SELLING, active.offered and active.mode is wanted.mode, (gpu.uuid, str(gpu.index)))
            for phase in Phase:
                to(d.MODE_STATE, now.phase is phase, (phase.value,))
            to(d.MODE_SWITCHES, flips)
            for name, (made, failed) in patches.items():
                to(d.NODE_PATCHES, made, (name, "ok"))
                to(d.NODE_PATCHES, failed, (name, "failed"))

        return add

    return read
