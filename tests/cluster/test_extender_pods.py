"""The extender with everything real on one node: kube-scheduler, kubelet, the agent, and pods that run."""

import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.model.placement import ASSIGNED, HINT
from agent.simulator.kubelet.pods import Phase, PodSpec
from tests.cluster import extender_process
from tests.cluster.build import Parts
from tests.cluster.extender_process import Replica, free_port
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import NODE, Cluster
from tests.scenarios.vgpu import BLOCKS, CORE, CORES, GPUS, serving, share

POLICY = "gpu-node-agent.io/placement"
SIZES = (81, 65, 59, 47)


@pytest.fixture(scope="module")
def port() -> int:
    """Where kube-scheduler is told that the extender is."""
    return free_port()


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler asks the extender."""
    with extender_process.directed(parts, port) as running:
        yield running


@pytest.fixture
async def rig(directed: Cluster) -> AsyncIterator[RealRig]:
    """The cluster's own node, with an agent that is not started yet."""
    async with real_rig(directed) as made:
        yield made


@pytest.fixture
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender, serving."""
    made = Replica(directed, port, tmp_path / "extender.log")
    made.start()
    try:
        yield made
    finally:
        made.end(signal.SIGKILL)


def pod(name: str, cores: int, **more: Any) -> PodSpec:
    """A share of cores and of as much memory."""
    return PodSpec(name, (share("main", cores, cores * BLOCKS // CORES),), **more)


async def written(cluster: Cluster, one: PodSpec) -> dict[str, Any]:
    """The pod's annotations once the agent has confirmed the choice."""
    with anyio.fail_after(20):
        while True:
            found = await anyio.to_thread.run_sync(partial(cluster.get, "Pod", one.name))
            annotations: dict[str, Any] = found["metadata"]["annotations"]
            if annotations.get(ASSIGNED) == "true":
                return annotations
            await anyio.sleep(0.1)


async def gpu_of(rig: RealRig, one: PodSpec) -> int:
    """The GPU that a pod holds by the kubelet's records, by index."""
    (uuid,) = {each.partition("::")[0] for each in await rig.held_ids(one, "main", CORE)}
    return rig.gpu_uuids().index(uuid)


async def ignored(cluster: Cluster) -> Sequence[str]:
    """What agents said of choices that they did not follow."""
    events = await anyio.to_thread.run_sync(partial(cluster.find_all, "Event"))
    return [each["message"] for each in events if each["reason"] == "PlacementHintIgnored"]


async def test_agent_follows_the_choice(rig: RealRig, directed: Cluster, replica: Replica) -> None:
    await serving(rig)
    # By itself the agent packs: it would put them all on one GPU.
    pods = [pod(f"apart-{number}", 20, annotations={POLICY: "spread"}) for number in range(3)]
    for one in pods:
        await rig.create_pod(one)
        await rig.wait_phase(one, Phase.RUNNING, 60)
    held = [await gpu_of(rig, one) for one in pods]
    assert len(set(held)) == 3
    assert [int((await written(directed, one))[f"{HINT}0"]) for one in pods] == held
    assert await ignored(directed) == []


async def test_extender_away_agent_still_serves_and_forged_annotation_changes_nothing(
    rig: RealRig, directed: Cluster, replica: Replica
) -> None:
    await serving(rig)
    first = pod("first", 90)
    await rig.create_pod(first)
    await rig.wait_phase(first, Phase.RUNNING, 60)
    await written(directed, first)
    true = await gpu_of(rig, first)
    replica.end(signal.SIGKILL)
    # Bound by somebody else meanwhile.
    preset = pod("preset", 90, node_name="preset")
    await rig.create_pod(preset)
    await rig.wait_phase(preset, Phase.RUNNING, 60)
    forged = {"metadata": {"annotations": {f"{HINT}0": str((true + 4) % GPUS)}}}
    path = directed.api.path("v1", "Pod", "default", first.name)
    await anyio.to_thread.run_sync(partial(directed.api.merge_patch, path, forged))
    await anyio.to_thread.run_sync(replica.start)
    others = [pod(f"other-{number}", 90) for number in range(GPUS - 2)]
    for one in others:
        await rig.create_pod(one)
    for one in others:
        await rig.wait_phase(one, Phase.RUNNING, 90)
    assert len({await gpu_of(rig, one) for one in (first, preset, *others)}) == GPUS
    assert await ignored(directed) == []


async def cordon(cluster: Cluster, closed: bool) -> None:
    """Keep new pods off the node, or let them come."""
    path = cluster.api.path("v1", "Node", None, NODE)
    await anyio.to_thread.run_sync(
        partial(cluster.api.merge_patch, path, {"spec": {"unschedulable": closed or None}})
    )


async def filled(rig: RealRig, cluster: Cluster) -> tuple[list[str], int]:
    """Random shares, all at once, until nothing more starts: pods that died, and cores that run."""
    draw = random.Random(3)
    pods = {f"mix-{number}": draw.choice(SIZES) for number in range(2 * GPUS + 2)}
    # Together: one after another, the node's figures would follow between two bindings.
    await cordon(cluster, closed=True)
    for name, size in pods.items():
        await rig.create_pod(pod(name, size))
    await cordon(cluster, closed=False)
    seen: object = None
    with anyio.move_on_after(100):
        while True:
            now = {name: one[0] for name, one in (await rig.all_pods()).items() if name in pods}
            if now == seen and Phase.RUNNING in now.values():
                break
            seen = now
            await anyio.sleep(8)
    ended = await rig.all_pods()
    died = [f"{name}: {one[1]}" for name, one in ended.items() if name in pods and one[0] is Phase.FAILED]
    return died, sum(pods[name] for name in pods if ended[name][0] is Phase.RUNNING)


async def test_no_admission_failure_at_full_load(rig: RealRig, directed: Cluster, replica: Replica) -> None:
    await serving(rig)
    died, cores = await filled(rig, directed)
    assert died == []
    assert cores >= 0.7 * GPUS * CORES


async def test_the_same_load_without_it_dies_at_admission(cluster: Cluster) -> None:
    async with real_rig(cluster) as rig:
        await serving(rig)
        died, _ = await filled(rig, cluster)
        assert any("UnexpectedAdmissionError" in one for one in died), died


async def test_choice_gone_bad_falls_back(rig: RealRig, directed: Cluster) -> None:
    await serving(rig)
    rig.machine.xid(2, 79)
    await rig.wait_allocatable((GPUS - 1) * CORES, CORE, 30)
    # As it looks to the agent when the GPU failed after the binding.
    late = pod("late", 20, node_name="preset", annotations={f"{HINT}0": "2", ASSIGNED: "false"})
    await rig.create_pod(late)
    await rig.wait_phase(late, Phase.RUNNING, 60)
    assert await gpu_of(rig, late) != 2
    assert (await written(directed, late))[f"{HINT}0"] == str(await gpu_of(rig, late))
    with anyio.fail_after(20):
        while not await ignored(directed):
            await anyio.sleep(0.2)
    assert "the scheduler chose GPU 2" in (await ignored(directed))[0]
