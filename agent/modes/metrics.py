"""The modes' part of a scrape."""

from collections.abc import Callable

from agent.kit.cell import Cell
from agent.modes.figures import NodeFigures
from agent.modes.state import Phase, SwitchState
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add, Part


def part(state: Cell[SwitchState], switches: Callable[[], int], figures: NodeFigures | None) -> Part:
    """What the switcher shows: the mode of each GPU, the node's phase, how often GPUs flipped."""

    def read() -> Callable[[Add], None]:
        now, flips = state.value, switches()
        patches = (figures.patches, figures.failures) if figures else (0, 0)

        def add(to: Add) -> None:
            for gpu in now.gpus:
                active, wanted = gpu.active, gpu.wanted
                to(d.GPU_MODE, 1, (gpu.uuid, str(gpu.index), active.mode.value, wanted.mode.value))
                to(d.GPU_SELLING, active.selling and active.mode is wanted.mode, (gpu.uuid, str(gpu.index)))
            for phase in Phase:
                to(d.MODE_STATE, now.phase is phase, (phase.value,))
            to(d.MODE_SWITCHES, flips)
            to(d.NODE_PATCHES, patches[0], ("ok",))
            to(d.NODE_PATCHES, patches[1], ("failed",))

        return add

    return read
