"""State that outlives an agent, and state that does not: on the embedded kubelet, with the real process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread

from agent.modes.desired import LABEL
from agent.modes.withholding import ANNOTATION
from agent.mps import processes
from agent.mps.directories import Directories
from agent.node.conditions import CONDITION, MODE_LABEL, STATE_ANNOTATION
from agent.simulator.kubelet.pod_specs import Phase
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.test_status import command
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.modes import serving
from tests.scenarios.rig import GPU
from tests.scenarios.skeleton import gpu_pod

QUIET: Mapping[str, object] = {"health__kernelLog": None, "modes__mps": False}


@asynccontextmanager
async def node_of(**settings: object) -> AsyncIterator[tuple[EmbeddedRig, ModeNode]]:
    async with embedded_rig() as rig, mode_node(rig, **{**QUIET, **settings}) as node:
        yield rig, node


async def test_renamed_layout_survives_a_restart() -> None:
    layout = [{"gpus": ["0-4"], "mode": "pgpu"}, {"gpus": ["rest"], "mode": "off"}]
    async with node_of(layouts={"mixed": layout}) as (rig, node):
        await node.want("mixed")
        await node.applied("mixed")
        await rig.wait_allocatable(5, GPU)
        assert await rig.stop_agent() == 0
        await node.start(layouts={"mixed2": layout})
        seen = await node.reach("blocked", "mixed")
        assert "'mixed' is unknown; use one of" in seen["message"]
        await rig.wait_allocatable(5, GPU)
        await node.want("mixed2")
        await node.applied("mixed2")
        await rig.wait_allocatable(5, GPU)


async def test_label_removed_leaves_nothing() -> None:
    async with node_of(modes__mps=True) as (rig, node):
        await serving(node, "mps")
        before = await rig.node()
        assert before.labels[MODE_LABEL] == "mps"
        rig.http.set_annotation(ANNOTATION, "")  # a person's, and stays
        await node.want(None)
        # As long as it has something to give back, the DaemonSet's affinity keeps it here.
        await node.applied("none")
        assert await rig.stop_agent() == 0  # the DaemonSet controller ends it
        after = await rig.node()
        ours = ("gpu-node-agent.io/", "nvidia.com/", "cuda-")
        assert [key for key in after.labels if key.startswith(ours)] == []
        assert (LABEL in after.labels, set(after.annotations), CONDITION in after.conditions) == (
            False,
            {ANNOTATION},
            False,
        )
        for uuid in rig.gpu_uuids():
            pipe = Directories.of(node.folder, uuid).pipe
            assert await anyio.to_thread.run_sync(processes.daemons, pipe) == ()
        assert {gpu.compute_mode for gpu in rig.machine.mapping.state.gpus} == {0}
        # Where the node is labelled again, everything is there again.
        await node.start()
        await serving(node, "pgpu")
        assert STATE_ANNOTATION in (await rig.node()).annotations


async def test_cordoned_gpu() -> None:
    async with node_of() as (rig, node):
        await serving(node, "pgpu")
        pod = gpu_pod("train", 1)
        await node.create(pod)
        await rig.wait_phase(pod, Phase.RUNNING)
        index = await node.index_of(pod)
        code, text = await command(rig, "cordon", str(index), "--reason", "the fan is noisy")
        assert code == 0, text
        assert "pods on it go on until they end: default/train" in text
        await rig.wait_allocatable(7, GPU)
        seen = await _state_with_reason(node, index)
        assert seen["reason"].startswith("cordoned since 20")
        assert seen["reason"].endswith(": the fan is noisy")
        assert seen["waitingFor"] == 1
        with anyio.fail_after(10):  # the condition is written after the annotation
            while "the fan is noisy" not in (await rig.node()).conditions[CONDITION][2]:
                await anyio.sleep(0.1)
        assert (await rig.node()).conditions[CONDITION][:2] == ("True", "Applied")
        # It outlives the agent, and the API server's absence.
        await rig.kill_agent()
        await node.end(pod)
        async with rig.api_server_away():
            await node.start()
            with anyio.fail_after(30):
                while not (known := await rig.known_devices(GPU)):
                    await anyio.sleep(0.1)
            assert known == 7
        await rig.wait_allocatable(7, GPU)
        code, text = await command(rig, "status")
        assert f"GPU {index}: not offered: cordoned since 20" in text
        code, text = await command(rig, "uncordon", str(index))
        assert code == 0, text
        await rig.wait_allocatable(8, GPU)
        assert ANNOTATION not in (await rig.node()).annotations
        rig.http.set_annotation(ANNOTATION, "0,1=by hand")
        await rig.wait_allocatable(6, GPU)
        code, text = await command(rig, "uncordon", "5")
        assert (code, "is not cordoned" in text) == (1, True)


async def _state_with_reason(node: ModeNode, index: int) -> dict[str, Any]:
    with anyio.fail_after(20):
        while True:
            gpu: dict[str, Any] = (await node.state())["gpus"][str(index)]
            if "reason" in gpu:
                return gpu
            await anyio.sleep(0.1)
