"""Shares of compute, from usage regions and measurements to limit files."""

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest

from agent.isolation import compute as room
from agent.isolation import layout
from agent.isolation.compute import Compute, ComputeRequest, Work, release
from agent.isolation.compute_request import compute_request_of
from agent.isolation.correction import LEAST, MOST, Observed, corrected, rivals
from agent.isolation.folders import About, LimitFolders, key_of
from agent.isolation.limits import ContainerLimits, Policy
from agent.isolation.publishing import Publisher
from agent.isolation.resize import NoUnits, Resizer
from agent.isolation.room import Isolation
from agent.kit.cell import Cell
from agent.model.demand import Pod
from agent.model.ledger import PairMember
from tests.unit.isolation.made_up import GPU, about

KEY = (GPU, "main")


class Site:
    """Containers, a clock, and what happens while the room waits."""

    def __init__(self, folder: Path, *, soft: bool) -> None:
        self.folders = LimitFolders(folder)
        self.folders.prepare()
        self.isolation = Isolation(
            self.folders, folder / "none", folder, Policy.LIBRARY, Cell(None), compute=True
        )
        self.now = 1000.0
        self.requests: dict[str, ComputeRequest] = {}
        self.during: Callable[[], None] = lambda: None
        self.compute = Compute(
            self.isolation,
            lambda about: self.requests.get(about.pod, ComputeRequest()),
            soft=soft,
            clock=lambda: self.now,
            pause=self._pause,
        )
        self.held: dict[str, About] = {}

    def _pause(self, seconds: float) -> None:
        self.now += seconds
        self.during()

    def add(self, pod: str, cores: int, request: ComputeRequest | None = None) -> str:
        """A container; its folder."""
        made = about(pod, first=10 * len(self.held), cores=cores, build="b")
        self.held[pod] = msgspec.structs.replace(made, compute=True)
        self.requests[pod] = request or ComputeRequest()
        return self.folders.create(self.held[pod])

    def launch(self, pod: str, *, next_ns: int = 1, waited_ns: int = 0) -> None:
        """The library's entries when a container works."""
        path = self.folders.path(key_of(self.held[pod].ids), "usage")
        at = layout.USAGE_HEADER_BYTES + layout.SHARE_AT
        with path.open("r+b") as file:
            before = layout.SHARE.unpack_from(path.read_bytes(), at)
            file.seek(at)
            file.write(layout.SHARE.pack(before[0] + next_ns, before[1], before[2] + waited_ns))

    def turn(self, seconds: float = 1.0, **percents: float | Work) -> bool:
        """A turn later; what was measured of a container is one process's unless it says otherwise."""
        self.now += seconds
        containers = {
            key_of(each.ids): ContainerLimits(each, each.memory_bytes) for each in self.held.values()
        }
        measured = {
            ("default", pod, "main", GPU): value if isinstance(value, Work) else Work(value)
            for pod, value in percents.items()
        }
        return self.compute.turn(containers, measured)

    def limits(self, pod: str) -> layout.Limits:
        """In force."""
        return self.folders.limits(key_of(self.held[pod].ids))

    def shares(self) -> Mapping[str, float]:
        """In force, in percent."""
        return {pod: self.limits(pod).share / 100 for pod in self.held}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Of containers that keep to what they asked for."""
    return Site(tmp_path, soft=False)


def test_a_container_is_held_from_its_first_launch(site: Site) -> None:
    site.add("a", 30)
    assert site.limits("a") == replace(site.limits("a"), compute=True, share=3000)
    assert not site.turn()
    assert site.shares() == {"a": 30}


def test_low_priority_never_takes_what_was_promised(site: Site) -> None:
    site.add("promised", 60)
    site.add("low", 40, ComputeRequest(low=True))
    assert site.turn()
    site.launch("low")
    site.turn()
    assert site.shares() == {"promised": 60, "low": 100}
    began = site.now = site.now + 5
    taken: list[float] = []

    def come_back() -> None:
        if not taken:
            site.launch("promised")
        if site.limits("low").share == 4000:
            taken.append(site.now - began)

    site.during = come_back
    site.turn(0)
    assert taken[0] <= 0.05
    assert site.shares() == {"promised": 60, "low": 40}
    # While it works it keeps all of its promise, however little it uses; resumed once it idles.
    site.during = lambda: site.launch("promised")
    site.turn(promised=5.0)
    assert site.shares()["low"] == 40
    site.during = lambda: None
    site.turn(1.5)
    assert site.shares()["low"] == 100


def test_what_all_promises_leave_nothing_of_is_a_pause(site: Site) -> None:
    site.add("a", 60)
    site.add("b", 40)
    site.add("low", 0)
    site.turn()
    for pod in site.held:
        site.launch(pod)
    site.turn()
    assert site.shares() == {"a": 60, "b": 40, "low": 0}
    site.compute.settle()  # nobody stands still while the agent is away
    assert site.shares() == {"a": 60, "b": 40, "low": 1}


def test_soft_gives_everybody_what_is_free(tmp_path: Path) -> None:
    site = Site(tmp_path, soft=True)
    site.add("a", 30)
    site.add("b", 50)
    site.turn()
    site.launch("a")
    site.turn()
    assert site.shares()["a"] == 100
    site.launch("a")
    site.launch("b")
    site.turn(0.5)
    assert site.shares() == {"a": 40, "b": 60}


def test_one_alone_is_not_looked_at_all_the_time(tmp_path: Path) -> None:
    site = Site(tmp_path, soft=True)
    site.add("a", 30)
    assert not site.turn()
    assert site.shares() == {"a": 100}


def test_the_factor_follows_the_measurement_and_freezes_when_idle(site: Site) -> None:
    site.add("a", 40)
    site.turn(a=20)
    site.turn(2.0)
    for _ in range(5):
        site.launch("a", waited_ns=1000)
        site.turn(0.9, a=20)
    factor = site.limits("a").correction
    assert factor > 1.5
    site.turn(a=0)  # it waited for nothing: it had nothing to do
    assert site.limits("a").correction == factor
    site.turn(a=60)
    assert site.limits("a").correction < factor
    again = Compute(site.isolation, lambda _: ComputeRequest(), soft=False, clock=lambda: site.now)
    again.turn({key_of(one.ids): ContainerLimits(one, 1) for one in site.held.values()}, {})
    assert site.limits("a").correction < factor  # a new agent goes on from there


def test_time_waited_is_counted_and_nonsense_is_not(site: Site) -> None:
    key = site.add("a", 40)
    site.turn()
    site.launch("a", waited_ns=500_000_000)
    site.turn()
    site.launch("a", waited_ns=1 << 62)
    site.turn()
    assert site.compute.standing()[key].throttled_seconds == pytest.approx(0.5)


def test_whoever_was_held_is_let_go_when_nobody_is_to_be(site: Site) -> None:
    key = site.add("a", 40)
    site.isolation.containers.publish({key: ContainerLimits(site.held["a"], 1)})
    release(site.isolation)
    assert not site.limits("a").compute
    content = site.folders.path(key, "limits").read_bytes()
    assert layout.GATE.unpack_from(content, layout.GATE_AT)[0] == 0


def test_a_usage_region_that_was_truncated_is_nobodys_work(site: Site) -> None:
    key = site.add("a", 40)
    os.truncate(site.folders.path(key, "usage"), 100)
    site.turn()
    assert site.shares() == {"a": 40}


def test_the_factor_stays_within_bounds() -> None:
    assert corrected(MOST, Observed(40, (0.0,), throttled=True)) == MOST
    assert corrected(LEAST, Observed(40, (100.0,), throttled=True)) == LEAST
    assert corrected(1.5, Observed(40, (), throttled=True)) == 1.5


def test_the_factor_stays_where_a_share_is_right_on_average() -> None:
    """Long kernels have nothing of it in one second and twice of it in the next."""
    factor = 1.0
    for share in (0, 19.0) * 20:
        factor = corrected(factor, Observed(10, (share,), throttled=True))
    assert factor == pytest.approx(1, abs=0.05)


def test_a_second_in_which_it_began_to_work_says_nothing(site: Site) -> None:
    site.add("a", 20)
    site.turn(5.0)
    site.launch("a", waited_ns=1000)
    site.turn(a=100)
    assert site.limits("a").correction == 1
    site.launch("a", waited_ns=1000)
    site.turn(0.9, a=100)
    assert site.limits("a").correction == 1
    site.launch("a", waited_ns=1000)
    site.turn(0.9, a=100)
    assert site.limits("a").correction < 1


@pytest.mark.parametrize(
    ("own", "processes", "total", "everybody", "expected"),
    [
        (20, 1, 20, 1, 0),  # alone
        (20, 1, 100, 2, 1),  # whenever it does not work, the other one does
        (25, 1, 100, 4, 3),
        (40, 2, 40, 2, 0.25),  # two of its own, seldom at once
        (0, 0, 0, 0, 0),
        (20, 1, 20.5, 2, 0.125),  # hardly anybody is not nobody
        (100, 1, 130, 3, 2),  # more than there is, by samples of different instants
    ],
)
def test_who_else_is_at_work(
    own: float, processes: int, total: float, everybody: int, expected: float
) -> None:
    assert rivals(own, processes, total, everybody) == expected


def test_the_library_learns_whom_its_container_shares_the_gpu_with(site: Site) -> None:
    for pod, cores in (("a", 20), ("b", 80)):
        site.add(pod, cores)
    site.turn()
    assert site.limits("a").rivals is None
    site.turn(a=20, b=Work(80, 2))
    assert (site.limits("a").rivals, site.limits("b").rivals) == (2, 2)
    site.turn(a=20, b=Work(0, 0))
    assert site.limits("a").rivals == 0
    site.turn()  # nobody measured
    assert site.limits("a").rivals == 0
    site.compute.settle()
    assert site.limits("a").rivals is None


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, ComputeRequest()),
        ({"gpu-node-agent.io/burst": "60"}, ComputeRequest(60)),
        ({"gpu-node-agent.io/priority": "low"}, ComputeRequest(low=True)),
        ({"gpu-node-agent.io/burst": "101"}, ComputeRequest()),
        ({"gpu-node-agent.io/burst": "٣"}, ComputeRequest()),
        ({"gpu-node-agent.io/priority": "high"}, ComputeRequest()),
    ],
)
def test_annotations(annotations: dict[str, str], expected: ComputeRequest) -> None:
    assert compute_request_of(about("p"), annotations, may_burst=True) == expected
    assert compute_request_of(about("p"), annotations, may_burst=False) == ComputeRequest(low=expected.low)


def test_the_poll_is_fast_enough() -> None:
    assert room.POLL_SECONDS <= 0.01 < room.TURN_SECONDS


class _Quiet:
    """Owners of pods, and free cores."""

    def __init__(self, free: int = 0) -> None:
        self.events: list[tuple[str, str]] = []
        self.free = [f"{GPU}::c{number}" for number in range(free)]
        self.returned = 0

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        raise AssertionError(pod)

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, message))

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


async def test_cores_go_down_and_up_again_and_into_free_ones_alone(tmp_path: Path) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    site.isolation.containers.publish({key: ContainerLimits(site.held["a"], site.held["a"].memory_bytes)})
    owners = _Quiet(free=30)
    resizer = Resizer(site.isolation, owners, Publisher(site.isolation, owners))
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
    assert (refused, len(owners.events), owners.returned) == ([3], 7, 2)


async def test_cores_that_nobody_keeps_cannot_be_resized(tmp_path: Path) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    free = msgspec.structs.replace(site.held["a"], compute=False)
    site.isolation.containers.publish({key: ContainerLimits(free, free.memory_bytes)})
    owners = _Quiet()
    await Resizer(site.isolation, owners, Publisher(site.isolation, owners)).look(
        {"uid-a": '{"main": {"cores": 20}}'}
    )
    assert "is not held to cores: set vgpu.compute" in owners.events[0][1]


async def test_no_cores_grow_once_compute_is_switched_off_but_they_may_be_given_back(
    tmp_path: Path,
) -> None:
    site = await anyio.to_thread.run_sync(partial(Site, tmp_path, soft=False))
    key = await anyio.to_thread.run_sync(site.add, "a", 60)
    grown = msgspec.structs.replace(site.held["a"], cores_cap=70, grown_cores=tuple(_Quiet(free=10).free))
    await anyio.to_thread.run_sync(site.folders.resize, key, grown)
    now = Isolation(site.folders, tmp_path / "none", tmp_path, Policy.LIBRARY, Cell(None))
    await now.start()
    owners = _Quiet(free=30)
    resizer = Resizer(now, owners, Publisher(now, owners))
    await resizer.look({"uid-a": '{"main": {"cores": 80}}'})
    assert "is not held to cores: set vgpu.compute" in owners.events[0][1]
    assert (now.containers.value[key].about, len(owners.free)) == (grown, 30)
    await resizer.look({"uid-a": '{"main": {"cores": 60}}'})
    assert (now.containers.value[key].about.grown_cores, owners.returned) == ((), 1)
