"""Instances of a GPU in MIG mode, for pods of a real kubelet, while the layout of their GPU changes."""

from collections.abc import Mapping

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.cluster.real_rig import RealRig
from tests.pace import scaled
from tests.scenarios.agent_face import logged
from tests.scenarios.rig import GPU

SMALL, HALF, DOUBLE = (f"nvidia.com/mig-{profile}" for profile in ("1g.18gb", "3g.71gb", "1g.35gb"))
LABEL = "nvidia-device-enable"


def layout(*profiles: str) -> list[Mapping[str, object]]:
    return [{"gpus": [0], "mode": "mig", "mig": list(profiles)}, {"gpus": ["rest"], "mode": "pgpu"}]


LAYOUTS = {
    "small": layout("3g.71gb", "1g.18gb", "1g.18gb"),
    "halves": layout("3g.71gb", "3g.71gb"),
    "double": layout("3g.71gb", "1g.35gb", "1g.18gb"),
}


async def running(rig: RealRig, name: str, resource: str) -> tuple[PodSpec, str]:
    """A pod with one instance, and the instance's UUID."""
    pod = PodSpec(name, (ContainerSpec("main", {resource: 1}),))
    await rig.create_pod(pod)
    await rig.wait_phase(pod, Phase.RUNNING)
    (uuid,) = await rig.held_ids(pod, "main", resource)
    return pod, uuid


def there(rig: RealRig) -> dict[str, tuple[str, int]]:
    """Profile and place of what GPU 0 has, by UUID."""
    instances = rig.machine.gpu(0).instances
    return {each.uuid.decode(): (each.profile.decode(), each.start) for each in instances if each.used}


async def until(rig: RealRig, *expected: tuple[str, int]) -> None:
    with anyio.move_on_after(scaled(30)):
        while set(there(rig).values()) != set(expected):
            await anyio.sleep(0.05)
    assert set(there(rig).values()) == set(expected), rig.agent.log_tail()


async def test_pods_on_instances(rig: RealRig) -> None:
    """Two profiles on one GPU; a held one drains, and others are made beside the one that runs on."""
    rig.machine.set_mig(0, enabled=True)
    settings = {"layouts": LAYOUTS, "defaultMode": "small", "injection.strategy": "envvar"}
    await rig.start_agent({**settings, "mig.manage": True, **await rig.api_access()})
    for resource, count in ((SMALL, 2), (HALF, 1), (GPU, len(rig.gpu_uuids()) - 1)):
        await rig.wait_allocatable(count, resource)
    half, held_half = await running(rig, "half", HALF)
    small, held_small = await running(rig, "small", SMALL)
    assert (await rig.container_environment(small, "main"))["NVIDIA_VISIBLE_DEVICES"] == held_small
    name, place = there(rig)[held_small]
    assert (name, there(rig)[held_half]) == ("1g.18gb", ("3g.71gb", 0))

    # What is held drains, what is free goes at once; a pod that asks for the former waits.
    await rig.set_labels({LABEL: "halves"})
    await until(rig, ("3g.71gb", 0), ("1g.18gb", place))
    await rig.wait_allocatable(0, SMALL)
    late = PodSpec("late", (ContainerSpec("main", {SMALL: 1}),))
    await rig.create_pod(late)
    with anyio.fail_after(scaled(20)):
        while "nvidia.com/mig-1g.18gb" not in await rig.message(late):
            await anyio.sleep(0.05)
        while not any(
            "drain 1g.18gb" in step for each in await logged(rig, "mig_plan") for step in each["steps"]
        ):
            await anyio.sleep(0.05)
    assert await rig.phase(late) is Phase.PENDING

    # A kubelet that was restarted knows both as before; so does an agent that was killed in mid-drain.
    await rig.restart_kubelet()
    await rig.kill_agent()
    await rig.start_agent({**settings, "mig.manage": True, **await rig.api_access()})
    await rig.wait_allocatable(1, HALF)
    assert await rig.allocatable(SMALL) == 0
    assert set(there(rig)) == {held_half, held_small}

    # Another layout keeps it, and one of a third profile is made beside the two that run.
    await rig.set_labels({LABEL: "double"})
    await rig.wait_allocatable(1, DOUBLE)
    double, held_double = await running(rig, "double", DOUBLE)
    assert there(rig)[held_double] == ("1g.35gb", 6)
    assert {held_half, held_small} < set(there(rig))

    # Their holders gone, the half is made, beside the one that has run all the time.
    await rig.wait_allocatable(1, SMALL)
    await rig.set_labels({LABEL: "halves"})
    # A label that has just changed is obeyed once it has settled: until then `late` gets what is let go of.
    for resource in (SMALL, DOUBLE):
        await rig.wait_allocatable(0, resource)
    await rig.delete_pod(small)
    await rig.delete_pod(double)
    await until(rig, ("3g.71gb", 0), ("3g.71gb", 4))
    await rig.wait_allocatable(2, HALF)
    _, second = await running(rig, "second", HALF)
    assert second != held_half
    assert await rig.held_ids(half, "main", HALF) == {held_half}
    assert await rig.phase(half) is Phase.RUNNING
    assert await rig.phase(late) is Phase.PENDING
