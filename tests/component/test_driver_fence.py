"""The driver's own fence on the embedded kubelet: armed where driver, cgroups and toolkit serve."""

import json
from collections.abc import Mapping

import anyio
import anyio.to_thread
import pytest

from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.vgpu.limits import LIMIT_VARIABLE, REQUEST_VARIABLE
from agent.web.control import ask
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.test_isolation import WAIT_SECONDS, folders, serving
from tests.scenarios import vgpu

SERVING = "615.43.02"


def node_with(rig: EmbeddedRig, *, driver: str, unified: bool, hook: bool) -> Mapping[str, object]:
    """A node with these facts; settings of the agent. `hook`: NVIDIA's toolkit is of 1.20.1 or newer."""
    folder = rig.agent_log().parent
    rig.machine.mapping.state.driver_version = driver.encode()
    cgroups = folder / "cgroup"
    cgroups.mkdir()
    if unified:
        (cgroups / "cgroup.controllers").touch()
    tools = folder / "tools"
    tools.mkdir()
    hooks = [{"hookName": "createRuntime", "args": ["nvidia-cdi-hook", "apply-cuda-memory-limits"]}]
    devices = [
        {
            "name": uuid,
            "containerEdits": {
                "deviceNodes": [{"path": rig.device_node(uuid)}],
                **({"hooks": hooks} if hook else {}),
            },
        }
        for uuid in rig.gpu_uuids()
    ]
    content = {"cdiVersion": "0.5.0", "kind": "gpu-node-agent.io/gpu", "devices": devices}
    (tools / "specification.json").write_text(json.dumps(content))
    for name in ("nvidia-ctk", "nvidia-cdi-hook"):
        (tools / name).write_text(f"#!/bin/sh\nexec cat {tools}/specification.json\n")
        (tools / name).chmod(0o755)
    return {
        "injection.toolkit": str(tools),
        "host.cgroups": str(cgroups),
        # As their parents, which a transformation would need the real program for.
        "injection.driverRoot": str(folder),
        "injection.hostDriverRoot": str(folder),
    }


def pod_with_values_of_its_own() -> PodSpec:
    limits = {vgpu.CORE: 30, vgpu.MEMORY: 40}
    return PodSpec(
        "share",
        (ContainerSpec("main", limits, env=dict.fromkeys((LIMIT_VARIABLE, REQUEST_VARIABLE), "999999")),),
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("driver", "unified", "hook"),
    [(SERVING, True, True), ("614.99", True, True), (SERVING, False, True), (SERVING, True, False)],
    ids=["all facts", "older driver", "cgroup v1", "older toolkit"],
)
async def test_the_driver_s_limit_is_asked_for_with_all_facts_alone(
    driver: str, unified: bool, hook: bool
) -> None:
    async with embedded_rig() as rig:
        facts = await anyio.to_thread.run_sync(
            lambda: node_with(rig, driver=driver, unified=unified, hook=hook)
        )
        await serving(rig, **facts)
        pod = pod_with_values_of_its_own()
        await vgpu.running(rig, pod)
        armed = driver == SERVING and unified and hook
        given = await rig.container_environment(pod, "main")
        assert (given[LIMIT_VARIABLE], given[REQUEST_VARIABLE]) == (
            ("10240", "0") if armed else ("999999", "999999")
        )
        fences = ["driver", "library", "sweep"] if armed else ["library", "sweep"]
        await rig._wait(
            lambda: (
                f'"fences":{json.dumps(fences, separators=(",", ":"))}'
                in rig.kubelet.pod(pod).written.get("gpu-node-agent.io/limits", "")
            ),
            WAIT_SECONDS,
            lambda: f"the pod's annotations are {rig.kubelet.pod(pod).written}",
        )
        socket = rig.agent_log().parent / "run" / "agent.sock"
        status = await anyio.to_thread.run_sync(ask, socket, "status")
        told = [
            each["limits"]["fences"]
            for gpu in status["gpus"]
            for each in gpu["holders"]
            if each.get("limits")
        ]
        assert fences in told
        file = anyio.Path(rig.agent_log().parent / "cdi" / "gpu-node-agent-memory.json")
        assert await file.exists() is (driver == SERVING and unified)


@pytest.mark.timeout(400)
async def test_a_node_that_serves_keeps_no_container_under_report() -> None:
    async with embedded_rig() as rig:
        facts = await anyio.to_thread.run_sync(
            lambda: node_with(rig, driver=SERVING, unified=True, hook=True)
        )
        await serving(rig, **facts, **{"vgpu.enforcement": "report"})
        pod = pod_with_values_of_its_own()
        await vgpu.running(rig, pod)
        assert (await rig.container_environment(pod, "main"))[LIMIT_VARIABLE] == "999999"
        assert not folders(rig)
