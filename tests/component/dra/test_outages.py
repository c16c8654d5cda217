"""Claims while something else is wrong: NVML at a start, a closed door, a kubelet or a layout in between."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.model.modes import SHARES, WHOLE_GPUS
from agent.simulator.kubelet.pod_specs import Phase
from agent.web.control import AgentUnreachable
from tests.component.dra.test_door import (
    asking,
    dra_node,
    offered,
    one_device,
    rig_of,
    run,
    said,
    seen,
    start,
    status_of,
)
from tests.pace import scaled
from tests.scenarios.mps import MpsNode

GRACE_SECONDS = 4.0


async def gpus_of(node: MpsNode, count: int) -> list[Mapping[str, Any]]:
    """Status of so many GPUs, all at the door of claims, once the agent answers so."""
    while True:
        with suppress(AgentUnreachable):
            found: list[Mapping[str, Any]] = (await status_of(node))["gpus"]
            if len(found) == count and all(each["mode"]["door"] == "dra" for each in found):
                return found
        await anyio.sleep(0.1)


@pytest.mark.parametrize("fault", ["library", "lost"])
async def test_gpus_of_claims_are_taken_over_after_a_fault_of_nvml(fault: str) -> None:
    """Also where a GPU in use refuses a switch: what claims hold is as it is wanted."""
    async with dra_node() as node:
        rig = rig_of(node)
        share, whole, late = (
            asking("share", SHARES, 30, 10),
            asking("whole", WHOLE_GPUS),
            asking("late", SHARES, 9, 9),
        )
        await run(rig, share, whole)
        held, daemons = (rig.gpu_uuids()[0], rig.gpu_uuids()[-1]), await node.pids()
        await rig.kill_agent()
        if fault == "library":
            rig.machine.library_missing()
        else:
            for uuid in held:
                rig.machine.lose(uuid)
        await anyio.to_thread.run_sync(node.mode_file.write_text, "dra\n")
        await rig.start_agent(await node.settings(**{"dra.enabled": True, "whenBusy": "refuse"}))
        with anyio.fail_after(30):
            await gpus_of(node, 0 if fault == "library" else 6)
        await rig.create_pod(late)
        rig.machine.library_missing(missing=False)
        if fault == "lost":
            for uuid in held:
                rig.machine.restore(uuid)
        await rig.wait_phase(late, Phase.RUNNING, 30)
        with anyio.fail_after(30):
            gpus = await gpus_of(node, 8)
        assert (gpus[0]["mode"]["active"], gpus[7]["mode"]["active"]) == ("mps", "pgpu")
        assert daemons.items() <= (await node.pids()).items()
        assert {await rig.phase(each) for each in (share, whole)} == {Phase.RUNNING}
        assert "ModeBlocked" not in {each["reason"] for each in rig.http.events}


async def test_a_door_that_is_closed_on_claims_says_so_and_gives_their_gpus_to_nobody() -> None:
    """As an agent does that is rolled back, until it is rolled forward again."""
    async with dra_node() as node:
        rig = rig_of(node)
        share = asking("share", SHARES, 30, 10)
        await run(rig, share)
        await rig.kill_agent()
        await anyio.to_thread.run_sync(node.mode_file.write_text, "pgpu\n")
        await rig.start_agent(await node.settings())
        await rig.wait_allocatable(7)
        problems = (await status_of(node))["problems"]
        assert any("default/share" in each and "dra.enabled is off" in each for each in problems), problems
        await rig.ask_to_delete(share)
        await anyio.sleep(1)
        assert await rig.allocatable() == 7
        await rig.kill_agent()
        await start(node)
        with anyio.fail_after(60):
            while share.key in rig.kubelet.api.pods:
                await anyio.sleep(0.05)
        await offered(rig)


@pytest.mark.long  # the first call is given up after 40 s
async def test_a_kubelet_that_restarts_while_a_claim_is_prepared_has_it_prepared_again() -> None:
    async with one_device() as (_, rig):
        forced = replace(asking("forced", SHARES, 60, 60), grace=GRACE_SECONDS)
        await run(rig, forced)
        uid = rig.kubelet.pod(forced).uid
        rig.kubelet.api.delete_by_force(forced)
        heir = asking("heir", WHOLE_GPUS)
        await rig.create_pod(heir)
        await anyio.sleep(0.5)  # its call waits for the container
        await rig.restart_kubelet()
        await rig.wait_phase(heir, Phase.RUNNING, 60)
        assert not rig.kubelet._machine.containers.running(uid, "main")
        await rig.delete_pod(heir)
        await run(rig, asking("next", SHARES, 10, 10))


async def test_a_layout_that_takes_the_gpu_of_a_claim_that_waits() -> None:
    """It is refused with the reason, and is prepared once the GPU is given back."""
    async with one_device() as (node, rig):
        forced = replace(asking("forced", SHARES, 60, 60), grace=scaled(GRACE_SECONDS))
        await run(rig, forced)
        rig.kubelet.api.delete_by_force(forced)
        heir = asking("heir", WHOLE_GPUS)
        await rig.create_pod(heir)
        await seen(
            lambda: "heir" in {each.spec.name for each in rig.kubelet.api.pods.values() if each.node_name}
        )
        await anyio.to_thread.run_sync(node.mode_file.write_text, "pgpu\n")
        await seen(lambda: any("is being taken from DRA" in text for _, text in said(rig)))
        assert await rig.allocatable() == 7  # its devices stay listed while the claim is allocated
        await anyio.to_thread.run_sync(node.mode_file.write_text, "one\n")
        await rig.annotate_pod(heir, "tests/again", "1")  # as the kubelet does by itself after a minute
        await rig.wait_phase(heir, Phase.RUNNING, 60)
