"""A pod that was deleted by force runs, and its kubelet lists it: a call of another takes nothing from it."""

import pytest

from agent.model.holding import Holding
from agent.model.pod import VGPU, Container, Stage
from tests.unit.pairing.kubelet_model import pod, share
from tests.unit.pairing.test_unseen_successors import Node, bind
from tests.virtual_time import in_virtual_time

PREPARE = share("prepare", 10, 4, Stage.INIT)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    "main", [share("main", 10, 4), Container("main", {})], ids=["both have devices", "its init container has"]
)
@in_virtual_time
async def test_its_devices_stay_its_own(main: Container, *, shown: bool) -> None:
    """The watch of an agent that has begun since has not shown it, or is mute and shows it alone."""
    ghost = bind(pod("ghost", PREPARE, main, phase="Running"))
    new = bind(pod("new", share("main", 20, 10)))
    node = Node(ghost)
    record, units = node.pairing._resolver._record, frozenset(node.free[:10])
    for each in ghost.containers:
        if each.limits:
            node.entries[ghost.uid, each.name, VGPU.core] = units
    if main.limits:
        node.held = [Holding(*ghost.key, "main", VGPU.core, tuple(units))]
    node.watched(ghost if shown else new)
    node.api = {new.key: new}
    await record.refresh()
    gpus, known = record.gpus_by_pod(), record.cell.value
    assert gpus.keys() == {ghost.uid}
    assert known
    node.listed, node.free = (ghost, new), node.free[10:]
    assert await node.ask(20) == new.uid
    await record.confirm_names({ghost.key, new.key})  # as a call does for which nobody is found
    assert record.gpus_by_pod() == gpus
    assert record.cell.value
    assert record.cell.value.holdings == known.holdings
