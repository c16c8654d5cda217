"""Init containers that hold GPUs: while one runs, PodResources show nothing of what it has.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster.
"""

from collections.abc import Mapping

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.scenarios.mode_node import COUNTED, REQUESTS, ModeNode, mode_node
from tests.scenarios.rig import Rig

# What an init container asks for that has more than the app container after it.
MORE: Mapping[str, Mapping[str, int]] = {
    mode: {resource: 2 * amount for resource, amount in limits.items()} for mode, limits in REQUESTS.items()
}
# Each mode gives its GPUs to another; of those it had its init containers hold all but one.
PLACES = ("0-3", "4-5", "rest")
LAYOUTS = {
    name: [{"gpus": [place], "mode": mode} for place, mode in zip(PLACES, modes, strict=True)]
    for name, modes in (("before", ("pgpu", "vgpu", "mps")), ("after", ("vgpu", "mps", "pgpu")))
}
BEFORE, BUSY, AFTER = (
    {"pgpu": 4, "vgpu": 2, "mps": 2},
    {"pgpu": 1, "vgpu": 1, "mps": 1},
    {"pgpu": 2, "vgpu": 4, "mps": 2},
)
# An agent that overlooks the holder flips its GPU 3.6 s after the label.
LOOKS_SECONDS = 4.5
REFUSED_SECONDS = 1.0  # a refused switch does nothing, at once
FOR_GOOD = 3600.0


def compiling(mode: str, name: str, app: bool) -> PodSpec:
    """A pod whose init container runs on, with GPUs for its app container or without."""
    return PodSpec(
        name,
        (ContainerSpec("main", REQUESTS[mode] if app else {}),),
        init_containers=(ContainerSpec("compile", MORE[mode] if app else REQUESTS[mode], seconds=FOR_GOOD),),
    )


async def offers(node: ModeNode, gpus: Mapping[str, int]) -> None:
    """Wait until so many GPUs are offered in each mode."""
    for mode, count in gpus.items():
        await node.offers(mode, count)


async def holding(node: ModeNode) -> list[PodSpec]:
    """In each mode two pods in their init containers: one will have GPUs afterwards, one will not."""
    await node.want("before")
    await node.applied("before")
    await offers(node, BEFORE)
    pods: list[PodSpec] = []
    for mode, gpus in BEFORE.items():
        here = [
            compiling(mode, f"{mode}-then-less", app=True),
            compiling(mode, f"{mode}-then-none", app=False),
        ]
        for pod in here:
            await node.create(pod)
            await node.rig.wait_running(pod, "compile")
        assert len(await gpus_of(node.rig, *here)) == gpus - 1
        pods += here
    return pods


async def gpus_of(rig: Rig, *pods: PodSpec) -> set[str]:
    """Device nodes of all GPUs that the init containers see."""
    nodes = [await rig.container_device_nodes(pod, "compile") for pod in pods]
    return {each for some in nodes for each in some if each[-1].isdigit()}


async def unmoved(
    node: ModeNode, state: str, gpus: Mapping[str, int], pods: list[PodSpec], seconds: float
) -> None:
    """For a while, and over a restart of the agent, no mode has more GPUs than that."""
    for restart in (False, True):
        if restart:
            await node.rig.kill_agent()
            await node.start()
        until = anyio.current_time() + seconds
        while anyio.current_time() < until:
            for mode, count in gpus.items():
                resource, each = COUNTED[mode]
                assert await node.rig.known_devices(resource) <= count * each
            await anyio.sleep(0.2)
        await node.reach(state, "after")
        # A taint keeps pods off while free GPUs change hands; held ones are no reason for it.
        assert not (await node.rig.node()).taints
    assert [await node.rig.phase(pod) for pod in pods] == [Phase.PENDING] * len(pods)


async def test_no_mode_flip_under_a_running_init_container(rig: Rig) -> None:
    async with mode_node(rig, layouts=LAYOUTS) as node:
        pods = await holding(node)
        await node.want("after")
        await node.reach("switching", "after")
        await offers(node, BUSY)
        await unmoved(node, "switching", BUSY, pods, LOOKS_SECONDS)
        await offers(node, BUSY)
        await node.end(*pods)
        await node.applied("after")
        await offers(node, AFTER)


async def test_refused_switch_waits_for_a_running_init_container(rig: Rig) -> None:
    async with mode_node(rig, layouts=LAYOUTS, whenBusy="refuse") as node:
        pods = await holding(node)
        await node.want("after")
        told = await node.reach("blocked", "after")
        # Everybody who may get nodes reads the annotation, so it counts pods; the log names them.
        assert f"in use by {len(pods)} pod" in told["message"], told["message"]
        logged = [each["message"] for each in await node.logged("mode_state")]
        named = max(sum(f"default/{pod.name}" in line for pod in pods) for line in logged)
        assert named == len(pods) - 1, logged  # five, "and 1 more"
        await unmoved(node, "blocked", BEFORE, pods, REFUSED_SECONDS)
        await offers(node, BEFORE)
        await node.end(*pods)
        await node.applied("after")
        await offers(node, AFTER)


ALL = (
    test_no_mode_flip_under_a_running_init_container,
    test_refused_switch_waits_for_a_running_init_container,
)
