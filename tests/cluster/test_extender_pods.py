"""The extender with everything real on three nodes: kube-scheduler, kubelets, agents, and pods that run."""

import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.model.placement import ASSIGNED, HINT
from agent.model.pod import WAITING_FOR_GPU
from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from tests.cluster import extender_process
from tests.cluster.build import Parts
from tests.cluster.extender_process import Pair, Replica, pair
from tests.cluster.extender_site import ALL, BLOCKS, GPUS, NODES, Place, Site, sited, three
from tests.cluster.rig import Cluster
from tests.cluster.rig_node import RigNode
from tests.scenarios.holders import freed_gpu_goes_to_the_waiting_pod
from tests.scenarios.load import full_load_with_departures
from tests.scenarios.vgpu import CORE, CORES, MEMORY, share

LIMIT = 300
"""Seconds for the body of one test (see conftest.py)."""
LOAD_SECONDS = 120.0
POLICY = "gpu-node-agent.io/placement"
LARGE = (81, 65, 59, 47)  # all but two of the smallest have a GPU to themselves
SMALL = (47, 32, 23)


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler asks the extender."""
    with extender_process.directed(parts, port) as running:
        yield running


@pytest.fixture(scope="module")
def nodes(directed: Cluster) -> Iterator[Sequence[RigNode]]:
    """Its three nodes."""
    with three(directed) as found:
        yield found


@pytest.fixture
async def site(directed: Cluster, nodes: Sequence[RigNode]) -> AsyncIterator[Site]:
    """Three nodes, whose agents are not started yet."""
    async with sited(directed, nodes) as made:
        yield made


@pytest.fixture
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender, serving."""
    with extender_process.serving(directed, port, tmp_path / "extender.log") as made:
        yield made


@pytest.fixture
def replicas(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Pair]:
    """Two replicas, one of which leads."""
    with pair(directed, port, tmp_path) as both:
        yield both


