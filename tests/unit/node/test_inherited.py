"""What an agent that was killed left in node.status, and a kubelet that does not answer."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from agent.kit.cell import Cell
from agent.model.modes import Assignment
from agent.node.capacity import Figures, KubeletMute, NodeFigures
from agent.node.taint import SchedulingHold
from tests.unit.node.test_telling import OwnNode

GPU, CORE, OTHER = "nvidia.com/gpu", "tencent.com/vcuda-core", "tencent.com/vcuda-memory"


@dataclass
class Kubelet:
    """What it knows of; None: it does not answer."""

    known: dict[str, int] | None = field(default_factory=dict)
    asked: int = 0

    async def taken_in(self) -> Mapping[str, int]:
        self.asked += 1
        await anyio.sleep(0.001)
        if self.known is None:
            raise KubeletMute
        return dict(self.known)


async def nobody() -> frozenset[str]:
    return frozenset()


@asynccontextmanager
async def telling(node: OwnNode, kubelet: Kubelet, ours: dict[str, int]) -> AsyncIterator[NodeFigures]:
    """Figures of an agent that has just started; `ours`: what it lists, by registered resource."""

    def lists(_: Assignment) -> Figures:
        return {name: (count, count) for name, count in ours.items()}

    figures = NodeFigures(
        node,
        lists,
        Cell(Assignment()),
        nobody,
        SchedulingHold(node),
        taken_in=kubelet.taken_in,
        inherited=frozenset({GPU, CORE, OTHER}),
    )
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(10):
            yield figures
        group.cancel_scope.cancel()


async def test_what_the_kubelet_lost_with_a_killed_agent_is_taken_back_before_its_taint_goes() -> None:
    # Killed on its way from vGPU to pGPU: the figures of vGPU stand, and the kubelet has none of it.
    node = OwnNode(status={GPU: (8, 0), CORE: (800, 800), OTHER: (4512, 4512)}, tainted=True)
    kubelet = Kubelet({GPU: 8, CORE: 0})
    async with telling(node, kubelet, {GPU: 8}):
        while node.tainted or node.status[GPU] != (8, 8):
            await anyio.sleep(0.005)
    assert node.status == {GPU: (8, 8), CORE: (800, 0), OTHER: (4512, 0)}
    # First of all, and then only the taint.
    assert node.patches[0] == {CORE: (800, 0), OTHER: (4512, 0)}
    assert node.log[0].startswith("patch")


async def test_what_another_agent_sells_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.node.capacity.INHERITED_SECONDS", 0.3)
    node, kubelet = OwnNode(status={GPU: (8, 8)}), Kubelet({GPU: 8})
    async with telling(node, kubelet, {}) as figures:
        for _ in range(50):
            figures.wake()
            await anyio.sleep(0.01)
        asked = kubelet.asked
        for _ in range(20):
            figures.wake()
            await anyio.sleep(0.01)
        # Once the agent has settled, it does not ask for ever.
        assert kubelet.asked == asked > 0
    assert node.patches == []


async def test_a_kubelet_that_does_not_answer_is_offered_nothing_until_it_does() -> None:
    node, kubelet, ours = OwnNode(), Kubelet(None), {CORE: 100}
    async with telling(node, kubelet, ours):
        while kubelet.asked < 5:
            await anyio.sleep(0.01)
        assert node.patches == []
        kubelet.known = {CORE: 100}
        while node.status.get(CORE) != (100, 100):
            await anyio.sleep(0.01)


async def test_a_mute_kubelet_does_not_keep_a_stopping_agent_from_saying_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.node.capacity.CLOSING_ARRIVE_SECONDS", 0.1)
    node, kubelet = OwnNode(status={GPU: (8, 8)}), Kubelet({GPU: 8})

    async def ending() -> None:
        kubelet.known = None

    async with telling(node, kubelet, {GPU: 8}) as figures:
        await figures.close(ending)
    assert node.log == ["hold", "patch " + str({GPU: (8, 0)}), "release"]
