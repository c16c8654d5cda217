"""Resize of containers that run: into free units alone, down to what is in use, kept over a restart."""

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio.to_thread
import pytest

from agent.model.holding import PairMember
from agent.vgpu import layout
from agent.vgpu.folders import USAGE, key_of
from agent.vgpu.resize import BadResize, FreeUnits, NoUnits, Resizer, wanted
from agent.vgpu.room import GRACE_SECONDS
from agent.vgpu.watch import Measured
from tests.unit.vgpu.made_up import BLOCK, GPU, units
from tests.unit.vgpu.test_room import Node, request
from tests.unit.vgpu.test_watch import PLACE, Owners, Reporting


class Free(FreeUnits):
    """The units of the node that nobody holds."""

    def __init__(self, *ids: str) -> None:
        self.ids = list(ids)
        self.returned = 0

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        assert member is PairMember.MEMORY
        if count > len(self.ids):
            raise NoUnits(f"GPU {gpu} has {len(self.ids)} free units")
        await keep(tuple(self.ids[:count]))
        del self.ids[:count]

    def give_back(self) -> None:
        self.returned += 1


class Resizing(Reporting, Node):
    """A container of 4 units on a GPU with 10 free ones."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.free = Free(*units(100, 10))
        self.owners = Owners()
        self.restart()

    def restart(self) -> None:
        self.reports()
        self.resizer = Resizer(self.isolation, self.free, self.events, self.watch)

    async def request(self, text: str) -> bool:
        return await self.resizer.look({"uid-a": text})

    async def cap(self) -> int:
        limits = await anyio.to_thread.run_sync(self.isolation.folders.limits, key_of(units()))
        assert self.isolation.containers.value[key_of(units())].memory_bytes == limits.memory_bytes
        return limits.memory_bytes // BLOCK

    @property
    def grown(self) -> Mapping[str, frozenset[str]]:
        return self.isolation.grown

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason, _ in self.owners.events]


@pytest.fixture
async def node(tmp_path: Path) -> Resizing:
    made = await anyio.to_thread.run_sync(Resizing, tmp_path)
    await made.isolation.start()
    await made.isolation.admit(request("a"))
    return made


async def test_a_container_grows_into_free_units(node: Resizing) -> None:
    assert not await node.request('{"main": 7}')
    assert await node.cap() == 7
    assert node.grown == {GPU: frozenset(units(100, 3))}
    assert node.reasons == ["LimitsResized"]
    await node.request('{"main": 7}')
    assert node.reasons == ["LimitsResized"]
    assert len(node.free.ids) == 7


async def test_without_free_units_nothing_changes_until_there_are(node: Resizing) -> None:
    taken, node.free.ids = node.free.ids, []
    for _ in range(2):
        assert await node.request('{"main": 5}')
    assert await node.cap() == 4
    assert not node.grown
    assert node.reasons == ["ResizeRefused"]  # once
    node.free.ids = taken
    assert not await node.request('{"main": 5}')
    assert await node.cap() == 5


async def test_a_resize_that_comes_late_leaves_the_next_pod_of_these_units_alone(node: Resizing) -> None:
    class Slow(Free):
        """The call that is served first is the next pod's."""

        async def take(
            self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
        ) -> None:
            await node.isolation.admit(request("b"))
            await super().take(gpu, member, count, keep)

    node.resizer._units = Slow(*units(100, 10))
    await node.request('{"main": 7}')
    about = await anyio.to_thread.run_sync(node.isolation.folders.about, key_of(units()))
    assert (about.uid, about.grown) == ("uid-b", ())
    assert await node.cap() == 4
    assert not node.grown
    assert node.reasons == ["ResizeRefused"]


async def test_growth_survives_a_restart_and_goes_with_its_container(node: Resizing) -> None:
    await node.request('{"main": 9}')
    node.holding(("a", units()))
    await node.agent().start()
    node.restart()
    assert node.grown == {GPU: frozenset(units(100, 5))}
    assert await node.cap() == 9
    node.now += GRACE_SECONDS
    await node.isolation.tidy()
    assert node.grown
    node.holding()
    await node.isolation.tidy()
    assert not node.grown


async def test_an_agent_killed_while_a_container_grows_finishes_at_its_next_start(
    node: Resizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_limits", killed)
        with pytest.raises(KeyboardInterrupt):
            await node.request('{"main": 6}')
    await node.agent().start()
    node.restart()
    # The units are its own: nobody else may get them.
    assert node.grown == {GPU: frozenset(units(100, 2))}
    assert await node.cap() == 6


async def test_a_container_shrinks_to_what_it_uses_and_gives_back_what_it_grew_by(node: Resizing) -> None:
    await node.request('{"main": 9}')
    await node.watch.look([Measured(PLACE, 4 * BLOCK, 6 * BLOCK + 1)])
    assert not await node.request('{"main": 2}')
    assert await node.cap() == 7
    assert node.grown == {GPU: frozenset(units(100, 3))}
    await node.watch.look([Measured(PLACE, 4 * BLOCK, BLOCK)])
    await node.request('{"main": 2}')
    assert await node.cap() == 2
    assert not node.grown
    assert node.free.returned == 2
    await node.request('{"main": 4}')
    assert await node.cap() == 4
    assert not node.grown


async def test_a_forged_count_keeps_a_container_at_its_own_cap_at_most(node: Resizing) -> None:
    def forge() -> None:
        at = layout.USAGE_HEADER_BYTES + layout.FIGURES_AT
        descriptor = os.open(node.isolation.folders.path(key_of(units()), USAGE), os.O_RDWR)
        os.pwrite(descriptor, b"\xff" * 8, at)
        os.close(descriptor)

    await anyio.to_thread.run_sync(forge)
    await node.request('{"main": 1}')
    assert await node.cap() == 4


async def test_limits_that_are_measured_meanwhile_lose_no_resize(node: Resizing) -> None:
    key = key_of(units())

    def settle() -> None:
        for unseen in range(200):
            node.isolation.folders.change(key, unseen_bytes=unseen)

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, settle)
        for count in (5, 6, 7, 8):
            await node.request(f'{{"main": {count}}}')
            assert await node.cap() == count
    limits = await anyio.to_thread.run_sync(node.isolation.folders.limits, key)
    assert (limits.unseen_bytes, limits.cores) == (199, 30)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60",
        "[]",
        '{"main": 0}',
        '{"main": -1}',
        '{"main": "60"}',
        '{"main": 1.5}',
        '{"main": 9e9}',
        "{" * 20000,
    ],
)
async def test_a_bad_annotation_changes_nothing_and_says_so_once(node: Resizing, text: str) -> None:
    with pytest.raises(BadResize):
        wanted(text)
    for _ in range(2):
        await node.request(text)
    assert await node.cap() == 4
    assert node.reasons == ["ResizeRefused"]


async def test_another_container_of_the_pod_is_left_alone(node: Resizing) -> None:
    await node.request('{"sidecar": 7}')
    assert await node.cap() == 4
    assert not node.reasons
