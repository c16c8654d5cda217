"""A kubelet that hears nothing of the API server while the agent does: after its restart it lists nobody."""

import json
from collections.abc import Collection
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps.processes import identify
from agent.node.conditions import STATE_ANNOTATION
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.cluster.cutting import kubelets_way
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios.rig import GPU
from tests.scenarios.vgpu import BLOCKS, GPUS, MEMORY, gpu_of, offered, running, share_pod

LABEL = "nvidia-device-enable"
BLIND_SECONDS = 60.0
BACK_SECONDS = 90.0  # until the kubelet has taken all its pods up again, and new ones run


def inodes(run: Path) -> dict[str, int]:
    """The limit files of all containers."""
    return {str(file): file.stat().st_ino for file in (run / "limits").glob("*/limits")}


def alive(pids: Collection[int]) -> bool:
    return all(identify(pid) for pid in pids)


async def active(rig: RealRig) -> dict[str, str]:
    """The mode of each GPU by UUID, as the Node object shows it."""
    state = json.loads((await rig.node()).annotations.get(STATE_ANNOTATION, "{}"))
    uuids = rig.gpu_uuids()
    return {uuids[int(index)]: gpu["active"] for index, gpu in state.get("gpus", {}).items()}


@pytest.mark.timeout(600)
async def test_kubelet_without_api_server(patient: Cluster) -> None:
    """Pods run on, nothing is handed out twice, limits stay; a switch waits for pods that nobody lists."""
    async with real_rig(patient) as rig, kubelets_way(patient, rig) as way:
        library = rig.folder / "library.so"
        await anyio.to_thread.run_sync(library.write_bytes, b"\x7fELF")
        settings = {"vgpu.enforcement": "library", "vgpu.library": str(library)}
        await rig.start_agent({"defaultMode": "vgpu", **settings, **await rig.api_access()})
        await offered(rig, GPUS * BLOCKS)
        holders = [share_pod(f"holder-{number}", 90, 400) for number in range(3)]
        await running(rig, *holders)
        gpus = {await gpu_of(rig, pod) for pod in holders}
        units = {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in holders}
        pids = [await rig.container_pid(pod, "main") for pod in holders]
        limits = await anyio.to_thread.run_sync(inodes, rig.run_folder)
        assert (len(gpus), len(limits)) == (3, 3)

        way.cut()
        await anyio.to_thread.run_sync(patient.restart_kubelet)
        await rig.set_labels({LABEL: "pgpu"})
        with anyio.move_on_after(BLIND_SECONDS):
            while True:
                await anyio.sleep(1.0)
                assert await anyio.to_thread.run_sync(inodes, rig.run_folder) == limits
                seen = await active(rig)
                assert {seen[gpu] for gpu in gpus} == {"vgpu"}, seen
                assert await anyio.to_thread.run_sync(alive, pids)
        assert not any([await rig.held_ids(pod, "main", MEMORY) for pod in holders]), "the kubelet lists them"

        way.mend()
        whole = [PodSpec(f"whole-{number}", (ContainerSpec("main", {GPU: 1}),)) for number in range(GPUS)]
        for pod in whole:
            await rig.create_pod(pod)
        fit = GPUS - len(gpus)
        with anyio.fail_after(BACK_SECONDS):
            while sum([await rig.phase(pod) is Phase.RUNNING for pod in whole]) < fit:
                await anyio.sleep(0.5)
            while {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in holders} != units:
                await anyio.sleep(0.5)
        phases = [await rig.phase(pod) for pod in (*holders, *whole)]
        assert phases.count(Phase.RUNNING) == len(holders) + fit
        assert phases.count(Phase.PENDING) == len(whole) - fit
        given = [await rig.held_ids(pod, "main") for pod in whole]
        assert len(frozenset().union(*given)) == fit
        assert not gpus & frozenset().union(*given)
        assert await anyio.to_thread.run_sync(inodes, rig.run_folder) == limits
        assert [await rig.container_pid(pod, "main") for pod in holders] == pids
        # Each GPU follows when its holder has ended.
        for pod in holders:
            await rig.delete_pod(pod)
        for pod in whole:
            await rig.wait_phase(pod, Phase.RUNNING, BACK_SECONDS)
