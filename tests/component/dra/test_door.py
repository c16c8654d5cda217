"""The agent's DRA door on the embedded kubelet: the agent a real process, slices and claims over HTTP."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread

from agent.model.claim_device import DRIVER, WORDS, device_name
from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from agent.status.client import ask
from agent.web.control import NAME
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.mps import MpsNode, node_to_be


@asynccontextmanager
async def dra_node(**settings: object) -> AsyncIterator[MpsNode]:
    """A node whose GPUs are all devices of DRA."""
    async with embedded_rig("1.37") as rig, node_to_be(rig) as node:
        for mode in (WHOLE_GPUS, SHARES):
            await rig.create_resource("DeviceClass", device_class(mode))
        await start(node, **settings)
        await offered(rig)
        yield node


async def start(node: MpsNode, **settings: object) -> None:
    await anyio.to_thread.run_sync(node.mode_file.write_text, "dra\n")
    await node.rig.start_agent(await node.settings(**{"dra.enabled": True, **settings}))


def rig_of(node: MpsNode) -> EmbeddedRig:
    assert isinstance(node.rig, EmbeddedRig)
    return node.rig


async def offered(rig: EmbeddedRig, gpus: int = 8) -> None:
    """Wait until so many GPUs take claims."""
    await until(rig, lambda found: sum(not each.get("taints") for each in found) == 2 * gpus)


def device_class(mode: Mode) -> Mapping[str, Any]:
    word = WORDS[mode]
    cel = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].mode == '{word}'"
    return {"metadata": {"name": f"gpu-{word}"}, "spec": {"selectors": [{"cel": {"expression": cel}}]}}


def asking(name: str, mode: Mode, cores: int = 0, gib: int = 0, count: int = 1, **more: Any) -> PodSpec:
    exact: dict[str, Any] = {"deviceClassName": f"gpu-{WORDS[mode]}", "count": count, **more}
    if cores:
        exact["capacity"] = {"requests": {"cores": str(cores), "memory": f"{gib}Gi"}}
    claim = {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=(PodClaim("gpu", template=claim),))


def devices(rig: EmbeddedRig) -> list[Mapping[str, Any]]:
    found = [each["spec"] for each in rig.kubelet.api.resources.of("resourceslices")]
    return [device for spec in found if spec["driver"] == DRIVER for device in spec.get("devices") or ()]


async def until(rig: EmbeddedRig, reached: Any, seconds: float = 20.0) -> None:
    end = anyio.current_time() + scaled(seconds)
    while not reached(devices(rig)):
        if anyio.current_time() > end or rig.agent.crashed:
            raise TimeoutError(f"{devices(rig)[:2]}; {rig.agent_log().read_text()[-6000:]}")
        await anyio.sleep(0.02)


async def run(rig: EmbeddedRig, *pods: PodSpec) -> None:
    for pod in pods:
        await rig.create_pod(pod)
    for pod in pods:
        try:
            await rig.wait_phase(pod, Phase.RUNNING, 15)
        except TimeoutError as error:
            raise TimeoutError(f"{rig.kubelet.pod(pod).claims_fault}; {error}") from error


async def test_first_claim_chooses_and_last_one_frees() -> None:
    async with dra_node() as node:
        rig = rig_of(node)
        one, other = asking("one", SHARES, 30, 40), asking("other", SHARES, 45, 60)
        await run(rig, one, other)
        first = rig.gpu_uuids()[0]
        for pod, cores, gib in ((one, "30", "40"), (other, "45", "60")):
            environment = await rig.container_environment(pod, "main")
            assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == cores
            assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={gib}G"
            assert [each.device for each in await rig.claimed(pod, "main")] == [device_name(first, SHARES)]
        status = await status_of(node)
        gpu = status["gpus"][0]
        assert (gpu["mode"]["active"], gpu["mode"]["door"]) == ("mps", "dra")
        assert gpu["mps"]["state"] == "serving"
        held = {each["pod"]: each["units"] for each in gpu["holders"]}
        assert held["default/one"] == {"nvidia.com/mps-core": 30, "nvidia.com/mps-memory": 40}
        wholes = [asking(f"whole-{n}", WHOLE_GPUS) for n in range(7)]
        await run(rig, *wholes)
        late = asking("late", WHOLE_GPUS)
        await rig.create_pod(late)
        await rig.delete_pod(one)
        await anyio.sleep(0.5)
        assert await rig.phase(late) is Phase.PENDING
        await rig.delete_pod(other)
        await rig.wait_phase(late, Phase.RUNNING)
        assert not [gpu for gpu in (await status_of(node))["gpus"] if gpu["mps"]]


async def status_of(node: MpsNode) -> Mapping[str, Any]:
    document: Mapping[str, Any] = await anyio.to_thread.run_sync(ask, node.run / NAME, "status")
    return document
