"""A pod that names another one's UID as its own `kubernetes.io/config.hash` gets nothing by it."""

import datetime as dt
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.app.build_telemetry import _known_pods
from agent.cluster.pods import PodCache
from agent.model.cgroup import ContainerRef
from agent.model.modes import Mode
from agent.model.pod import ContainerSpec, ContainerStatus, Metadata, OwnerReference, Pod, PodSpec, PodStatus
from agent.mps.pods import pod_facts
from agent.nvml.port import GpuProcess, Sample
from agent.pairing.cluster_pods import ClusterPods
from agent.telemetry.containers import Attribution, ContainerShare, attribute
from tests.unit.mps.test_clients import ID, Scene, uid

VICTIM, FORGER = uid(1), uid(2)
MIB = 1 << 20
# A tenant may write owner references as well, and read a Node's UID off any mirror pod.
NODE = OwnerReference("v1", "Node", "node", "node-uid", controller=True)


def _forger(owners: list[OwnerReference], **metadata: Any) -> Pod:
    both = {"kubernetes.io/config.hash": VICTIM, "kubernetes.io/config.mirror": VICTIM}
    return Pod(
        Metadata("sleep", "team-b", FORGER, annotations=both, owner_references=owners, **metadata),
        PodSpec([ContainerSpec("main")], node_name="node"),
        PodStatus("Running"),
    )


def _pods(forger: Pod) -> PodCache:
    cache = PodCache(None, "node", lambda: "node-uid")  # type: ignore[arg-type]
    victim = Pod(
        Metadata("training", "team-a", VICTIM),
        PodSpec([ContainerSpec("main")], node_name="node"),
        PodStatus("Running", container_statuses=[ContainerStatus("main", f"containerd://{ID}")]),
    )
    # Whichever comes last would win, were they taken as they come.
    cache.reflector.items.publish({VICTIM: victim, FORGER: forger})
    cache.reflector.synced, cache.reflector.problem = True, None
    return cache


@pytest.mark.parametrize("owners", [[], [NODE]], ids=["annotations", "annotations and owner"])
async def test_forged_config_hash_changes_nothing(owners: list[OwnerReference], tmp_path: Path) -> None:
    # Its clients are not ended with the forger's pod.
    soon = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)).isoformat()
    deleted = _forger(owners, deletion_timestamp=soon, deletion_grace_period_seconds=1)
    before = _pods(deleted)
    scene = Scene(tmp_path, ["training"])
    scene.process(101, 1)
    scene.watch.pods = pod_facts(before)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.watch.run)
        await anyio.sleep(0.6)  # one look of those who end clients, at the least
        group.cancel_scope.cancel()
    assert scene.control.terminated == []
    assert [client.pod for client in (await scene.look()).clients] == ["team-a/training"]

    # It has not ended because the forger has, and the forger is not taken for it.
    pods = _pods(_forger(owners))
    assert not ClusterPods(pods).view().ended(VICTIM)
    assert not ClusterPods(pods).view().ended(FORGER)
    gone = Pod(deleted.metadata, deleted.spec, PodStatus("Succeeded"))
    assert not ClusterPods(_pods(gone)).view().ended(VICTIM)
    assert ClusterPods(_pods(gone)).view().ended(FORGER)

    # What it uses of its GPU stays its own.
    known = _known_pods(before)()
    shares = [
        ContainerShare(namespace, pod, "main", "GPU-1", 0, Mode.MPS, 0.5, 1024 * MIB)
        for namespace, pod in (("team-a", "training"), ("team-b", "sleep"))
    ]
    sample = Sample(0.25, None, 700 * MIB, 80 << 30, None, None, processes=(GpuProcess(101, 700 * MIB),))
    owned = {101: ContainerRef(VICTIM, ID)}
    found = attribute(shares, sample, {101: 0.25}, owned, known)
    assert [(use.share.pod, use.memory, use.utilization) for use in found.uses] == [
        ("training", 700 * MIB, 0.25),
        ("sleep", 0, 0.0),
    ]
    assert found.uses[0].memory_grade is Attribution.MEASURED
