"""The first pod of a name came and went while the watch said nothing: the next one is served as itself."""

from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest

from agent.cluster.api import ApiError
from agent.cluster.pods import PodCache
from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import Entries
from agent.model.holding import Holding, PairMember, Record
from agent.model.pod import VGPU, Container, Pod, Stage
from agent.pairing.cluster_pods import ClusterPods
from agent.pairing.pair_rules import PairRules
from agent.pairing.pairing import Pairing
from agent.pairing.resolver import PairRefused, RequesterResolver
from tests.pods import changed
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


class Node:
    """A kubelet's list and checkpoint, the API server's pods, and an agent whose watch is mute."""

    def __init__(self, *listed: Pod) -> None:
        self.listed, self.api = listed, {each.key: each for each in listed}
        self.held: list[Holding] = []  # by the kubelet's list
        self.entries: dict[tuple[str, str, str], frozenset[str]] = {}
        self.gets: list[tuple[str, str]] = []
        self.cache = PodCache(cast("Any", None), "node1")
        self.cache.fetch = self._fetch  # type: ignore[method-assign]
        self.cache.reflector.synced, self.cache.reflector.problem = True, None
        source = ClusterPods(self.cache)
        record = HoldingsWatch(cast("Any", self))
        record._entries = self._entries  # type: ignore[method-assign]
        source.inform(record)
        model = KubeletModel(gpus=1)
        self.pairing = Pairing(PairRules(VGPU), RequesterResolver(VGPU, record, source))
        self.pairing.set_pools(model.pairing.ledger.pools.values())
        self.free = sorted(model.free_cores())

    def watched(self, *pods: Pod) -> None:
        """The watch's copy."""
        self.cache.reflector.items.publish({each.uid: each for each in pods})

    def holds(self, pod: Pod, container: str, units: frozenset[str]) -> None:
        """The kubelet lists cores of a container, and has written them down."""
        self.held = [Holding(*pod.key, container, VGPU.core, tuple(units))]
        self.entries[pod.uid, container, VGPU.core] = units

    path = None

    async def list(self, deadline: float) -> Record:
        """A reading of PodResources, which show no plain init container."""
        del deadline
        await anyio.lowlevel.checkpoint()
        names = [
            (*pod.key, each.name)
            for pod in self.listed
            for each in pod.containers
            if each.stage is not Stage.INIT
        ]
        return Record(tuple(self.held), tuple(names))

    async def _entries(self) -> Entries:
        return dict(self.entries)

    async def _fetch(self, namespace: str, name: str) -> Pod | None:
        self.gets.append((namespace, name))
        return self.api.get((namespace, name))

    async def ask(self, cores: int) -> str:
        """UID of the pod that is granted so many."""
        ids = await self.pairing.prefer(PairMember.CORE, cores, self.free)
        return (await self.pairing.allocate(PairMember.CORE, ids)).pod.uid


def bound(uid: str, *containers: Container, **traits: Any) -> Pod:
    """A pod of the name `web-0` that is bound to the node."""
    return bind(pod("web-0", *containers, uid=uid, **traits))


def bind(made: Pod) -> Pod:
    """The pod, bound to the node."""
    return msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, node_name="node1"))


async def replaced(before: Pod, after: Pod, *, shown: bool) -> Node:
    """The kubelet goes from one pod to the next of its name; the watch says nothing, or shows the first."""
    node = Node(before)
    last = before.containers[-1].name
    held = frozenset(node.free[:20])
    for each in before.containers[:-1]:
        node.entries[before.uid, each.name, VGPU.core] = held
    node.holds(before, last, held)
    if shown:
        node.watched(before)
    await node.pairing.reconcile()
    node.listed, node.held, node.api = (after,), [], {after.key: after}
    return node


BARE = (share("main", 20, 5),)
PREPARED = (share("prepare", 20, 5, Stage.INIT), share("main", 20, 5))


