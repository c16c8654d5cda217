"""GPUs kept for members of gangs: for how long, and whether they are still there when they are taken."""

import json
from typing import Any, cast

import pytest

from agent.cluster.api import KubeApi
from agent.cluster.event_recorder import EventRecorder
from agent.extender.fleet import Assumed, BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import PodClaim
from agent.extender.gangs import LEFT_SECONDS, REFUSED_SECONDS, Gangs, KeptChoice, Member
from agent.extender.pending_pods import PendingPods, read_pending
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.extender.verdicts import Verdicts
from agent.kit.tasks import Supervisor
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.pod import VGPU, Container
from tests.pods import a_pod

HALF = pod_demand(a_pod("ns", "p", (Container("main", {VGPU.core: 50, VGPU.memory: 16}),)))


class Cluster:
    """One node `n` with two GPUs, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.gangs = Gangs(self.fleet, 60.0, lambda: self.now)
        self.show()

    def show(self, mode: Mode = Mode.VGPU, *, offered: bool = True, count: int = 2) -> None:
        gpus = tuple(GpuEntry(f"GPU-{n}", n, mode, 81920, offered=offered) for n in range(count))
        self.fleet.set_node(LedgerNode("n", NodeInventory(gpus), {}))

    def keep(self, uid: str = "u", demand: PodDemand = HALF, gpu: int = 0) -> PodClaim:
        claim = PodClaim(demand, chosen=((gpu,),), name=f"ns/{uid}")
        self.gangs.show(uid, Member("ns/gang", demand))
        self.gangs.keep(uid, "ns/gang", "n", claim)
        return claim

    def kept_until(self, uid: str = "u") -> float:
        """When the ledger lets go of a choice."""
        while uid not in self.fleet.expire(self.now):
            self.now += 0.5
        return self.now


def test_refusals_in_a_row_make_no_choice_last_longer() -> None:
    """One that fits nowhere is tried again and again; others that were deleted give their GPUs back."""
    cluster = Cluster()
    cluster.keep()
    for _ in range(4):
        cluster.gangs.refuse("ns/gang")
        cluster.now += REFUSED_SECONDS / 4
    assert cluster.kept_until() == REFUSED_SECONDS


def test_a_refusal_late_in_the_time_of_a_choice_adds_nothing() -> None:
    cluster = Cluster()
    cluster.keep()
    cluster.now = 59.0
    cluster.gangs.refuse("ns/gang")
    assert cluster.kept_until() == 60.0


def test_another_gangs_refusal_shortens_nothing() -> None:
    cluster = Cluster()
    cluster.keep()
    cluster.gangs.refuse("ns/other")
    assert cluster.kept_until() == 60.0


def test_what_was_kept_is_taken_once() -> None:
    cluster = Cluster()
    claim = cluster.keep()
    assert cluster.gangs.take("u", "n", HALF) is claim
    assert cluster.gangs.take("u", "n", HALF) is None


@pytest.mark.parametrize(
    "change", [{"offered": False}, {"mode": Mode.MPS}, {"count": 0}], ids=["draining", "mode", "gone"]
)
def test_a_gpu_that_is_not_to_be_had_any_more_is_not_taken(change: dict[str, object]) -> None:
    """Its node's agent would pass over the choice, and refuse the pod where no other GPU has room."""
    cluster = Cluster()
    cluster.keep()
    cluster.show(**change)  # type: ignore[arg-type]
    assert cluster.gangs.take("u", "n", HALF) is None
    assert cluster.fleet.where("u") is None  # it is chosen again


class Pending(Cluster):
    """The same, with the watch of unbound pods."""

    def __init__(self) -> None:
        super().__init__()
        events = EventRecorder(cast("KubeApi", None), "me", "extender")
        none, supervisor = cast("KubeApi", None), Supervisor()
        self.pods = PendingPods(
            none, self.fleet, Verdicts(self.fleet), events, supervisor, lambda: True, self.gangs
        )

    def shows(self, uid: str = "u", group: str = "gang", **status: Any) -> None:
        """The watch shows a pod, which asks for HALF."""
        meta: dict[str, Any] = {"name": uid, "namespace": "ns", "uid": uid}
        if deleted := status.pop("deleted", None):
            meta["deletionTimestamp"] = deleted
        limits = {VGPU.core: "50", VGPU.memory: "16"}
        spec: dict[str, Any] = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
        spec |= {"schedulingGroup": {"podGroupName": group}} if group else {}
        _, value = read_pending(json.dumps({"metadata": meta, "spec": spec, "status": status}).encode())
        self.pods.changed(uid, value)


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]


