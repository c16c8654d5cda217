"""A kubelet that lost its checkpoint lists running pods without devices, and offers these to anybody."""

import os
import signal
from contextlib import suppress

import anyio
import pytest

from agent.holdings.record import FILE_NAME
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.cluster.real_rig import real_rig
from tests.cluster.rig import Cluster
from tests.scenarios.rig import GPU
from tests.scenarios.vgpu import GPUS, running

BACK_SECONDS = 90.0  # until the kubelet has taken all its pods up again, and a container has started again


@pytest.mark.timeout(400)
async def test_kubelet_without_its_checkpoint(patient: Cluster) -> None:
    """Its pods run on, and nobody else is given their GPUs; a container that starts again has its own."""
    async with real_rig(patient) as rig:
        await rig.start_agent({"defaultMode": "pgpu", **await rig.api_access()})
        await rig.wait_allocatable(GPUS)
        main = (ContainerSpec("main", {GPU: 1}),)
        pods = [PodSpec(f"holder-{number}", main, restart_policy="Always") for number in range(GPUS)]
        await running(rig, *pods)
        given = {pod.name: await rig.held_ids(pod, "main") for pod in pods}
        pids = {pod.name: await rig.container_pid(pod, "main") for pod in pods}

        # As many do with a kubelet that does not start.
        await rig.restart_kubelet(meanwhile=(patient.kubelet_root / "device-plugins" / FILE_NAME).unlink)
        # Of free GPUs the first would be given: those of others come before theirs.
        uuids = rig.gpu_uuids()
        *others, crashed, ended = sorted(
            pods, key=lambda pod: [uuids.index(each) for each in given[pod.name]]
        )
        await rig.delete_pod(ended, BACK_SECONDS)
        alive = (*others, crashed)
        assert not any([await rig.held_ids(pod, "main") for pod in alive]), "the kubelet knows them still"

        new = PodSpec("new", main)
        await rig.create_pod(new)
        await rig.wait_phase(new, Phase.RUNNING, BACK_SECONDS)
        assert await rig.held_ids(new, "main") == given[ended.name]

        os.kill(pids[crashed.name], signal.SIGKILL)
        with anyio.fail_after(BACK_SECONDS):
            while await rig.held_ids(crashed, "main") != given[crashed.name]:
                await anyio.sleep(0.5)
        with anyio.fail_after(BACK_SECONDS):
            again = pids[crashed.name]
            while again == pids[crashed.name]:
                await rig.wait_running(crashed, "main", BACK_SECONDS)
                with suppress(AssertionError):  # its status may still name the container that was killed
                    again = await rig.container_pid(crashed, "main")
                await anyio.sleep(0.2)
        assert {pod.name: await rig.container_pid(pod, "main") for pod in others} == {
            pod.name: pids[pod.name] for pod in others
        }
