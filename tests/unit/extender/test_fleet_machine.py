"""Units are conserved under any order of events: binds, watches, records, ends, deadlines, inventories."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent.extender.fleet import BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import HeldUnits, PodClaim
from agent.extender.pod_demand import Chosen, PodDemand, pod_demand
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import PlacementPolicy
from agent.model.pod import CORES, VGPU, Container
from tests.pods import a_pod

NODES, GPUS, BLOCKS = ("a", "b"), 3, 320
shares = st.tuples(st.integers(1, 99), st.integers(1, 200))
demands = st.one_of(st.lists(shares, min_size=1, max_size=3), st.sampled_from([[(100, 0)], [(200, 0)]]))


class Clusters(RuleBasedStateMachine):
    """The API server's truth beside the ledger; events reach the ledger late, twice or not at all."""

    @initialize()
    def begin(self) -> None:
        self.fleet = Fleet()
        self.broken: dict[str, set[int]] = {node: set() for node in NODES}
        self.bound: dict[str, tuple[str, PodDemand, Chosen]] = {}  # in the API server
        self.shown: dict[str, BoundPod] = {}
        self.open: dict[str, tuple[str, PodDemand, Chosen, float]] = {}  # assumed, Binding under way
        self.now, self.count = 0.0, 0
        for node in NODES:
            self.tell(node)

    def tell(self, node: str) -> None:
        gpus = tuple(
            GpuEntry(f"{node}-{n}", n, Mode.VGPU, 81920, trouble="x" if n in self.broken[node] else "")
            for n in range(GPUS)
        )
        self.fleet.set_node(LedgerNode(node, NodeInventory(gpus), {}))

    @rule(sizes=demands, policy=st.sampled_from(PlacementPolicy), node=st.sampled_from(NODES))
    def choose(self, sizes: list[tuple[int, int]], policy: PlacementPolicy, node: str) -> None:
        limits = [{VGPU.core: cores, VGPU.memory: blocks} for cores, blocks in sizes]
        pod = a_pod("ns", "p", tuple(Container(f"c{n}", one) for n, one in enumerate(limits)))
        demand = pod_demand(pod)
        found = self.fleet.pick(node, demand, policy)
        assert (found is None) == bool(self.fleet.verdict(node, demand))
        if found is None:
            return
        assert not {index for one in found.chosen for index in one} & self.broken[node]
        self.count += 1
        uid = f"u{self.count}"
        self.fleet.assume(uid, node, PodClaim(demand, chosen=found.chosen), self.now + 30)
        self.open[uid] = (node, demand, found.chosen, self.now + 30)

    @rule(data=st.data(), written=st.booleans())
    def answer(self, data: Any, written: bool) -> None:
        """The API server answers a Binding; one that was refused is forgotten at once."""
        if self.open:
            uid = data.draw(st.sampled_from(sorted(self.open)))
            node, demand, chosen, _ = self.open.pop(uid)
            if written:
                self.bound[uid] = (node, demand, chosen)
                self.fleet.confirm(uid, self.now)
            else:
                self.fleet.forget(uid)

    @rule(data=st.data(), how=st.sampled_from(["choice", "records", "nothing", "forged"]))
    def show(self, data: Any, how: str) -> None:
        """The watch shows a bound pod, perhaps again, with more or less about it."""
        if not self.bound:
            return
        uid = data.draw(st.sampled_from(sorted(self.bound)))
        node, demand, chosen = self.bound[uid]
        claim = PodClaim(demand)
        if how == "choice":
            claim = PodClaim(demand, chosen=chosen)
        elif how == "forged":
            claim = PodClaim(
                demand, chosen=tuple(((n + 1) % GPUS,) * len(one) for n, one in enumerate(chosen))
            )
        elif how == "records":
            held = [
                HeldUnits(f"{node}-{index}", Mode.VGPU, min(CORES, slot.demand.cores), slot.demand.blocks)
                for slot, indices in zip(demand.slots, chosen, strict=True)
                for index in indices
            ]
            claim = PodClaim(demand, held=tuple(held))
        self.shown[uid] = BoundPod(uid, node, claim)
        self.fleet.set_pod(self.shown[uid])

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        """A bound pod ends, shown before or not."""
        if self.bound:
            uid = data.draw(st.sampled_from(sorted(self.bound)))
            del self.bound[uid]
            self.shown.pop(uid, None)
            self.fleet.drop_pod(uid)

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and whether what was confirmed was shown makes no difference."""
        self.now += seconds
        for uid in self.fleet.expire(self.now):
            assert self.open.pop(uid)[3] <= self.now

    @rule()
    def list_again(self) -> None:
        """A list that was asked for just now: pods that ended unseen are gone."""
        self.now += 1
        self.fleet.unlisted(self.bound.keys(), self.now)

    @rule(data=st.data())
    def end_unseen(self, data: Any) -> None:
        """A confirmed pod ends while the watch is silent; a list without it follows."""
        if unseen := sorted(self.bound.keys() - self.shown.keys()):
            del self.bound[data.draw(st.sampled_from(unseen))]
            self.list_again()

    @rule(node=st.sampled_from(NODES), index=st.integers(0, GPUS - 1))
    def break_or_mend(self, node: str, index: int) -> None:
        self.broken[node] ^= {index}
        self.tell(node)

    @rule(node=st.sampled_from(NODES))
    def lose_the_node_object(self, node: str) -> None:
        self.fleet.drop_node(node)
        self.tell(node)

    @invariant()
    def nothing_is_sold_twice(self) -> None:
        used: dict[tuple[str, int], list[int]] = {}
        placed = [*self.bound.values(), *((n, d, c) for n, d, c, _ in self.open.values())]
        for node, demand, chosen in placed:
            for slot, indices in zip(demand.slots, chosen, strict=True):
                for index in indices:
                    tally = used.setdefault((node, index), [0, 0])
                    tally[0] += min(CORES, slot.demand.cores)
                    tally[1] += BLOCKS if slot.demand.whole else slot.demand.blocks
        assert all(cores <= CORES and blocks <= BLOCKS for cores, blocks in used.values())
        for node in NODES:
            for room in self.fleet.free(node).gpus:
                cores, blocks = used.get((node, room.index), (0, 0))
                assert (room.cores, room.untouched) == (CORES - cores, not cores)
                assert room.blocks == (0 if cores == CORES and blocks == BLOCKS else BLOCKS - blocks)

    def teardown(self) -> None:
        """When everything has ended everything is free."""
        if not hasattr(self, "fleet"):
            return
        for uid in [*self.bound, *self.open]:
            self.fleet.drop_pod(uid)
        for node in NODES:
            assert all(room.untouched for room in self.fleet.free(node).gpus)
        assert self.fleet.pods == 0


TestClusters = Clusters.TestCase
TestClusters.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
