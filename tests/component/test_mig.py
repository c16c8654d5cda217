"""Instances of GPUs in MIG mode, offered by the real agent to the embedded kubelet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.agent_face import logged, metric, page
from tests.scenarios.rig import GPU

SMALL, MEDIUM, MEDIA = "nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb", "nvidia.com/mig-1g.18gb.me"
LAYOUT = {"parted": [{"gpus": [0, 1], "mode": "mig"}, {"gpus": ["rest"], "mode": "pgpu"}]}


@asynccontextmanager
async def parted(**settings: Any) -> AsyncIterator[tuple[EmbeddedRig, dict[str, list[str]]]]:
    """GPUs 0 and 1 in MIG mode, and their instances by profile; the agent offers them, the others whole."""
    async with embedded_rig("1.36") as rig:
        made: dict[str, list[str]] = {}
        for gpu, profiles in ((0, ("3g.71gb", "1g.18gb", "1g.18gb")), (1, ("1g.18gb+me", "3g.71gb"))):
            rig.machine.set_mig(gpu, enabled=True)
            for profile in profiles:
                made.setdefault(profile, []).append(rig.machine.make_instance(gpu, profile))
        # The toolkit's specification of this machine was written before there were instances.
        given = {"layouts": LAYOUT, "defaultMode": "parted", "injection.strategy": "envvar"}
        await rig.start_agent({**given, **settings})
        yield rig, made


def pod_of(name: str, resource: str) -> PodSpec:
    return PodSpec(name, (ContainerSpec("main", {resource: 1}),))


async def run(rig: EmbeddedRig, *pods: PodSpec) -> None:
    for pod in pods:
        await rig.create_pod(pod)
    for pod in pods:
        await rig.wait_phase(pod, Phase.RUNNING)


async def test_instances_are_offered_by_nvidias_names() -> None:
    async with parted() as (rig, made):
        for resource, count in ((SMALL, 2), (MEDIUM, 2), (MEDIA, 1), (GPU, 6)):
            await rig.wait_allocatable(count, resource)
        pods = [
            pod_of("small", SMALL),
            pod_of("medium", MEDIUM),
            pod_of("media", MEDIA),
            pod_of("whole", GPU),
        ]
        await run(rig, *pods)
        held = {
            pod.name: (await rig.held_ids(pod, "main", next(iter(pod.containers[0].limits)))) for pod in pods
        }
        assert set(held["small"]) <= set(made["1g.18gb"])
        assert set(held["medium"]) <= set(made["3g.71gb"])
        assert set(held["media"]) == set(made["1g.18gb+me"])
        environment = await rig.container_environment(pods[0], "main")
        assert environment["NVIDIA_VISIBLE_DEVICES"] == next(iter(held["small"]))
        # One more is made by hand, and one that nobody has is destroyed: no restart, and no pod is touched.
        rig.machine.make_instance(1, "1g.18gb")
        await rig.wait_allocatable(3, SMALL)
        (free,) = set(made["3g.71gb"]) - set(held["medium"])
        rig.machine.destroy_instance(next(gpu for gpu in (0, 1) if free in instances(rig, gpu)), free)
        await rig.wait_allocatable(1, MEDIUM)
        # A profile that was not there before gets a resource of its own.
        rig.machine.make_instance(1, "2g.35gb")
        await rig.wait_allocatable(1, "nvidia.com/mig-2g.35gb")
        assert await metric(rig, r'gpu_agent_instance_memory_total_bytes{.*profile="1g.18gb"}') > 3 << 34
        for pod in pods:
            assert await rig.phase(pod) is Phase.RUNNING


def instances(rig: EmbeddedRig, gpu: int) -> list[str]:
    return [each.uuid.decode() for each in rig.machine.gpu(gpu).instances if each.used]


async def test_instances_survive_a_kubelet_restart() -> None:
    async with parted() as (rig, _):
        await rig.wait_allocatable(2, SMALL)
        holders = [pod_of("one", SMALL), pod_of("two", SMALL)]
        await run(rig, *holders)
        held = [await rig.held_ids(pod, "main", SMALL) for pod in holders]
        await rig.restart_kubelet()
        with anyio.fail_after(scaled(30)):
            while [await rig.held_ids(pod, "main", SMALL) for pod in holders] != held:
                await anyio.sleep(0.1)
        await rig.wait_allocatable(2, SMALL)
        # What they hold is nobody else's, and their GPU is not given to another mode.
        third = pod_of("third", SMALL)
        await rig.create_pod(third)
        await anyio.sleep(1)
        assert await rig.phase(third) is Phase.PENDING
        await rig.delete_pod(holders[0])
        await rig.wait_phase(third, Phase.RUNNING)
        assert await rig.held_ids(third, "main", SMALL) == held[0]


async def test_an_xid_of_an_instance_is_its_own() -> None:
    async with parted() as (rig, made):
        await rig.wait_allocatable(2, SMALL)
        await rig.wait_allocatable(2, MEDIUM)
        rig.machine.xid(0, 95, made["1g.18gb"][0])
        await rig.wait_allocatable(1, SMALL)
        assert await rig.allocatable(MEDIUM) == 2
        pod = pod_of("well", SMALL)
        await run(rig, pod)
        assert set(await rig.held_ids(pod, "main", SMALL)) == {made["1g.18gb"][1]}


@pytest.mark.parametrize("alike", [True, False])
async def test_single_strategy_names_instances_as_gpus(alike: bool) -> None:
    async with embedded_rig("1.36") as rig:
        for gpu in range(8):
            rig.machine.set_mig(gpu, enabled=True)
            rig.machine.make_instance(gpu, "3g.71gb")
            rig.machine.make_instance(gpu, "3g.71gb" if alike or gpu < 7 else "1g.18gb")
        given = {"defaultMode": "mig", "injection.strategy": "envvar"}
        await rig.start_agent({**given, "mig.strategy": "single", "modes.pgpu": False})
        if alike:
            await rig.wait_allocatable(16, GPU)
            await run(rig, pod_of("any", GPU))
        else:
            with anyio.fail_after(scaled(20)):
                while not await logged(rig, "http_listening"):
                    await anyio.sleep(0.2)
                while "all instances have one profile" not in (await page(rig, "/readyz"))[1]:
                    await anyio.sleep(0.2)
            assert not await rig.allocatable(GPU)
