"""Whole GPUs, from the node's figures to what a container sees: the scenarios of the walking skeleton.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster.
"""

import re
from collections.abc import Iterable

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.scenarios.rig import GPU, Rig

NUMBERED = re.compile(r"/dev/nvidia\d+")


def gpu_pod(name: str, gpus: int, env: dict[str, str] | None = None) -> PodSpec:
    """A pod with one container that asks for whole GPUs."""
    return PodSpec(name, (ContainerSpec("main", {GPU: gpus}, env or {}),))


async def serving(rig: Rig) -> None:
    """The agent runs and the node offers all its GPUs."""
    await rig.start_agent()
    await rig.wait_allocatable(len(rig.gpu_uuids()))


async def running(rig: Rig, pods: Iterable[PodSpec]) -> None:
    """Create the pods, then wait for all of them."""
    wanted = tuple(pods)
    for pod in wanted:
        await rig.create_pod(pod)
    for pod in wanted:
        await rig.wait_phase(pod, Phase.RUNNING)


async def unschedulable(rig: Rig, pod: PodSpec, deadline: float = 30.0) -> str:
    """Wait until the scheduler has said that the pod does not fit; its message."""
    with anyio.fail_after(deadline):
        while await rig.reason(pod) != "Unschedulable":
            assert await rig.phase(pod) is Phase.PENDING
            await anyio.sleep(0.05)
    return await rig.message(pod)


async def check_container(rig: Rig, pod: PodSpec, container: str, gpus: int) -> frozenset[str]:
    """The container holds that many GPUs and sees the device nodes of exactly these; their UUIDs."""
    held = await rig.held_ids(pod, container)
    assert len(held) == gpus
    assert held <= set(rig.gpu_uuids())
    seen = await rig.container_device_nodes(pod, container)
    assert {node for node in seen if NUMBERED.fullmatch(node)} == {rig.device_node(uuid) for uuid in held}
    assert "/dev/nvidiactl" in seen
    return held


async def all_held(rig: Rig, pods: Iterable[PodSpec]) -> list[str]:
    """IDs that the containers of the pods hold, each as often as it is held."""
    return [uuid for pod in pods for each in pod.containers for uuid in await rig.held_ids(pod, each.name)]


async def test_eight_gpus_become_allocatable(rig: Rig) -> None:
    assert len(rig.gpu_uuids()) == 8
    assert not await rig.allocatable()
    await serving(rig)
    assert await rig.capacity() == 8
    everything = gpu_pod("everything", 8)
    await running(rig, [everything])
    assert await check_container(rig, everything, "main", 8) == set(rig.gpu_uuids())


async def test_pod_sees_exactly_its_two_gpus(rig: Rig) -> None:
    await serving(rig)
    modest = gpu_pod("modest", 2)
    greedy = gpu_pod("greedy", 2, {"NVIDIA_VISIBLE_DEVICES": "all"})
    await running(rig, [modest, greedy])
    first = await check_container(rig, modest, "main", 2)
    second = await check_container(rig, greedy, "main", 2)
    assert not first & second
    # Were this still `all`, NVIDIA's own runtime would show every GPU of the node.
    environment = await rig.container_environment(greedy, "main")
    assert environment["NVIDIA_VISIBLE_DEVICES"] != "all"


async def test_ninth_gpu_pod_stays_pending(rig: Rig) -> None:
    await serving(rig)
    eight = [gpu_pod(f"one-of-eight-{number}", 1) for number in range(8)]
    ninth = gpu_pod("ninth", 1)
    await running(rig, eight)
    await rig.create_pod(ninth)
    assert "Insufficient nvidia.com/gpu" in await unschedulable(rig, ninth)
    assert await rig.phase(ninth) is Phase.PENDING
    assert sorted(await all_held(rig, eight)) == sorted(rig.gpu_uuids())
    await rig.delete_pod(eight[3])
    await rig.wait_phase(ninth, Phase.RUNNING)
    await check_container(rig, ninth, "main", 1)


