"""Shares of compute, from usage regions and measurements to limit files."""

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from agent.model.modes import Mode
from agent.telemetry.container_use import ContainerUse, GpuTotal, Uses
from agent.telemetry.containers import ContainerShare, Use
from agent.vgpu import compute as room
from agent.vgpu import layout
from agent.vgpu.compute import (
    BEAT_SECONDS,
    Compute,
    ComputeRequest,
    MeasuredWork,
    compute_request_of,
    release,
    work_of,
)
from agent.vgpu.folders import LIMITS, Place, key_of
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


def test_the_library_learns_whom_its_container_shares_the_gpu_with(site: Site) -> None:
    for pod, cores in (("a", 20), ("b", 80)):
        site.add(pod, cores)
    site.turn()
    assert site.limits("a").rivals is None
    # The driver names one of them; the other one works as well, by its usage region.
    site.launch("a", waited_ns=1000)
    site.launch("b", waited_ns=1000)
    site.turn(a=100)
    site.launch("a", waited_ns=1000)
    site.launch("b", waited_ns=1000)
    site.turn(b=100)
    assert (site.limits("a").rivals, site.limits("b").rivals) == (1, 0.5)
    site.turn(3, a=20, listed=["a"])
    site.turn(3, a=20, listed=["a"])
    assert site.limits("a").rivals == 0
    site.turn()  # nobody measured
    assert site.limits("a").rivals == 0
    site.compute.settle()
    assert site.limits("a").rivals is None


def test_nothing_is_learned_of_one_container_while_others_are_there(site: Site) -> None:
    """On an H200 all of each second was put down to one of two, and the factor fell to its floor."""
    key = site.add("busy", 30)
    other = site.add("serve", 70)
    site.turn()
    for _ in range(20):
        site.launch("busy", waited_ns=1000)
        site.launch("serve")
        site.turn(0.9, busy=52)
    assert (site.limits("busy").correction, site.limits("serve").correction) == (1, 1)
    assert site.compute.standing()[key].used is None
    for _ in range(2):
        site.turn(3.0, busy=25, listed=["busy"])
    assert (site.compute.standing()[key].used, site.compute.standing()[other].used) == (25, 0)
    for _ in range(5):
        site.launch("busy", waited_ns=1000)
        site.turn(0.9, others=True, busy=52, listed=["busy"])
    assert site.limits("busy").correction == 1
    for _ in range(5):
        site.launch("busy", waited_ns=1000)
        site.turn(0.9, busy=52, listed=["busy"])
    assert site.limits("busy").correction < 1


def test_a_process_that_is_held_to_no_share_ends_all_learning(site: Site) -> None:
    """Of a container that started before shares were on."""
    site.add("a", 30)
    site.turn()
    for _ in range(5):
        site.launch("a", waited_ns=1000)
        site.turn(0.9, stranger=80)
    assert site.limits("a").correction == 1


def test_a_neighbour_that_hides_in_its_usage_region_costs_nobody_anything(site: Site) -> None:
    """It uses what it was promised; the driver names the other one, and lists both."""
    site.add("seen", 30)
    site.add("hidden", 70)
    site.turn()
    for _ in range(10):
        site.launch("seen", waited_ns=1000)
        site.turn(0.9, seen=100)
    assert site.limits("seen").correction == 1
    assert site.limits("seen").rivals == 1  # so that the library takes what came between for a rival's


def test_whoever_was_there_at_either_end_of_a_second_may_have_worked_in_it(site: Site) -> None:
    site.add("a", 30)
    site.add("comes-and-goes", 70)
    site.turn()
    for number in range(20):
        site.launch("a", waited_ns=1000)
        site.turn(0.9, a=100, listed=["a"] if number % 2 else None)
    assert site.limits("a").correction == 1


def test_one_that_exceeds_for_ever_takes_nothing_from_who_obeys(site: Site) -> None:
    site.add("obeys", 30)
    site.add("exceeds", 30)
    site.turn()
    for _ in range(30):
        site.launch("obeys", waited_ns=1000)
        site.launch("exceeds")
        site.turn(0.9, exceeds=100)
        assert site.limits("obeys").correction == 1


def test_a_factor_that_an_earlier_agent_left_recovers_beside_others(site: Site) -> None:
    """Earlier agents braked all for what one did."""
    key = site.add("a", 30)
    site.add("b", 70)
    site.folders.change(key, correction=0.4)
    site.turn()
    for _ in range(15):
        site.launch("a", waited_ns=1000)
        site.launch("b")
        site.turn(0.9, a=12)
    assert site.limits("a").correction == 1


def test_what_is_measured_of_a_gpu_is_all_that_its_processes_did() -> None:
    share = ContainerShare("default", "a", "main", GPU, 0, Mode.VGPU, 0.3, 1)
    at_work = ContainerUse(Use(share, utilization=0.3, working=2, pids=(1, 2)), None, None)
    idle = ContainerUse(Use(replace(share, pod="b"), pids=(3,)), None, None)
    absent = ContainerUse(Use(replace(share, pod="c")), None, None)
    uses = Uses((at_work, idle, absent), work={GPU: GpuTotal(0.52, others=True)})
    a, b = (Place("default", pod, "main", GPU) for pod in "ab")
    assert work_of(uses) == {GPU: MeasuredWork(52, {a: 2}, others=True, listed={a, b})}


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


def test_annotations_that_cannot_be_understood_are_not_kept() -> None:
    """They may be of 256 KiB each, and their pods gone."""
    compute_request_of(about("p"), {"gpu-node-agent.io/burst": "x"}, may_burst=True)
    tracemalloc.start()
    try:
        for number in range(200):
            annotations = {"gpu-node-agent.io/burst": f"{number:0261120}"}
            compute_request_of(about(f"p{number}"), annotations, may_burst=True)
            assert len(annotations["gpu-node-agent.io/burst"]) == 255 << 10
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_poll_is_fast_enough() -> None:
    assert room.POLL_SECONDS <= 0.01 < room.TURN_SECONDS
