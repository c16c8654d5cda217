"""Resizes of cores: down, up again, and into free ones."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from agent.kit.tasks import Cell
from agent.model.holding import PairMember
from agent.model.pod import Pod
from agent.pairing.pairing import Recorder
from agent.vgpu.events import LimitEvents
from agent.vgpu.limits import ContainerLimits, Enforcement
from agent.vgpu.resize import FreeUnits, NoUnits, Resizer
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch
from tests.unit.vgpu.compute_site import Site
from tests.unit.vgpu.made_up import GPU


class _Owners(Recorder):
    """Of pods."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        raise AssertionError(pod)

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
        self.events.append((reason, message))


class _Free(FreeUnits):
    """Free cores."""

    def __init__(self, free: int = 0) -> None:
        self.free = [f"{GPU}::c{number}" for number in range(free)]
        self.returned = 0

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        assert (gpu, member) == (GPU, PairMember.CORE)
        if count > len(self.free):
            raise NoUnits(f"{len(self.free)} free units")
        await keep(tuple(self.free[:count]))
        del self.free[:count]

    def give_back(self) -> None:
        self.returned += 1


def _resizer(isolation: Isolation, owners: Recorder, units: FreeUnits) -> Resizer:
    events = LimitEvents(isolation, owners)
    return Resizer(isolation, units, events, LimitWatch(isolation, events, Path("/nowhere")))


async def test_cores_go_down_and_up_again_and_into_free_ones_alone(tmp_path: Path) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    site.isolation.containers.publish({key: ContainerLimits(site.held["a"])})
    owners, units = _Owners(), _Free(30)
    resizer = _resizer(site.isolation, owners, units)
    for cores, share, grown in (
        (20, 20, 0),
        (60, 60, 0),
        (80, 80, 20),
        (91, 80, 20),
        (90, 90, 30),
        (70, 70, 10),
        (30, 30, 0),
    ):
        waits = await resizer.look({"uid-a": f'{{"main": {{"cores": {cores}}}}}'})
        assert waits is (cores != share)
        await anyio.to_thread.run_sync(site.compute.turn, site.isolation.containers.value, {})
        assert (await anyio.to_thread.run_sync(site.shares)) == {"a": share}
        on_disk = await anyio.to_thread.run_sync(site.folders.about, key)
        assert on_disk.cores_now == share  # the next agent goes on from there
        assert (on_disk.cores, len(on_disk.grown_cores)) == (60, grown)
        # No other container is offered these, by the next agent either.
        assert len(site.isolation.grown.get(GPU, ())) == grown
    refused = [number for number, (reason, _) in enumerate(owners.events) if reason == "ResizeRefused"]
    assert (refused, len(owners.events), units.returned) == ([3], 7, 2)


async def test_cores_that_nobody_keeps_cannot_be_resized(tmp_path: Path) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    free = msgspec.structs.replace(site.held["a"], compute=False)
    site.isolation.containers.publish({key: ContainerLimits(free)})
    owners = _Owners()
    await _resizer(site.isolation, owners, _Free()).look({"uid-a": '{"main": {"cores": 20}}'})
    assert "is not held to cores: set vgpu.compute" in owners.events[0][1]


async def test_no_cores_grow_once_compute_is_switched_off_but_they_may_be_given_back(
    tmp_path: Path,
) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    grown = msgspec.structs.replace(site.held["a"], cores_cap=70, grown_cores=tuple(_Free(10).free))
    await anyio.to_thread.run_sync(site.folders.resize, key, grown)
    now = Isolation(site.folders, tmp_path / "none", tmp_path, Enforcement.LIBRARY, Cell(None))
    await now.start()
    owners, units = _Owners(), _Free(30)
    resizer = _resizer(now, owners, units)
    await resizer.look({"uid-a": '{"main": {"cores": 80}}'})
    assert "is not held to cores: set vgpu.compute" in owners.events[0][1]
    assert (now.containers.value[key].about, len(units.free)) == (grown, 30)
    await resizer.look({"uid-a": '{"main": {"cores": 60}}'})
    assert (now.containers.value[key].about.grown_cores, units.returned) == ((), 1)