@pytest.mark.parametrize(
    ("containers", "phase", "shown"),
    [
        (BARE, "Pending", False),
        (BARE, "Pending", True),
        (BARE, "Running", True),
        (PREPARED, "Pending", False),
        (PREPARED, "Running", True),
    ],
)
@in_virtual_time
async def test_the_next_pod_of_a_name_is_served_though_the_checkpoint_names_the_one_before(
    containers: tuple[Container, ...], phase: str, *, shown: bool
) -> None:
    """As storm 1000123: what the first held counted as the next one's, and nobody was left to ask."""
    before, after = bound("uid-1", *containers, phase=phase), bound("uid-2", *containers)
    node = await replaced(before, after, shown=shown)
    node.entries = {key: ids for key, ids in node.entries.items() if key[1] != "main" or containers is BARE}
    assert await node.ask(20) == "uid-2"
    # Once for the one before, once for the next, in each of both calls at most.
    assert len(node.gets) <= 4


TWO = (share("side", 20, 5), share("main", 20, 5))


@pytest.mark.parametrize("watch", ["broken", "mute", "well again"])
@in_virtual_time
async def test_the_next_pod_of_a_name_is_served_in_order_though_the_checkpoint_names_one_refused_midway(
    watch: str,
) -> None:
    """The first container of the one before had its units, the second was refused: so it is with the next."""
    before, after = bound("uid-1", *TWO), bound("uid-2", *TWO)
    node = Node(before)
    if watch == "well again":
        node.cache.reflector.problem = "interrupted"  # it has never shown the one before
    else:
        node.watched(before)
    node.holds(before, "side", frozenset(node.free[:20]))
    await node.pairing.reconcile()
    node.cache.reflector.problem = "interrupted" if watch == "broken" else None
    if watch == "well again":
        node.watched(after)
    node.listed, node.held, node.api = (after,), [], {after.key: after}
    ids = await node.pairing.prefer(PairMember.CORE, 20, node.free)
    grant = await node.pairing.allocate(PairMember.CORE, ids)
    assert (grant.pod.uid, grant.container) == ("uid-2", "side")
    assert len(node.gets) <= 3


@in_virtual_time
async def test_both_halves_of_the_next_pod_of_a_name_are_its_init_containers() -> None:
    """They were two containers', on two GPUs: only the smaller one fits beside the other pod."""
    uids = ("uid-1", "uid-2")
    before, after = (bound(uid, share("prepare", 20, 10, Stage.INIT), share("main", 20, 5)) for uid in uids)
    other = bind(pod("other", share("main", 10, 25), phase="Running", started=True))
    node = Node(before, other)
    first, second = pools = list(KubeletModel(gpus=2).pairing.ledger.pools.values())
    node.pairing.set_pools(pools)
    node.watched(before, other)
    for uid, container, pool, count, blocks in (
        (other.uid, "main", first, 10, 25),
        ("uid-1", "prepare", second, 20, 10),
    ):
        node.entries[uid, container, VGPU.core] = frozenset(pool.cores[:count])
        node.entries[uid, container, VGPU.memory] = frozenset(pool.blocks[:blocks])
    both = ((VGPU.core, first.cores[:10]), (VGPU.memory, first.blocks[:25]))
    node.held = [Holding(*other.key, "main", resource, ids) for resource, ids in both]
    await node.pairing.reconcile()
    node.pairing.turn_away(before, "no room")
    node.listed, node.api = (after, other), {after.key: after, other.key: other}
    grants = []
    for member, size in ((PairMember.CORE, 20), (PairMember.MEMORY, 10)):
        held = {each for _, ids in both for each in ids}
        free = sorted({each for pool in pools for each in pool.ids(member)} - held)
        ids = await node.pairing.prefer(member, size, free)
        grants.append(await node.pairing.allocate(member, ids))
    assert [(each.pod.uid, each.container) for each in grants] == [("uid-2", "prepare")] * 2
    assert grants[0].gpus == grants[1].gpus
    assert grants[1].complete


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("ending", [False, True])
@in_virtual_time
async def test_one_that_was_rejected_does_not_get_the_share_of_anothers_successor(
    *, ending: bool, refused: bool
) -> None:
    """Kubelets before 1.34 list it on; the watch shows neither its end nor the next pod of the other name."""
    before, after = bound("uid-1", *BARE, phase="Running", started=True), bound("uid-2", *BARE)
    waits = bind(pod("waits", *BARE))
    node = Node(before)
    node.watched(before)
    node.holds(before, "main", frozenset(node.free[:20]))
    await node.pairing.reconcile()
    node.listed = (before, waits)
    node.watched(bind(changed(before, ending=ending)), waits)
    await node.pairing.reconcile()
    if refused:
        node.pairing.turn_away(waits, "no room")
    node.listed, node.held = (after, waits), []
    node.api = {after.key: after, waits.key: changed(waits, phase="Failed")}
    if refused:
        assert await node.ask(20) == "uid-2"
        return
    with pytest.raises(PairRefused, match="nothing is guessed"):  # it looks like one that asks
        await node.ask(20)


