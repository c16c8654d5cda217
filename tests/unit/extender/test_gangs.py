"""GPUs kept for members of gangs: for how long, and whether they are still there when they are taken."""

import pytest

from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.gangs import REFUSED_SECONDS, Gangs
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.model.demand import VGPU, Container, Pod
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory

HALF = pod_demand(Pod("ns", "p", (Container("main", {VGPU.core: 50, VGPU.memory: 16}),)))


class Cluster:
    """One node `n` with two GPUs, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.gangs = Gangs(self.fleet, 60.0, lambda: self.now)
        self.show()

    def show(self, mode: Mode = Mode.VGPU, *, offered: bool = True, count: int = 2) -> None:
        gpus = tuple(GpuEntry(f"GPU-{n}", n, mode, 81920, offered=offered) for n in range(count))
        self.fleet.set_node("n", NodeInventory(gpus), {})

    def keep(self, uid: str = "u", demand: PodDemand = HALF, gpu: int = 0) -> PodClaim:
        claim = PodClaim(demand, chosen=((gpu,),), name=f"ns/{uid}")
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
