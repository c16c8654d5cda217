"""Instances that layouts name are made and destroyed by the real agent, beside pods that run on others."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agent.nvml.port import NvmlCode
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.agent_face import logged, metric, page
from tests.scenarios.rig import GPU

SMALL, HALF = "nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb"
DOUBLE, FOREIGN = "nvidia.com/mig-1g.35gb", "nvidia.com/mig-2g.35gb"
LABEL = "nvidia-device-enable"


def layout(*profiles: str) -> list[dict[str, Any]]:
    return [{"gpus": [0], "mode": "mig", "mig": list(profiles)}, {"gpus": ["rest"], "mode": "pgpu"}]


LAYOUTS = {
    "small": layout("3g.71gb", "1g.18gb", "1g.18gb"),
    "halves": layout("3g.71gb", "3g.71gb"),
    "double": layout("3g.71gb", "1g.35gb", "1g.18gb"),
}


@asynccontextmanager
async def managed(name: str, *there: str, **settings: Any) -> AsyncIterator[EmbeddedRig]:
    """GPU 0 in MIG mode with a layout; `there`: instances that others made."""
    async with embedded_rig("1.36") as rig:
        rig.machine.set_mig(0, enabled=True)
        for profile in there:
            rig.machine.make_instance(0, profile)
        await start(rig, name, **settings)
        yield rig


async def start(rig: EmbeddedRig, name: str, **settings: Any) -> None:
    given = {"layouts": LAYOUTS, "defaultMode": name, "injection.strategy": "envvar", "mig.manage": True}
    await rig.start_agent({**given, **await rig.api_access(), **settings})


def placed(rig: EmbeddedRig) -> set[tuple[str, int]]:
    """Profile and place of what GPU 0 has, half made or whole."""
    state = rig.machine.gpu(0)
    return {(each.profile.decode(), each.start) for each in state.instances if each.used or each.bare}


async def until(rig: EmbeddedRig, *expected: tuple[str, int], seconds: float = 30) -> None:
    with anyio.move_on_after(scaled(seconds)):
        while placed(rig) != set(expected):
            await anyio.sleep(0.05)
    assert placed(rig) == set(expected), rig.agent_log().read_text()[-3000:]


async def run(rig: EmbeddedRig, name: str, resource: str) -> PodSpec:
    pod = PodSpec(name, (ContainerSpec("main", {resource: 1}),))
    await rig.create_pod(pod)
    await rig.wait_phase(pod, Phase.RUNNING)
    return pod


async def switch(rig: EmbeddedRig, name: str) -> None:
    await rig.set_labels({LABEL: name})


async def told(rig: EmbeddedRig, event: str, count: int = 1) -> Sequence[Any]:
    with anyio.fail_after(scaled(20)):
        while len(found := await logged(rig, event)) < count:
            await anyio.sleep(0.1)
    return found


async def test_layout_changes_around_a_running_pod() -> None:
    async with managed("small") as rig:
        await rig.wait_allocatable(2, SMALL)
        await rig.wait_allocatable(1, HALF)
        assert placed(rig) == {("3g.71gb", 0), ("1g.18gb", 4), ("1g.18gb", 5)}
        small, half = await run(rig, "small", SMALL), await run(rig, "half", HALF)
        held = {
            pod.name: await rig.held_ids(pod, "main", name) for pod, name in ((small, SMALL), (half, HALF))
        }
        (number,) = [
            each.gpu_instance
            for each in rig.machine.gpu(0).instances
            if each.uuid.decode() in held["small"] and each.used
        ]
        place = next(each.start for each in rig.machine.gpu(0).instances if each.gpu_instance == number)
        async with rig.watching_allocatable(HALF) as halves:
            # The free one goes at once, the held one is waited for, and the other half goes on as before.
            await switch(rig, "halves")
            await until(rig, ("3g.71gb", 0), ("1g.18gb", place))
            await rig.wait_allocatable(0, SMALL)
            plan = (await told(rig, "mig_plan", 2))[-1]
            assert any("drain 1g.18gb" in step and "held by default/small" in step for step in plan["steps"])
            assert "MIGLayoutChanging" in await rig.event_reasons()
            await anyio.sleep(1)
            assert placed(rig) == {("3g.71gb", 0), ("1g.18gb", place)}
            assert await metric(rig, r"gpu_agent_instance_steps{.*}") == 2
            # Another layout half-way: what is held is one of the wanted ones, and the rest is made beside it.
            await switch(rig, "double")
            await rig.wait_allocatable(1, DOUBLE)
            await rig.wait_allocatable(1, SMALL)
            assert placed(rig) == {("3g.71gb", 0), ("1g.18gb", place), ("1g.35gb", 6)}
            await rig.delete_pod(small)
            await switch(rig, "halves")
            await until(rig, ("3g.71gb", 0), ("3g.71gb", 4))
            await rig.wait_allocatable(2, HALF)
            assert min(value for value in halves if value is not None) == 1
        assert await rig.phase(half) is Phase.RUNNING
        assert await rig.held_ids(half, "main", HALF) == held["half"]
        assert "MIGLayoutReady" in await rig.event_reasons()
        await run(rig, "second", HALF)


async def test_foreign_instances_stay() -> None:
    async with managed("small", "2g.35gb") as rig:
        await rig.wait_allocatable(2, SMALL)
        await rig.wait_allocatable(1, FOREIGN)
        assert ("2g.35gb", 0) in placed(rig)
        assert ("3g.71gb", 4) in placed(rig)
        # Two halves have no place beside it: nothing is changed, and the reason is given.
        before = placed(rig)
        await switch(rig, "halves")
        with anyio.fail_after(scaled(20)):
            while "mig.adoptForeign" not in (text := (await page(rig, "/readyz"))[1]):
                await anyio.sleep(0.1)
        assert "2g.35gb (GPU instance 1)" in text
        assert placed(rig) == before
        assert await rig.allocatable(FOREIGN) == 1
        # After a restart the agent knows its own ones from those of others, and by option takes these, too.
        await rig.kill_agent()
        await start(rig, "halves", **{"mig.adoptForeign": True})
        await until(rig, ("3g.71gb", 0), ("3g.71gb", 4))
        await rig.wait_allocatable(2, HALF)


async def test_failed_creation_offers_nothing_half() -> None:
    async with managed("double") as rig:
        await rig.wait_allocatable(1, DOUBLE)
        half = await run(rig, "half", HALF)
        rig.machine.fail("nvmlGpuInstanceCreateComputeInstance", NvmlCode.UNKNOWN, 0)
        undone = rig.machine.fail("nvmlGpuInstanceDestroy", NvmlCode.UNKNOWN, 0)
        await rig.set_labels({LABEL: None})
        await switch(rig, "small")
        failures = await told(rig, "mig_layout_failed")
        assert "nvmlGpuInstance" in failures[0]["problem"]
        undone.release()
        with anyio.fail_after(scaled(30)):
            while "1g.18gb at slice" not in (text := (await page(rig, "/readyz"))[1]):
                await anyio.sleep(0.1)
        assert "cannot be made: NVML nvmlGpuInstanceCreateComputeInstance failed" in text
        assert await rig.allocatable(SMALL) == 1
        assert await rig.phase(half) is Phase.RUNNING
        # One failure that goes on is one event.
        assert len([each for each in await rig.event_reasons() if each == "MIGLayoutFailed"]) <= 2
        rig.machine.clear_faults()
        await rig.wait_allocatable(2, SMALL)
        assert await rig.phase(half) is Phase.RUNNING
        assert await metric(rig, r'gpu_agent_instance_changes_total{action="make",result="failed"}') >= 1


async def test_an_agent_that_is_killed_half_way_finishes_its_layout() -> None:
    async with managed("halves") as rig:
        await rig.wait_allocatable(2, HALF)
        pod = await run(rig, "half", HALF)
        rig.machine.hang("nvmlGpuInstanceCreateComputeInstance", 0)
        await switch(rig, "small")
        with anyio.fail_after(scaled(20)):
            while not any(each.bare for each in rig.machine.gpu(0).instances):
                await anyio.sleep(0.02)
        assert await rig.allocatable(SMALL) is None
        await rig.kill_agent()
        rig.machine.clear_faults()
        await start(rig, "small")
        await rig.wait_allocatable(2, SMALL)
        assert not any(each.bare for each in rig.machine.gpu(0).instances)
        assert await rig.phase(pod) is Phase.RUNNING
        # All of them are known as its own: what nobody holds goes with the next layout.
        await switch(rig, "halves")
        await rig.wait_allocatable(2, HALF)


async def test_mig_mode_comes_and_goes_with_a_layout() -> None:
    """A GPU that is not in MIG mode: it is drained, switched, divided, and given back."""
    async with embedded_rig("1.36") as rig:
        await start(rig, "pgpu")
        await rig.wait_allocatable(8, GPU)
        await switch(rig, "small")
        await rig.wait_allocatable(2, SMALL)
        await rig.wait_allocatable(7, GPU)
        pod = await run(rig, "small", SMALL)
        await switch(rig, "pgpu")
        await rig.wait_allocatable(0, SMALL)
        await anyio.sleep(1)
        assert rig.machine.gpu(0).mig_mode
        assert await rig.phase(pod) is Phase.RUNNING
        await rig.delete_pod(pod)
        await rig.wait_allocatable(8, GPU)
        assert not rig.machine.gpu(0).mig_mode
        # One on which others made an instance keeps its MIG mode, and says so.
        await switch(rig, "small")
        await rig.wait_allocatable(2, SMALL)
        rig.machine.make_instance(0, "1g.18gb")
        await switch(rig, "pgpu")
        await told(rig, "mig_mode_stays")
        await rig.wait_allocatable(7, GPU)
        assert placed(rig) == {("1g.18gb", 6)}


async def test_instances_come_back_after_a_reboot() -> None:
    async with managed("small") as rig:
        await rig.wait_allocatable(2, SMALL)
        before = placed(rig)
        # A GPU that somebody else resets loses them, too.
        rig.machine.reboot()
        with anyio.fail_after(scaled(30)):
            while len(await logged(rig, "mig_instance_made")) < 6:
                await anyio.sleep(0.1)
        await until(rig, *before)
        await rig.stop_agent()
        rig.machine.reboot()
        # Of another boot the record says nothing: what another one made first stays.
        record = rig.agent_log().parent / "state/mig-instances.json"
        document = json.loads(record.read_text())
        assert len(document["made"]) == 3
        record.write_text(json.dumps({**document, "boot_id": "before"}))
        rig.machine.make_instance(0, "3g.71gb")
        await start(rig, "small")
        await until(rig, *before)
        await rig.wait_allocatable(2, SMALL)
        document = json.loads(record.read_text())
        assert len(document["made"]) == 2
        await run(rig, "pod", HALF)
