"""Claims over restarts, forced deletions and what the kubelet drops, on the embedded kubelet."""

from dataclasses import replace

import anyio
import anyio.to_thread

from agent.model.modes import SHARES, WHOLE_GPUS
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from tests.component.dra.test_door import asking, devices, dra_node, offered, rig_of, run, start, until
from tests.scenarios.agent_face import logged
from tests.scenarios.mps import MpsNode

GRACE_SECONDS = 3.0


async def test_slices_come_back_after_a_restart_of_the_kubelet() -> None:
    async with dra_node() as node:
        rig = rig_of(node)
        stays = asking("stays", SHARES, 30, 40)
        await run(rig, stays)
        daemons = await node.pids()
        before = {each["metadata"]["uid"] for each in await rig.resources("ResourceSlice")}
        await rig.kubelet.restart()
        await until(rig, bool)
        with anyio.fail_after(20):
            while {each["metadata"]["uid"] for each in await rig.resources("ResourceSlice")} & before:
                await anyio.sleep(0.02)
        await offered(rig)
        await run(rig, asking("after", SHARES, 30, 40))
        assert await node.pids() == daemons
        await rig.delete_pod(stays)
        assert not await logged(rig, "claim_refused")


async def test_what_happens_while_the_agent_is_away_is_made_up_for() -> None:
    """One pod is deleted and one is created; neither waits for the kubelet's resync, a minute later."""
    async with dra_node() as node:
        rig = rig_of(node)
        stays, leaves, late = (asking(name, SHARES, 20, 10) for name in ("stays", "leaves", "late"))
        await run(rig, stays, leaves)
        daemons = await node.pids()
        await rig.kill_agent()
        await rig.ask_to_delete(leaves)
        await rig.create_pod(late)
        with anyio.fail_after(20):
            while not rig.kubelet.pod(late).claims_fault:
                await anyio.sleep(0.02)
        await start(node)
        await rig.wait_phase(late, Phase.RUNNING, 20)
        with anyio.fail_after(30):
            while leaves.key in rig.kubelet.api.pods:
                await anyio.sleep(0.02)
        assert await node.pids() == daemons
        assert await rig.phase(stays) is Phase.RUNNING


async def test_refusal_of_the_kubelet_is_made_up_for() -> None:
    """Its own 403, where the authorizer has not heard of the pod yet: it never asks the agent."""
    async with dra_node() as node:
        rig = rig_of(node)
        rig.kubelet.api.resources.forbidden_reads = 1
        await run(rig, asking("burst", SHARES, 20, 10))
        assert not rig.kubelet.api.resources.forbidden_reads


async def test_heir_of_a_forced_deletion_waits_for_the_container() -> None:
    """Also where the agent starts again meanwhile, and PodResources name the pod no more."""
    async with dra_node() as node:
        rig = rig_of(node)
        await run(rig, asking("filler", WHOLE_GPUS, count=7))
        for restart in (False, True):
            forced = replace(asking(f"forced-{restart}", SHARES, 30, 10), grace=GRACE_SECONDS)
            await run(rig, forced)
            uid = rig.kubelet.pod(forced).uid
            rig.kubelet.api.delete_by_force(forced)
            if restart:
                await rig.kill_agent()
                await start(node)
            heir = asking(f"heir-{restart}", WHOLE_GPUS)
            await rig.create_pod(heir)
            containers = rig.kubelet._machine.containers
            with anyio.fail_after(30):
                while not rig.kubelet.runs(heir, "main"):
                    await anyio.sleep(0.005)
            assert not containers.running(uid, "main")
            await rig.delete_pod(heir)


async def test_claim_of_two_pods_is_one_share() -> None:
    async with dra_node() as node:
        rig = rig_of(node)
        spec = asking("template", SHARES, 30, 10).claims[0].template
        await rig.create_resource(
            "ResourceClaim", {"metadata": {"name": "both", "namespace": "default"}, "spec": spec}
        )
        pods = [
            PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=(PodClaim("gpu", "both"),))
            for name in ("one", "two")
        ]
        await run(rig, *pods)
        await rig.delete_pod(pods[0])
        assert len(await node.pids()) == 1
        assert await rig.phase(pods[1]) is Phase.RUNNING
        await rig.delete_pod(pods[1])
        await no_daemon(node)


async def no_daemon(node: MpsNode) -> None:
    with anyio.fail_after(20):
        while await node.pids():
            await anyio.sleep(0.02)


async def test_gpus_are_offered_by_one_door_and_move_between_them() -> None:
    layouts = {"doors": [{"gpus": ["0-3"], "mode": "dra"}, {"gpus": ["rest"], "mode": "pgpu"}]}
    async with dra_node() as node:
        rig = rig_of(node)
        await rig.kill_agent()
        await start(node, layouts=layouts)
        await anyio.to_thread.run_sync(node.mode_file.write_text, "doors\n")
        await offered(rig, 4)
        await rig.wait_allocatable(4)
        await run(rig, claimer := asking("claimer", WHOLE_GPUS))
        await anyio.to_thread.run_sync(node.mode_file.write_text, "pgpu\n")
        await until(rig, lambda found: all(each.get("taints") for each in found))
        await rig.wait_allocatable(7)
        held = (await rig.claimed(claimer, "main"))[0].device
        assert held in {each["name"] for each in devices(rig)}
        await rig.delete_pod(claimer)
        await rig.wait_allocatable(8)
        await anyio.to_thread.run_sync(node.mode_file.write_text, "dra\n")
        await offered(rig, 8)
        await rig.wait_allocatable(0)
