"""In which mode a GPU is taken over that containers hold, or that entries of ended ones are left of."""

import pytest

from agent.model.holding import GpuHolder, Holding, Source
from agent.model.modes import GpuMode, Mode
from agent.modes.planner import taken_over

PLAIN = Holding("default", "runs", "main", "nvidia.com/gpu", ("GPU-1",))
SHARE = Holding("default", "runs", "main", "tencent.com/vcuda-core", ("GPU-1::c0",))
# Of a pod that has ended, by a checkpoint that names it still; the API server has not said whose it is.
LEFT = Holding("", "pod with UID u", "main", "nvidia.com/gpu", ("GPU-1::r3",), Source.CHECKPOINT)


def holder(holding: Holding) -> GpuHolder:
    mode = Mode.VGPU if holding is SHARE else Mode.PGPU
    return GpuHolder(mode, replica="::r" in holding.ids[0], holding=holding)


@pytest.mark.parametrize("wanted", [GpuMode(Mode.VGPU), GpuMode(Mode.PGPU), GpuMode(Mode.PGPU, replicas=4)])
@pytest.mark.parametrize("named", ["", "default"])
@pytest.mark.parametrize("lives", [SHARE, PLAIN])
def test_it_is_that_of_whom_the_kubelet_lists(lives: Holding, named: str, wanted: GpuMode) -> None:
    """Storm 10000085: units of a pod that ran were on no list, and a kubelet that restarts ends it then."""
    left = Holding(named, *("ended", "main", LEFT.resource), LEFT.ids, LEFT.source)
    found = taken_over([holder(left), holder(lives)], wanted)
    assert found == GpuMode(holder(lives).mode, replicas=1)


def test_where_nobody_is_listed_it_is_that_of_those_with_a_name() -> None:
    share = Holding("default", "init", "main", SHARE.resource, SHARE.ids, Source.CHECKPOINT)
    found = taken_over([holder(LEFT), GpuHolder(Mode.VGPU, replica=False, holding=share)], GpuMode(Mode.PGPU))
    assert found == GpuMode(Mode.VGPU)
    assert taken_over([holder(LEFT)], GpuMode(Mode.VGPU)) == GpuMode(Mode.PGPU, replicas=4)
