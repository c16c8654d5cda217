"""A mode that can never be set up, hour after hour: what it costs the API server, when it is tried again."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import anyio

from agent.kit.cell import Cell
from agent.model.gpu import Gpu
from agent.model.layout import everywhere
from agent.model.modes import Assignment, Mode
from agent.modes.desired import Desired
from agent.modes.retry import LONGEST_SECONDS
from agent.modes.switcher import ModeSwitcher
from agent.node.capacity import Figures, NodeFigures
from agent.node.conditions import Reporter
from agent.node.taint import SchedulingHold
from tests import virtual_time
from tests.unit.modes.nodes import Daemon, Kubelet, Lists, gpu, snapshot_of
from tests.unit.node.test_telling import OwnNode

GPUS = [gpu(index) for index in range(8)]
MINUTE = 60.0


class Counted(OwnNode):
    """Counts each write, by the minute; all of them are answered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: Counter[int] = Counter()

    def written(self) -> None:
        self.writes[int(anyio.current_time() // MINUTE)] += 1

    async def hold(self, *, held: bool) -> None:
        self.written()
        await super().hold(held=held)

    async def patch_resources(self, figures: Figures) -> None:
        self.written()
        await super().patch_resources(figures)

    async def write_metadata(self, labels: Mapping[str, str | None], annotations: Mapping[str, str]) -> None:
        self.written()
        await super().write_metadata(labels, annotations)

    async def write_condition(self, *condition: str) -> None:
        self.written()
        await super().write_condition(*condition)

    def event(self, reason: str, message: str, warning: bool) -> None:
        self.written()
        super().event(reason, message, warning)


class SlowDaemon(Daemon):
    """Takes a while before it fails, as a control program does."""

    async def set_up(self, gpu: Gpu) -> None:
        await anyio.sleep(2)
        await super().set_up(gpu)


@dataclass
class FailingNode:
    """A node whose wish is MPS, which cannot be set up."""

    own: Counted
    daemon: SlowDaemon
    switcher: ModeSwitcher
    desired: Cell[Desired]

    @property
    def tries(self) -> int:
        return sum(line.startswith("up 0") for line in self.daemon.log)


async def _nobody() -> frozenset[str]:
    return frozenset()


@asynccontextmanager
async def failing() -> AsyncIterator[FailingNode]:
    own, daemon = Counted(), SlowDaemon()
    daemon.fail = "nvidia-cuda-mps-control ended at once"
    desired = Cell(Desired("pgpu", everywhere(Mode.PGPU)))
    assignment, kubelet = Cell(Assignment()), Kubelet()
    lists = Lists(assignment)

    def count(now: Assignment) -> Figures:
        left = sum(now.sold_as(each.uuid, Mode.PGPU) for each in GPUS)
        return {"nvidia.com/gpu": (left, left)}

    async def taken_in() -> Mapping[str, int]:
        return {"nvidia.com/gpu": count(assignment.value)["nvidia.com/gpu"][1]}

    figures = NodeFigures(own, count, assignment, _nobody, SchedulingHold(own), taken_in=taken_in)
    inventory = Cell(snapshot_of(*GPUS))
    switcher = ModeSwitcher(
        inventory, desired, assignment, kubelet, lists, announcer=figures, backends={Mode.MPS: daemon}
    )
    reporter = Reporter(own, switcher.state, Cell({}))
    async with anyio.create_task_group() as group:
        for task in (figures.run, switcher.run, reporter.run):
            group.start_soon(task)
        with anyio.fail_after(60):
            while own.status.get("nvidia.com/gpu") != (8, 8):
                await anyio.sleep(0.05)
        desired.publish(Desired("mps", everywhere(Mode.MPS)))
        yield FailingNode(own, daemon, switcher, desired)
        group.cancel_scope.cancel()


def test_failing_mode_is_quiet() -> None:
    async def main() -> None:
        async with failing() as node:
            await anyio.sleep(70 * MINUTE)
            writes = node.own.writes
            later = [writes[minute] for minute in range(10, 70)]
            for begin in range(51):
                assert sum(later[begin : begin + 10]) <= 2 * 10
            assert sum(later) <= 40  # two tries in that hour and some
            assert 8 <= node.tries <= 12
            # One failure is told once, and in between the node sells what it sold before.
            assert Counter(reason for reason, _ in node.own.events)["ModeFailed"] == 1
            assert node.own.status["nvidia.com/gpu"] == (8, 8)
            assert not node.own.tainted

    virtual_time.run(main)


def test_all_failed_gpus_are_tried_in_one_try_at_ever_longer_intervals() -> None:
    async def main() -> None:
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

    virtual_time.run(main)


def test_what_could_help_is_tried_at_once() -> None:
    async def main() -> None:
        async with failing() as node:
            await anyio.sleep(60 * MINUTE)
            before = node.tries
            node.daemon.fail = None
            await anyio.sleep(MINUTE)
            assert node.tries == before
            node.daemon.version += 1  # another program has taken its place
            await anyio.sleep(MINUTE / 2)
            assert node.daemon.up == {each.uuid for each in GPUS}
            assert node.switcher.state.value.applied == "mps"

    virtual_time.run(main)


def test_a_newer_wish_is_not_held_up_by_a_set_up() -> None:
    async def main() -> None:
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

    virtual_time.run(main)