def pod(name: str, cores: int, **more: Any) -> PodSpec:
    """A share of cores and of as much memory."""
    return PodSpec(name, (share("main", cores, cores * BLOCKS // CORES),), **more)


async def test_agent_follows_the_choice(site: Site, replica: Replica) -> None:
    await site.serving()
    # By itself an agent packs: it would put the pods of a node on one GPU.
    pods = [pod(f"apart-{number}", 20, annotations={POLICY: "spread"}) for number in range(2 * NODES)]
    for one in pods:
        await site.create(one)
        await site.running(one)
    held = [await site.place(one) for one in pods]
    assert len(set(held)) == 2 * NODES
    assert [int((await site.written(one))[f"{HINT}0"]) for one in pods] == [gpu for _, gpu in held]
    assert await site.ignored() == []


async def test_extender_away_agent_still_serves(site: Site, replica: Replica) -> None:
    await site.serving()
    first = pod("first", 90)
    await site.create(first)
    await site.running(first)
    replica.end(signal.SIGKILL)
    # Bound by another scheduler meanwhile; pods that need the extender wait for it.
    preset, waits = pod("preset", 90, node_name="node2"), pod("waits", 90)
    await site.create(waits, preset)
    await site.running(preset)
    assert await site.one.phase(waits) is Phase.PENDING
    await anyio.to_thread.run_sync(replica.start)
    others = [pod(f"other-{number}", 90) for number in range(ALL - 3)]
    await site.create(*others)
    await site.running(waits, *others, deadline=90)
    assert len({await site.place(one) for one in (first, preset, waits, *others)}) == ALL
    assert await site.ignored() == []


async def test_forged_annotation_changes_nothing(site: Site, replicas: Pair) -> None:
    await site.serving()

    async def forge(one: PodSpec, gpu: int) -> None:
        forged = {"metadata": {"annotations": {f"{HINT}0": str(gpu), ASSIGNED: "true"}}}
        path = site.cluster.api.path("v1", "Pod", "default", one.name)
        await anyio.to_thread.run_sync(partial(site.cluster.api.merge_patch, path, forged))

    # Brought along by the pod, and written over what its node's agent wrote.
    liars = [pod(f"liar-{n}", 90, annotations={f"{HINT}0": "3", ASSIGNED: "true"}) for n in range(2)]
    for one in liars:
        await site.create(one)
        await site.running(one)
        _, true = await site.place(one)
        await site.written(one)
        await forge(one, (true + 2) % GPUS)
    before = [pod(f"before-{n}", 90) for n in range(2)]
    await site.create(*before)
    await site.running(*before)
    replicas.leader.end(signal.SIGKILL)
    after = [pod(f"after-{n}", 90) for n in range(ALL - 4)]
    await site.create(*after)
    await site.running(*after, deadline=90)
    assert len({await site.place(one) for one in (*liars, *before, *after)}) == ALL
    assert await site.ignored() == []


@dataclass(frozen=True, slots=True)
class Load:
    """Pods that died by name, with the reason; cores on each GPU; sizes that still wait."""

    died: Mapping[str, str]
    offered: Mapping[Place, int]
    waiting: Sequence[int]
    unsettled: Sequence[str]  # bound and not running yet, or running where the agent has not written yet

    @property
    def full(self) -> bool:
        """Whether nothing more will happen: no pod that waits fits on any GPU."""
        used = sorted(self.offered.values()) if len(self.offered) == ALL else [0]
        most = CORES - used[0]
        return not self.unsettled and all(size > most for size in self.waiting)


async def looked_at(cluster: Cluster, sizes: Mapping[str, int]) -> Load:
    """The pods as the API server has them now."""
    died: dict[str, str] = {}
    offered: Counter[Place] = Counter()
    waiting: list[int] = []
    unsettled: list[str] = []
    for found in await anyio.to_thread.run_sync(partial(cluster.find_all, "Pod")):
        name, annotations = found["metadata"]["name"], found["metadata"].get("annotations", {})
        phase = Phase(found["status"]["phase"])
        if name not in sizes:
            continue
        if phase is Phase.FAILED:
            died[name] = f"{found['status'].get('reason')}: {found['status'].get('message')} {annotations}"
        elif not found["spec"].get("nodeName"):
            waiting.append(sizes[name])
        elif phase is Phase.RUNNING and annotations.get(ASSIGNED) == "true":
            offered[found["spec"]["nodeName"], int(annotations[f"{HINT}0"])] += sizes[name]
        else:
            unsettled.append(f"{name} {phase.value} {annotations}")
    return Load(died, offered, waiting, unsettled)


async def come(site: Site, sizes: Mapping[str, int]) -> None:
    """Shares, all at once: one after another, the nodes' figures would follow between two bindings."""
    await site.cordon(closed=True)
    await site.create(*(pod(name, size) for name, size in sizes.items()))
    await site.cordon(closed=False)


async def until(
    site: Site, sizes: Mapping[str, int], reached: Callable[[Load], bool], deadline: float = 120.0
) -> Load:
    """Look until a state is reached."""
    with anyio.move_on_after(deadline):
        while not reached(found := await looked_at(site.cluster, sizes)):
            await anyio.sleep(0.2)
        return found
    raise TimeoutError(f"not within {deadline:g} s; last seen: {await looked_at(site.cluster, sizes)}")


def mixed(sizes: Sequence[int], count: int) -> Mapping[str, int]:
    """Names and sizes of a random mix."""
    draw = random.Random(3)
    return {f"mix-{number}": draw.choice(sizes) for number in range(count)}


async def test_no_admission_failure_at_full_load(site: Site, replica: Replica) -> None:
    await site.serving()
    sizes = mixed(LARGE, 2 * ALL + 2)
    await come(site, sizes)
    # How much is offered in the end depends on the order in which kube-scheduler takes the pods.
    load = await until(site, sizes, lambda load: load.full or bool(load.died))
    assert not load.died
    assert load.waiting
    assert max(load.offered.values()) <= CORES
    assert await site.ignored() == []


async def test_the_same_load_without_it_dies_at_admission(cluster: Cluster) -> None:
    with three(cluster) as nodes:
        async with sited(cluster, nodes) as site:
            await site.serving()
            sizes = mixed(LARGE, 2 * ALL + 2)
            await come(site, sizes)
            load = await until(site, sizes, lambda load: load.full or bool(load.died))
            assert any("UnexpectedAdmissionError" in why for why in load.died.values()), load


async def test_leader_dies_in_mid_burst(site: Site, replicas: Pair) -> None:
    await site.serving()
    sizes = mixed(SMALL, 3 * ALL + 4)
    await come(site, sizes)
    half = await until(site, sizes, lambda load: len(sizes) - len(load.waiting) >= ALL // 2)
    replicas.leader.end(signal.SIGKILL)
    assert half.waiting, "all were bound before the leader died"
    load = await until(site, sizes, lambda load: load.full or bool(load.died))
    assert not load.died
    assert max(load.offered.values()) <= CORES
    assert len(load.waiting) < len(half.waiting), "the new leader bound nothing"
    assert await site.ignored() == []


async def test_choice_gone_bad_falls_back(site: Site) -> None:
    await site.serving()
    site.rigs["node2"].machine.xid(2, 79)
    await site.rigs["node2"].wait_allocatable((GPUS - 1) * CORES, CORE, 30)
    # As it looks to the agent when the GPU failed after the binding.
    late = pod("late", 20, node_name="node2", annotations={f"{HINT}0": "2", ASSIGNED: "false"})
    await site.create(late)
    await site.running(late)
    _, gpu = await site.place(late)
    assert gpu != 2
    assert (await site.written(late))[f"{HINT}0"] == str(gpu)
    with anyio.fail_after(20):
        while not await site.ignored():
            await anyio.sleep(0.2)
    assert "the scheduler chose GPU 2" in (await site.ignored())[0]


async def test_waiting_pod_gets_the_freed_gpu(site: Site, replica: Replica) -> None:
    await site.offered(site.one)
    await freed_gpu_goes_to_the_waiting_pod(site.one, GPUS, BLOCKS)
    assert await site.ignored() == []


async def test_pod_event_says_why(site: Site, replica: Replica) -> None:
    await site.serving()
    full = [pod(f"full-{number}", 60) for number in range(ALL)]
    await site.create(*full)
    await site.running(*full)
    # In total there is room for each of these, on a single GPU for none.
    waits = pod("waits", 60)
    refused, lone = pod("refused", 60, node_name="node2"), pod("lone", 20, node_name="node2")
    await site.create(refused)
    await site.one.wait_phase(refused, Phase.FAILED)  # while it is bound, what it holds is not known yet
    await site.create(waits)
    waiting = await site.events(waits, WAITING_FOR_GPU)
    assert waiting["message"] == (
        f"no node has room now for 60 {CORE} and 36 {MEMORY} of one GPU: largest free share 40 of 60 cores "
        f"({NODES} nodes); ask for less, or wait: the pod starts when enough is free"
    )
    assert waiting["source"]["component"] == "gpu-node-agent-extender"
    why = await site.events(refused, "AllocationRefused")
    assert why["source"] == {"component": "gpu-node-agent", "host": "node2"}
    for words in (
        "60 cores and 36 memory blocks do not fit on any single GPU: the largest free share is 40 cores",
        "ask for less, or create the pod again when others have ended",
    ):
        assert words in why["message"]
    # Tried again and again, reported once; and explained from the command line, the dead one too.
    await site.create(lone)
    await site.running(lone)
    assert (await site.events(waits, WAITING_FOR_GPU))["count"] == 1
    explained = await site.explained(refused)
    assert explained[0] == "pod default/refused was refused at admission by node2 and never started"
    assert why["message"][:60] in explained[1]
    assert any("largest free share 40 of 60 cores" in line for line in explained)
    assert "it fits on none of" in (await site.explained(waits))[1]


async def test_full_load_with_departures(site: Site, replica: Replica) -> None:
    await site.serving()
    await full_load_with_departures(site.one, ALL, BLOCKS, LOAD_SECONDS)
    assert await site.ignored() == []
