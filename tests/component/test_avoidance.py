"""Pods that could get around their limits: reported to their owners, or refused where the option says so."""

import anyio.to_thread
import pytest

from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from agent.web.control import ask
from tests.component.embedded_rig import embedded_rig
from tests.component.test_isolation import folders, mounts, reasons, serving, until
from tests.scenarios import vgpu

POD = PodSpec("watches", (vgpu.share("main", 30, 4),), host_pid=True)


@pytest.mark.timeout(400)
async def test_a_pod_that_could_get_around_its_limits_is_reported() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        plain = vgpu.share_pod("plain", 30, 4)
        await vgpu.running(rig, POD, plain)
        assert mounts(rig, POD)
        expected = {"LimitsApplied", "LimitsAvoidable"}
        await until(
            lambda: reasons(rig, POD) == expected and bool(reasons(rig, plain)),
            "not all pods have their events",
        )
        assert reasons(rig, plain) == {"LimitsApplied"}
        socket = rig.agent_log().parent / "run" / "agent.sock"
        status = await anyio.to_thread.run_sync(ask, socket, "status")
        holders = {
            each["pod"]: each for gpu in status["gpus"] for each in gpu["holders"] if each.get("limits")
        }
        assert holders["default/watches"]["limits"]["avoidable"] == ["the pod has hostPID"]
        assert holders["default/plain"]["limits"]["avoidable"] == []


@pytest.mark.timeout(400)
async def test_a_pod_that_could_get_around_its_limits_is_refused_by_option() -> None:
    async with embedded_rig() as rig:
        await serving(rig, **{"vgpu.avoidableLimits": "refuse"})
        await rig.create_pod(POD)
        await rig.wait_phase(POD, Phase.FAILED)
        assert "(the pod has hostPID), which vgpu.avoidableLimits refuses" in await rig.message(POD)
        assert not folders(rig)
        # What it was refused is free: every GPU serves a pod that takes all of its memory.
        await vgpu.running(rig, *(vgpu.share_pod(f"p{n}", 99, vgpu.BLOCKS) for n in range(vgpu.GPUS)))
        # Nothing is promised under report, so that nothing can be got around.
        for number in range(vgpu.GPUS):
            await rig.delete_pod(vgpu.share_pod(f"p{number}", 99, vgpu.BLOCKS))
        await rig.stop_agent()
        await serving(rig, **{"vgpu.avoidableLimits": "refuse", "vgpu.enforcement": "report"})
        await vgpu.running(rig, PodSpec("again", POD.containers, host_pid=True))
