"""Init containers that hold GPUs: while one runs, PodResources show nothing of what it has.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster.
"""

from collections.abc import Mapping

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.scenarios.mode_node import COUNTED, GPUS, REQUESTS, ModeNode, mode_node
from tests.scenarios.rig import Rig

# What an init container asks for that has more than the app container after it.
MORE: Mapping[str, Mapping[str, int]] = {
    mode: {resource: 2 * amount for resource, amount in limits.items()} for mode, limits in REQUESTS.items()
}
NEXT = {"pgpu": "vgpu", "vgpu": "mps", "mps": "pgpu"}
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


async def holding(node: ModeNode, mode: str) -> list[PodSpec]:
    """Two pods in their init containers: one will have GPUs afterwards, one will not."""
    pods = [compiling(mode, f"{mode}-then-less", app=True), compiling(mode, f"{mode}-then-none", app=False)]
    for pod in pods:
        await node.create(pod)
        await node.rig.wait_running(pod, "compile")
    return pods


async def gpus_of(rig: Rig, *pods: PodSpec) -> set[str]:
    """Device nodes of all GPUs that the init containers see."""
    nodes = [await rig.container_device_nodes(pod, "compile") for pod in pods]
    return {each for some in nodes for each in some if each[-1].isdigit()}


async def unmoved(
    node: ModeNode, entering: str, state: str, gpus: int, pods: list[PodSpec], seconds: float
) -> None:
    """For a while, and over a restart of the agent, no more than so many GPUs enter the mode."""
    resource, each = COUNTED[entering]
    for restart in (False, True):
        if restart:
            await node.rig.kill_agent()
            await node.start()
        until = anyio.current_time() + seconds
        while anyio.current_time() < until:
            assert await node.rig.known_devices(resource) <= gpus * each
            await anyio.sleep(0.2)
        await node.reach(state, entering)
        # A taint keeps pods off while free GPUs change hands; held ones are no reason for it.
        assert not (await node.rig.node()).taints
    assert [await node.rig.phase(pod) for pod in pods] == [Phase.PENDING] * len(pods)


async def test_no_mode_flip_under_a_running_init_container(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await node.want("pgpu")
        for mode, entering in NEXT.items():
            await node.applied(mode)
            await node.offers(mode)
            pods = await holding(node, mode)
            held = len(await gpus_of(rig, *pods))
            assert held == (3 if mode == "pgpu" else 1)
            await node.want(entering)
            await node.offers(entering, GPUS - held)
            await unmoved(node, entering, "switching", GPUS - held, pods, LOOKS_SECONDS)
            await node.offers(entering, GPUS - held)
            await node.end(*pods)
            await node.applied(entering)
            await node.offers(entering)


async def test_refused_switch_waits_for_a_running_init_container(rig: Rig) -> None:
    async with mode_node(rig, whenBusy="refuse") as node:
        await node.want("pgpu")
        for mode, entering in NEXT.items():
            await node.applied(mode)
            await node.offers(mode)
            pods = await holding(node, mode)
            await node.want(entering)
            told = await node.reach("blocked", entering)
            # Everybody who may get nodes reads the annotation, so it counts pods; the log names them.
            assert f"in use by {len(pods)} pod" in told["message"], told["message"]
            logged = [each["message"] for each in await node.logged("mode_state")]
            assert all(any(f"default/{pod.name}" in line for line in logged) for pod in pods), logged
            await unmoved(node, entering, "blocked", 0, pods, REFUSED_SECONDS)
            await node.offers(mode)
            await node.end(*pods)
        await node.applied(NEXT["mps"])
        await node.offers(NEXT["mps"])


ALL = (
    test_no_mode_flip_under_a_running_init_container,
    test_refused_switch_waits_for_a_running_init_container,
)
