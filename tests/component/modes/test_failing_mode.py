"""A mode that can never be set up, hour after hour: what it costs the API server, when it is tried again."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import anyio

from agent.cluster.node import Amounts, NodeCondition, OwnNode
from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import Assignment, Mode
from agent.model.node_inventory import everywhere
from agent.modes.desired import Desired
from agent.modes.planner import LONGEST_SECONDS
from agent.modes.switcher import ModeSwitcher
from agent.node.conditions import NodeStateWriter
from tests.unit.modes.nodes import Daemon, Kubelet, Lists, gpu, snapshot_of
from tests.unit.node.memory_api import NODE, MemoryApi
from tests.unit.node.world import GPU, READ_SECONDS, World
from tests.unit.node.world import Kubelet as NodeKubelet
from tests.virtual_time import in_virtual_time

GPUS = [gpu(index) for index in range(8)]
MINUTE = 60.0


class CountingApi(MemoryApi):
    """Takes all writes of an agent, and counts them by the minute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def count(self) -> None:
        """Another request of the agent's that writes."""
        self.counts[int(anyio.current_time() // MINUTE)] += 1

    async def json_patch(
        self, path: str, operations: Sequence[Mapping[str, Any]], deadline: float = 5.0
    ) -> bytes:
        self.count()
        return await super().json_patch(path, operations, deadline)

    async def merge_patch(self, path: str, body: Any, deadline: float = 5.0) -> bytes:
        self.count()
        if path != NODE:
            return await super().merge_patch(path, body, deadline)

        def merged(node: dict[str, Any]) -> None:
            for part, values in body["metadata"].items():
                node["metadata"].setdefault(part, {}).update(values)

        self.change(merged)
        return json.dumps(self.node).encode()


class ReportedNode(OwnNode):
    """The Node object with its conditions and events, each of which is a write."""

    def __init__(self, api: CountingApi) -> None:
        super().__init__(api, "n")
        self._counting = api
        self.said: Counter[str] = Counter()
        self._there: NodeCondition | None = None

    async def write_condition(self, kind: str, status: str, reason: str, message: str, changed: str) -> None:
        self._counting.count()
        self._there = NodeCondition(kind, status, reason, message, changed)

    def condition(self, kind: str) -> NodeCondition | None:
        return self._there

    def event(self, reason: str, message: str, warning: bool) -> None:
        self._counting.count()
        self.said[reason] += 1


class SlowDaemon(Daemon):
    """Takes a while before it fails, as a control program does."""

    async def prepare(self, gpu: Gpu) -> None:
        await anyio.sleep(2)
        await super().prepare(gpu)


def offered(assignment: Assignment) -> Amounts:
    return {GPU: (8, sum(mode.mode is Mode.PGPU and mode.offered for mode in assignment.gpus.values()))}


class OneResource(World):
    """A node whose kubelet takes in the list of whole GPUs."""

    async def _delivered(self) -> None:
        await anyio.sleep(READ_SECONDS)
        self.kubelet.known = {name: left for name, (_, left) in offered(self.assignment.value).items()}


@dataclass
class FailingNode:
    """A node that is asked for MPS, which cannot be set up."""

    api: CountingApi
    reported: ReportedNode
    daemon: SlowDaemon
    switcher: ModeSwitcher
    desired: Cell[Desired]

    @property
    def tries(self) -> int:
        return sum(line.startswith("up 0") for line in self.daemon.log)


@asynccontextmanager
async def failing() -> AsyncIterator[FailingNode]:
    api, daemon = CountingApi(), SlowDaemon()
    daemon.fail = "nvidia-cuda-mps-control ended at once"
    desired = Cell(Desired("pgpu", everywhere(Mode.PGPU)))
    world = OneResource(api, NodeKubelet(), Assignment(), offered)
    switcher = ModeSwitcher(
        Cell(snapshot_of(*GPUS)),
        desired,
        world.assignment,
        cast("Any", Kubelet()),
        FollowedLists(world),
        announcer=world.withdrawals,
        wings={Mode.MPS: daemon},
    )
    reported = ReportedNode(api)
    reported.reflector = world.node.reflector
    async with world.running(), anyio.create_task_group() as group:
        group.start_soon(switcher.run)
        group.start_soon(NodeStateWriter(reported, switcher.state).run)
        with anyio.fail_after(60):
            while api.allocatable != {GPU: 8} or api.tainted:
                await anyio.sleep(0.05)
        desired.publish(Desired("mps", everywhere(Mode.MPS)))
        yield FailingNode(api, reported, daemon, switcher, desired)
        group.cancel_scope.cancel()


class FollowedLists(Lists):
    """Lists whose changes the node's capacity hears of."""

    def __init__(self, world: World) -> None:
        super().__init__(world.assignment)
        self._world = world

    def refresh(self) -> None:
        super().refresh()
        self._world.capacity.wake()

    async def delivered(self) -> None:
        await self._world._delivered()


@in_virtual_time
async def test_failing_mode_is_quiet() -> None:
    async with failing() as node:
        await anyio.sleep(70 * MINUTE)
        writes = node.api.counts
        later = [writes[minute] for minute in range(10, 70)]
        for begin in range(51):
            assert sum(later[begin : begin + 10]) <= 2 * 10
        assert sum(later) <= 40  # two tries in that hour and some
        assert 8 <= node.tries <= 12
        # One failure is one event, and in between the node offers what it offered before.
        assert node.reported.said["ModeFailed"] == 1
        assert (node.api.allocatable, node.api.tainted) == ({GPU: 8}, False)


@in_virtual_time
async def test_all_failed_gpus_are_tried_in_one_try_at_ever_longer_intervals() -> None:
    async with failing() as node:
        seen: list[float] = []
        while len(seen) < 12:
            await anyio.sleep(1)
            if node.tries > len(seen):
                seen.append(anyio.current_time())
                assert node.tries == len(seen)
                begun = Counter(line for line in node.daemon.log if line.startswith("up"))
                assert set(begun.values()) == {len(seen)}
        pauses = [after - before for before, after in pairwise(seen)]
        assert pauses[0] < 15
        assert all(after > before for before, after in pairwise(pauses[:9]))
        assert max(pauses) <= LONGEST_SECONDS + 30


@in_virtual_time
async def test_what_could_help_is_tried_at_once() -> None:
    async with failing() as node:
        await anyio.sleep(60 * MINUTE)
        before = node.tries
        while node.tries == before:  # the next is as far away as it can be
            await anyio.sleep(1)
        before = node.tries
        node.daemon.fail = None
        await anyio.sleep(MINUTE)
        assert node.tries == before
        node.daemon.version += 1  # another program has taken its place
        await anyio.sleep(MINUTE / 2)
        assert node.daemon.up == {each.uuid for each in GPUS}
        assert node.switcher.state.value.applied == "mps"


@in_virtual_time
async def test_a_newer_request_is_not_held_up_by_a_set_up() -> None:
    async with failing() as node:
        node.daemon.gate = anyio.Event()  # it never ends by itself
        await anyio.sleep(MINUTE)
        node.desired.publish(Desired("vgpu", everywhere(Mode.VGPU)))
        began = anyio.current_time()
        with anyio.fail_after(MINUTE):
            await node.switcher.state.wait_for(lambda state: state.applied == "vgpu")
        assert anyio.current_time() - began < 1
        assert node.daemon.up == set()
        assert Counter(node.daemon.log)["down 0"] == 1