async def test_gpus_are_for_pods_that_the_watch_shows_with_this_demand() -> None:
    pending = Pending()
    pending.shows()
    other = pod_demand(a_pod("ns", "p", (Container("main", {VGPU.core: 90, VGPU.memory: 16}),)))
    assert await pending.gangs.gang("u", HALF) == "ns/gang"
    assert await pending.gangs.gang("u", other) == ""
    pending.shows(group="another")
    assert await pending.gangs.gang("u", HALF) == "ns/another"
    pending.pods.replaced({})
    assert not pending.gangs.shown


async def test_a_member_that_kube_scheduler_gives_up_keeps_little_for_long() -> None:
    pending = Pending()
    pending.shows()
    pending.keep()
    pending.shows(conditions=UNSCHEDULABLE)
    assert pending.kept_until() == REFUSED_SECONDS
    # What is kept at the next attempt has its whole time, though the condition still stands.
    began = pending.now
    pending.keep()
    pending.shows(conditions=UNSCHEDULABLE)
    assert pending.kept_until() == began + 60.0


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({"deleted": "2026-11-23T00:00:00Z"}, 0.0),
        ({"group": ""}, 0.0),
        ({}, LEFT_SECONDS),
    ],
    ids=["being deleted", "no member any more", "left the watch"],
)
async def test_what_ends_a_member_lets_go_of_its_gpus(change: dict[str, Any], seconds: float) -> None:
    pending = Pending()
    pending.shows()
    pending.keep()
    if change:
        pending.shows(**change)
    else:
        pending.pods.removed("u", None)
    assert (pending.fleet.where("u") is None) == (seconds == 0)
    assert not seconds or pending.kept_until() == seconds


async def test_a_pod_that_is_bound_keeps_its_gpus_over_the_end_of_the_other_watch() -> None:
    pending = Pending()
    pending.gangs.show("u", Member("ns/gang", HALF))
    claim = pending.keep()
    assert pending.gangs.take("u", "n", HALF) is claim
    pending.fleet.assume("u", "n", claim, 30.0)  # as the binder does
    pending.pods.removed("u", None)
    assert pending.kept_until() == 30.0


@pytest.mark.parametrize("gone", [True, False])
async def test_a_pod_that_goes_while_its_gpus_are_looked_for_keeps_none(gone: bool) -> None:
    pending = Pending()
    pending.shows()
    if gone:
        pending.pods.removed("u", None)
    pending.gangs.keep("u", "ns/gang", "n", PodClaim(HALF, chosen=((0,),), name="ns/u"))
    assert pending.fleet.waiting == (0 if gone else 1)


def test_a_member_that_is_bound_by_now_is_not_taken_over() -> None:
    """The watch of bound pods was first: what the former leader kept is no choice of ours."""
    cluster = Cluster()
    claim = PodClaim(HALF, chosen=((1,),), name="ns/u")
    cluster.gangs.take_over({"u": KeptChoice("n", ((0,),))})
    cluster.fleet.set_pod(BoundPod("u", "n", claim))
    cluster.gangs.show("u", Member("ns/gang", HALF))
    assert cluster.gangs.node("u") is None
    assert cluster.fleet.claims("n") == {"u": claim}


def test_taking_over_takes_time_in_proportion() -> None:
    class Counting(Fleet):
        looks = 0

        def assumed(self, uid: str) -> Assumed | None:
            self.looks += 1
            return super().assumed(uid)

    members, fleet = [f"u{number}" for number in range(200)], Counting()
    gangs = Gangs(fleet, 60.0, lambda: 0.0)
    gangs.take_over(dict.fromkeys(members, KeptChoice("n", None)))
    for uid in members:
        gangs.show(uid, Member("ns/gang", HALF))
    assert fleet.waiting == len(members)
    assert fleet.looks <= len(members)
