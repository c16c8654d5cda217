"""Charged and measured memory that differ for a minute show as an event, and refuse nothing that has room."""

import os

import anyio.to_thread
import pytest

from agent.telemetry import definitions as d
from agent.vgpu import layout
from agent.vgpu.events import READINGS
from agent.vgpu.folders import USAGE
from tests.unit.vgpu.test_watch import CAP, MIB, PLACE, Node, metric

TOLD = ("a", "LimitsDiffer", True)


class Counting(Node):
    """A container whose library counts what is said here."""

    key: str

    async def charged(self, total: int, refused: int = 0) -> None:
        def write() -> None:
            descriptor = os.open(self.isolation.folders.path(self.key, USAGE), os.O_RDWR)
            figures = layout.FIGURES.pack(total, total, refused, 0)
            os.pwrite(descriptor, figures, layout.USAGE_HEADER_BYTES + layout.FIGURES_AT)
            os.close(descriptor)

        await anyio.to_thread.run_sync(write)

    async def movable(self, managed: int, state: int = layout.PROCESS_SLOT) -> None:
        def write() -> None:
            descriptor = os.open(self.isolation.folders.path(self.key, USAGE), os.O_RDWR)
            os.pwrite(descriptor, layout.MOVABLE.pack(state, managed), layout.SLOTS_AT + layout.SLOT_BYTES)
            os.close(descriptor)

        await anyio.to_thread.run_sync(write)

    async def looks(self, memory: int, readings: int = READINGS) -> None:
        for _ in range(readings):
            await self.look(memory, 7)

    async def forgiven(self) -> int:
        return (await anyio.to_thread.run_sync(self.isolation.folders.limits, self.key)).forgiven_bytes

    def told(self) -> int:
        return self.owners.events.count(TOLD)


@pytest.fixture
async def node(tmp_path: os.PathLike[str]) -> Counting:
    made = Counting(tmp_path)  # type: ignore[arg-type]
    made.key = await made.admit()
    await anyio.to_thread.run_sync(made.loaded, 7)
    return made


async def test_what_is_forgiven_ends_with_the_measure(node: Counting) -> None:
    await node.charged(900 * MIB, refused=1)
    await node.looks(100 * MIB)
    await node.charged(900 * MIB, refused=2)
    await node.looks(100 * MIB)
    assert await node.forgiven()
    await node.watch.look([])
    assert not await node.forgiven()


async def test_what_differs_for_a_minute_is_told_and_refuses_nothing(node: Counting) -> None:
    await node.charged(900 * MIB)
    await node.looks(600 * MIB, READINGS - 1)
    await node.charged(900 * MIB, refused=1)
    assert (node.told(), await node.forgiven()) == (0, 0)
    await node.looks(601 * MIB, 1)
    assert (node.told(), await node.forgiven()) == (
        1,
        298 * MIB,
    )  # the least of the minute, in steps of 2 MiB
    assert "does not count against its cap" in node.owners.messages[-1]
    await node.isolation.tidy()
    assert metric(node.publisher, d.CONTAINER_DIFFERENCE) == [299 * MIB]
    status = node.publisher.document(PLACE) or {}
    assert status["uncounted"] == [f"{298 * MIB} bytes that are charged and not measured"]
    # It uses what it was refused: charged and measured grow together.
    await node.charged(1100 * MIB, refused=1)
    await node.looks(800 * MIB, 3)
    assert (node.told(), await node.forgiven()) == (1, 298 * MIB)
    # What was charged has come to be used, as managed memory that moves to the GPU.
    await node.looks(1050 * MIB, 1)
    assert await node.forgiven() == 0
    assert metric(node.publisher, d.CONTAINER_DIFFERENCE) == [0]


async def test_managed_memory_on_the_host_is_not_forgiven(node: Counting) -> None:
    """It may come back to the GPU at any moment; what else is charged too much is forgiven beside it."""
    await node.charged(900 * MIB)
    await node.looks(300 * MIB, READINGS - 1)
    await node.movable(400 * MIB)
    await node.charged(900 * MIB, refused=1)
    await node.looks(300 * MIB, 1)
    assert (node.told(), await node.forgiven()) == (1, 200 * MIB)
    await node.movable(700 * MIB)
    await node.looks(300 * MIB, 1)
    assert await node.forgiven() == 0
    # Those of a process that has ended do not count.
    await node.movable(700 * MIB, state=layout.FREE_SLOT)
    await node.looks(300 * MIB, 1)
    assert await node.forgiven() == 600 * MIB
    # Any figure can stand there.
    await node.movable((1 << 64) - 1)
    await node.looks(300 * MIB, 1)
    assert await node.forgiven() == 0


async def test_nothing_is_forgiven_before_something_was_refused(node: Counting) -> None:
    await node.charged(900 * MIB, refused=5)
    await node.looks(600 * MIB)
    assert (node.told(), await node.forgiven()) == (1, 0)
    await node.charged(900 * MIB, refused=6)
    await node.looks(600 * MIB, 1)
    assert (node.told(), await node.forgiven()) == (2, 300 * MIB)


async def test_a_count_that_nobody_can_have_is_worth_no_more_than_the_cap(node: Counting) -> None:
    await node.charged((1 << 64) - 1)
    await node.looks(0, 1)
    await node.charged((1 << 64) - 1, refused=1)
    await node.looks(0)
    assert await node.forgiven() == CAP


async def test_an_agent_that_ends_containers_forgives_nothing(node: Counting) -> None:
    node.ending()
    await node.charged(900 * MIB)
    await node.looks(600 * MIB, 1)
    await node.charged(900 * MIB, refused=1)
    await node.looks(600 * MIB)
    assert (node.told(), await node.forgiven()) == (1, 0)
    assert "may be refused" in node.owners.messages[-1]


async def test_too_little_is_told_too(node: Counting) -> None:
    await node.charged(600 * MIB)
    await node.looks(660 * MIB, 2 * READINGS)
    assert node.told() == 0  # below 10 %
    await node.looks(700 * MIB)
    assert (node.told(), await node.forgiven()) == (1, 0)
    assert "taken from its cap as measured" in node.owners.messages[-1]


async def test_an_agent_that_starts_forgives_nothing_of_before(node: Counting) -> None:
    await anyio.to_thread.run_sync(lambda: node.isolation.folders.change(node.key, forgiven_bytes=4 * MIB))
    await node.isolation.start()
    assert await node.forgiven() == 0