@pytest.mark.parametrize("problem", [None, "interrupted"])
@in_virtual_time
async def test_a_server_that_does_not_answer_keeps_no_init_containers_heir_waiting(
    problem: str | None,
) -> None:
    """Nothing is learnt of the one before it, and it is served as one that waits by the copy."""
    before, other = bound("uid-1", *PREPARED), bind(pod("other", *BARE, phase="Running", started=True))
    node = Node(before, other)
    node.watched(before, other)
    node.entries["uid-1", "prepare", VGPU.core] = frozenset(node.free[:20])
    node.holds(other, "main", frozenset(node.free[20:40]))
    await node.pairing.reconcile()
    node.cache.reflector.problem = problem

    async def away(namespace: str, name: str) -> Pod | None:
        node.gets.append((namespace, name))
        await anyio.sleep(0.5)
        node.watched(before)  # the other one ends meanwhile
        await anyio.sleep(0.5)
        raise ApiError(f"pod {namespace}/{name}: connection refused")

    node.cache.fetch = away  # type: ignore[method-assign]
    began = anyio.current_time()
    assert await node.ask(20) == "uid-1"
    assert anyio.current_time() - began <= (2.1 if problem else 0.0)
    assert problem or not node.gets


@pytest.mark.parametrize("last", [False, True])
@in_virtual_time
async def test_the_next_pod_of_a_name_asks_for_what_no_copy_of_a_mute_watch_does(*, last: bool) -> None:
    """As storm 1000123: the copy is of the one before, which wanted less and was deleted by force."""
    before = bound("uid-1", *BARE, phase="Running")
    after = bound("uid-2", share("prepare", 30, 5, Stage.INIT), share("main", 30, 5))
    node = await replaced(before, after, shown=True)
    node.entries = {}
    if not last:  # the kubelet has listed another one since, and both names stay
        other = pod("other", Container("main", {}))
        node.listed = (before, other)
        node.watched(before, other)
        await node.pairing.reconcile()
        node.listed, node.api[other.key] = (after, other), bind(other)
    assert await node.ask(30) == "uid-2"
    assert len(node.gets) <= 4


@pytest.mark.parametrize("named", [True, False])
@in_virtual_time
async def test_the_next_pod_of_a_name_is_served_beside_one_that_runs(*, named: bool) -> None:
    """The one that runs was admitted without its resource: it is found, and is not the only one."""
    before, after = bound("uid-1", *BARE, phase="Running", started=True), bound("uid-2", *BARE)
    runs = bind(pod("runs", *BARE, phase="Running", started=True))
    node = await replaced(before, after, shown=True)
    node.watched(before, runs)
    node.listed, node.api[runs.key] = (after, runs), runs
    if not named:  # by the checkpoint
        node.entries = {}
    assert await node.ask(20) == "uid-2"
    assert len(node.gets) <= 6


@in_virtual_time
async def test_holder_that_lives_keeps_what_the_kubelet_does_not_list() -> None:
    """And it is asked for once in a call, however often that looks."""
    before = bound("uid-1", *BARE, phase="Running")
    node = await replaced(before, before, shown=False)
    with pytest.raises(PairRefused, match="no pod of this node is known to wait"):
        await node.ask(20)
    assert node.gets == [before.key]
