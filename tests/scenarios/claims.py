"""Claims (DRA) at a kubelet and a scheduler, seen by a driver that is not the agent.

Each runs on a fresh node (see `rig.py`), on the embedded kubelet and on the real cluster: what tests of the
agent take for given is held here.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from tests.pace import scaled
from tests.scenarios.claim_driver import (
    DRIVER,
    SHARED,
    WHOLE,
    ClaimDriver,
    claim_spec,
    device_class,
    slices,
    write_cdi,
)
from tests.scenarios.rig import Rig
from tests.scenarios.skeleton import unschedulable

QUIET_SECONDS = 3.0  # an error that were retried as others are would be so within that time


@asynccontextmanager
async def driven(rig: Rig) -> AsyncIterator[ClaimDriver]:
    """The node with the driver registered and its GPU published."""
    await anyio.to_thread.run_sync(write_cdi, rig.cdi_folder)
    driver = ClaimDriver(rig)
    for device in (WHOLE, SHARED):
        await rig.create_resource("DeviceClass", device_class(device))
    async with driver.serving():
        await publish(rig)
        yield driver


async def publish(rig: Rig) -> None:
    """Put the driver's slices there."""
    for item in slices(rig.node_name):
        await rig.create_resource("ResourceSlice", item)


def claiming(name: str, device: str, shares: int = 0) -> PodSpec:
    """A pod with a claim of its own."""
    claim = PodClaim("gpu", template=claim_spec(device, shares))
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=(claim,))


def using(name: str, claim: str) -> PodSpec:
    """A pod that uses a claim which others may use, too."""
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=(PodClaim("gpu", claim),))


async def running(rig: Rig, pod: PodSpec) -> None:
    """Wait until it runs: a kubelet that is ahead of its right to a claim tries again after 60 to 90 s."""
    await rig.wait_phase(pod, Phase.RUNNING, 120)


async def run(rig: Rig, *pods: PodSpec) -> None:
    for pod in pods:
        await rig.create_pod(pod)
    for pod in pods:
        await running(rig, pod)


async def until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    with anyio.fail_after(scaled(seconds)):
        while not reached():
            await anyio.sleep(0.05)


async def published(rig: Rig) -> int:
    return sum(each["spec"]["driver"] == DRIVER for each in await rig.resources("ResourceSlice"))


async def test_first_claim_chooses_the_mode_of_a_gpu(rig: Rig) -> None:
    async with driven(rig) as driver:
        first, second, third = (claiming(f"share-{n}", SHARED, shares=n) for n in (1, 3, 2))
        await run(rig, first, second)
        assert (await rig.container_environment(second, "main"))["CLAIMED"] == SHARED
        shown = [(await rig.claimed(pod, "main"))[0] for pod in (first, second)]
        assert {each.device for each in shown} == {SHARED}
        assert len({each.share for each in shown} - {None}) == 2
        whole = claiming("whole", WHOLE)
        for waits in (third, whole):
            await rig.create_pod(waits)
            await unschedulable(rig, waits)
        await rig.delete_pod(second)
        await running(rig, third)
        await rig.delete_pod(first)
        await rig.delete_pod(third)
        await running(rig, whole)
        assert [each.share for each in await rig.claimed(whole, "main")] == [None]
        await rig.delete_pod(whole)
        assert (driver.count("prepare"), driver.count("unprepare")) == (4, 4)


async def test_failed_prepare_waits_for_a_change_of_the_pod(rig: Rig) -> None:
    """It is not tried again before the pod's resync, a minute later; a change of the pod sets it going."""
    async with driven(rig) as driver:
        driver.error = "not now"
        pod = claiming("late", WHOLE)
        await rig.create_pod(pod)
        await until(lambda: driver.count("prepare") == 1)
        driver.error = ""
        await anyio.sleep(QUIET_SECONDS)
        assert driver.count("prepare") == 1
        assert await rig.phase(pod) is Phase.PENDING
        await rig.annotate_pod(pod, "example.com/again", "1")
        await rig.wait_phase(pod, Phase.RUNNING, 10)
        await rig.delete_pod(pod)


async def test_claim_of_two_pods_is_unprepared_once(rig: Rig) -> None:
    async with driven(rig) as driver:
        claim = await rig.create_resource(
            "ResourceClaim",
            {"metadata": {"name": "both", "namespace": "default"}, "spec": claim_spec(WHOLE)},
        )
        pods = [using(f"user-{number}", "both") for number in range(2)]
        await run(rig, *pods)
        assert {uid for _, uid in driver.calls} == {claim["metadata"]["uid"]}
        await rig.delete_pod(pods[0])
        assert driver.count("unprepare") == 0
        assert (await rig.claimed(pods[1], "main"))[0].claim == "both"
        await rig.delete_pod(pods[1])
        assert driver.count("unprepare") == 1


async def test_restarted_kubelet_wipes_slices_and_knows_its_claims(rig: Rig) -> None:
    async with driven(rig) as driver:
        pod = claiming("stays", SHARED)
        await run(rig, pod)
        before = await rig.claimed(pod, "main")
        await rig.restart_kubelet()
        await until(driver.registered.is_set)
        with anyio.fail_after(scaled(30)):
            while await published(rig) or await rig.claimed(pod, "main") != before:
                await anyio.sleep(0.05)
        assert driver.count("prepare") == 1
        state = await anyio.to_thread.run_sync((rig.kubelet_root / "dra_manager_state").read_text)
        (known,) = json.loads(json.loads(state)["Data"])["ClaimInfoStateList"]
        (device,) = known["DriverState"][DRIVER]["Devices"]
        assert (device["DeviceName"], device["ShareID"]) == (SHARED, before[0].share)
        await rig.delete_pod(pod)
        assert driver.count("unprepare") == 1


async def test_driver_that_is_gone(rig: Rig) -> None:
    """Its slices go after a while, its pods stay, one that is deleted waits for it."""
    async with driven(rig):
        stays, leaves = claiming("stays", SHARED), claiming("leaves", SHARED)
        await run(rig, stays, leaves)
    assert await published(rig) == 2
    await rig.ask_to_delete(leaves)
    with anyio.fail_after(scaled(rig.wiping_seconds + 30)):
        while await published(rig):
            await anyio.sleep(0.1)
    assert {"stays", "leaves"} <= (await rig.all_pods()).keys()
    driver = ClaimDriver(rig)
    async with driver.serving():
        await publish(rig)
        await rig.delete_pod(leaves)
        assert driver.count("unprepare") == 1
        await rig.delete_pod(stays)


ALL = (
    test_first_claim_chooses_the_mode_of_a_gpu,
    test_failed_prepare_waits_for_a_change_of_the_pod,
    test_claim_of_two_pods_is_unprepared_once,
    test_restarted_kubelet_wipes_slices_and_knows_its_claims,
    test_driver_that_is_gone,
)