async def test_deleted_pods_free_their_gpus(rig: Rig) -> None:
    await serving(rig)
    for turn in range(2):
        four = [gpu_pod(f"four-{turn}-{number}", 4) for number in range(2)]
        await running(rig, four)
        assert sorted(await all_held(rig, four)) == sorted(rig.gpu_uuids())
        for pod in four:
            await rig.delete_pod(pod)
        everything = gpu_pod(f"everything-{turn}", 8)
        await running(rig, [everything])
        assert await rig.held_ids(everything, "main") == set(rig.gpu_uuids())
        await rig.delete_pod(everything)
    assert await rig.allocatable() == 8


async def test_kubelet_restart_keeps_allocatable(rig: Rig) -> None:
    await serving(rig)
    before = gpu_pod("before", 2)
    await running(rig, [before])
    held = await check_container(rig, before, "main", 2)
    async with rig.watching_allocatable() as values:
        await rig.restart_kubelet(1.0)
        await anyio.sleep(rig.watch_seconds)
        assert list(values) == [8]
    assert rig.agent_running()
    assert await rig.phase(before) is Phase.RUNNING
    after = gpu_pod("after", 6)
    await running(rig, [after])
    assert await check_container(rig, before, "main", 2) == held
    assert await check_container(rig, after, "main", 6) == set(rig.gpu_uuids()) - held


async def test_agent_sigkill_disturbs_no_pod(rig: Rig) -> None:
    await serving(rig)
    early = [gpu_pod("early-two", 2), gpu_pod("early-one", 1)]
    await running(rig, early)
    held = {pod.name: await check_container(rig, pod, "main", pod.request(GPU)) for pod in early}
    await rig.kill_agent()
    assert not rig.agent_running()
    # The kubelet sees the stream end at once and offers nothing from its next status tick on.
    await rig.wait_allocatable(0)
    for pod in early:
        assert await rig.phase(pod) is Phase.RUNNING
        assert await rig.held_ids(pod, "main") == held[pod.name]
    await serving(rig)
    late = [gpu_pod(f"late-{number}", 1) for number in range(5)]
    tenth = gpu_pod("one-too-many", 1)
    await running(rig, late)
    await rig.create_pod(tenth)
    await unschedulable(rig, tenth)
    for pod in early:
        assert await rig.phase(pod) is Phase.RUNNING
        assert await check_container(rig, pod, "main", pod.request(GPU)) == held[pod.name]
    assert sorted(await all_held(rig, [*early, *late])) == sorted(rig.gpu_uuids())


async def test_two_containers_in_one_pod(rig: Rig) -> None:
    await serving(rig)
    pair = PodSpec("pair", (ContainerSpec("left", {GPU: 1}), ContainerSpec("right", {GPU: 3})))
    await running(rig, [pair])
    left = await check_container(rig, pair, "left", 1)
    right = await check_container(rig, pair, "right", 3)
    assert not left & right


async def test_init_container_hands_its_gpu_on(rig: Rig) -> None:
    await serving(rig)
    staged = PodSpec(
        "staged",
        containers=(ContainerSpec("main", {GPU: 1}),),
        init_containers=(ContainerSpec("prepare", {GPU: 1}),),
    )
    rest = gpu_pod("rest", 7)
    # Together they fit only if the init container's GPU is used again.
    await running(rig, [staged, rest])
    held = await check_container(rig, staged, "main", 1)
    assert await rig.held_ids(staged, "prepare") == frozenset()
    prepared = await rig.container_device_nodes(staged, "prepare")
    assert {node for node in prepared if NUMBERED.fullmatch(node)} == {rig.device_node(uuid) for uuid in held}
    assert await check_container(rig, rest, "main", 7) == set(rig.gpu_uuids()) - held


ALL = (
    test_eight_gpus_become_allocatable,
    test_pod_sees_exactly_its_two_gpus,
    test_ninth_gpu_pod_stays_pending,
    test_deleted_pods_free_their_gpus,
    test_kubelet_restart_keeps_allocatable,
    test_agent_sigkill_disturbs_no_pod,
    test_two_containers_in_one_pod,
    test_init_container_hands_its_gpu_on,
)
