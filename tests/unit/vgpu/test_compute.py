"""Shares of compute, from usage regions and measurements to limit files."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.vgpu import compute as room
from agent.vgpu import layout
from agent.vgpu.compute import (
    BEAT_SECONDS,
    LEAST,
    MOST,
    Compute,
    ComputeRequest,
    MeasuredWork,
    compute_request_of,
    corrected,
    release,
    rivals,
)
from agent.vgpu.folders import LIMITS, key_of
from agent.vgpu.limits import ContainerLimits
from tests.unit.vgpu.compute_site import Site
from tests.unit.vgpu.made_up import GPU, about

KEY = (GPU, "main")


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


def test_a_pause_is_kept_up_by_a_beat(site: Site) -> None:
    site.add("a", 60)
    site.add("b", 40)
    low = site.folders.path(site.add("low", 0), LIMITS)
    beats = set()
    for _ in range(4 * int(BEAT_SECONDS)):
        for pod in site.held:
            site.launch(pod)
        site.turn()
        beats.add(layout.CRC.unpack_from(low.read_bytes(), layout.BEAT_AT))
    assert site.shares()["low"] == 0
    assert 3 <= len(beats) <= 4 * BEAT_SECONDS / 3


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
    again.turn({key_of(one.ids): ContainerLimits(one) for one in site.held.values()}, {})
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
    site.isolation.containers.publish({key: ContainerLimits(site.held["a"])})
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
    assert corrected(MOST, 40, 0.0, throttled=True) == MOST
    assert corrected(LEAST, 40, 100.0, throttled=True) == LEAST
    assert corrected(1.5, 0, 10.0, throttled=True) == 1.5


def test_the_factor_stays_where_a_share_is_right_on_average() -> None:
    """Long kernels have nothing of it in one second and twice of it in the next."""
    factor = 1.0
    for share in (0, 19.0) * 20:
        factor = corrected(factor, 10, share, throttled=True)
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
    site.turn(a=20, b=MeasuredWork(80, 2))
    assert (site.limits("a").rivals, site.limits("b").rivals) == (2, 2)
    site.turn(a=20, b=MeasuredWork(0, 0))
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
