"""Fractions of GPUs: a pod's core and memory always land on one GPU, whatever happens meanwhile.

Each runs on a fresh node with 8 GPUs of 561 blocks (see `rig.py`), on the embedded kubelet and on the real
cluster.
"""

import random
from collections import Counter
from collections.abc import Iterable

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.scenarios.rig import Rig
from tests.scenarios.skeleton import NUMBERED

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
CORES, BLOCKS = 100, 561  # of each GPU: floor(143,771 MiB / 256 MiB)
GPUS = 8


def share(name: str, cores: int, blocks: int, *, restartable: bool = False) -> ContainerSpec:
    """A container that asks for cores and memory blocks; 0 leaves one out."""
    limits = {resource: count for resource, count in ((CORE, cores), (MEMORY, blocks)) if count}
    return ContainerSpec(name, limits, restartable=restartable)


def share_pod(name: str, cores: int, blocks: int) -> PodSpec:
    """A pod with one such container, `main`."""
    return PodSpec(name, (share("main", cores, blocks),))


async def start(rig: Rig, *, extender: bool = False) -> None:
    """Start the agent in vGPU mode, with the API server at hand; `extender`: one chooses the pods' GPUs."""
    settings = {"defaultMode": "vgpu", "cluster.extender": extender, **await rig.api_access()}
    await rig.start_agent(settings)


async def serving(rig: Rig, *, extender: bool = False) -> None:
    """The agent runs and the node offers all units of all GPUs."""
    await start(rig, extender=extender)
    await offered(rig, GPUS * BLOCKS)


async def offered(rig: Rig, blocks: int, deadline: float = 60.0) -> None:
    """Wait until all cores and so many blocks are to be had, by the status and by the kubelet itself."""
    for resource, count in ((CORE, GPUS * CORES), (MEMORY, blocks)):
        with anyio.fail_after(deadline):
            while await rig.known_devices(resource) != count:
                await anyio.sleep(0.05)
        await rig.wait_allocatable(count, resource)


async def created(rig: Rig, pods: Iterable[PodSpec]) -> None:
    for pod in pods:
        await rig.create_pod(pod)


async def running(rig: Rig, *pods: PodSpec, deadline: float = 60.0) -> None:
    """Create the pods at once, then wait for all of them."""
    await created(rig, pods)
    for pod in pods:
        await rig.wait_phase(pod, Phase.RUNNING, deadline)


async def settled(rig: Rig, pod: PodSpec, deadline: float = 60.0) -> Phase:
    """Wait until the pod runs or has failed."""
    with anyio.fail_after(deadline):
        while (phase := await rig.phase(pod)) is Phase.PENDING:
            await anyio.sleep(0.05)
    return phase


async def gpu_of(rig: Rig, pod: PodSpec, container: str = "main") -> str:
    """The one GPU of a container that runs; its units are counted and its device nodes compared."""
    spec = next(each for each in (*pod.init_containers, *pod.containers) if each.name == container)
    gpus: set[str] = set()
    for resource in (CORE, MEMORY):
        held = await rig.held_ids(pod, container, resource)
        assert len(held) == spec.limits.get(resource, 0)
        gpus |= {each.partition("::")[0] for each in held}
    assert len(gpus) == 1, f"pod {pod.name} has units of {sorted(gpus)}"
    gpu = gpus.pop()
    nodes = await rig.container_device_nodes(pod, container)
    assert {node for node in nodes if NUMBERED.fullmatch(node)} == {rig.device_node(gpu)}
    return gpu


async def check_pairs(rig: Rig, pods: Iterable[PodSpec]) -> dict[str, tuple[int, int]]:
    """Every pair on one GPU, no unit held twice; what each GPU has left, cores and blocks."""
    offered: Counter[str] = Counter()
    left = {gpu: [CORES, BLOCKS] for gpu in rig.gpu_uuids()}
    for pod in pods:
        for container in pod.containers:
            gpu = await gpu_of(rig, pod, container.name)
            for place, resource in enumerate((CORE, MEMORY)):
                held = await rig.held_ids(pod, container.name, resource)
                offered.update(held)
                left[gpu][place] -= len(held)
    assert not offered or max(offered.values()) == 1
    assert all(min(each) >= 0 for each in left.values()), left
    return {gpu: (cores, blocks) for gpu, (cores, blocks) in left.items()}


async def test_forty_random_pairs_on_one_gpu_each(rig: Rig) -> None:
    await serving(rig)
    dice = random.Random(40)
    pods = [share_pod(f"pair-{n}", dice.randint(4, 20), dice.randint(20, 120)) for n in range(40)]
    for burst in range(0, 40, 10):
        await created(rig, pods[burst : burst + 10])
    for pod in pods:
        await rig.wait_phase(pod, Phase.RUNNING, 120.0)
    await check_pairs(rig, pods)


async def test_pair_that_fits_no_gpu_is_refused_with_largest_free_share(rig: Rig) -> None:
    await serving(rig)
    fillers = [share_pod(f"filler-{n}", 60, 300) for n in range(GPUS)]
    await running(rig, *fillers)
    left = await check_pairs(rig, fillers)
    assert set(left.values()) == {(40, 261)}
    # The node has 320 cores and 2,088 blocks free, so that the scheduler sends the pod here.
    unlucky = share_pod("unlucky", 50, 100)
    await rig.create_pod(unlucky)
    await rig.wait_phase(unlucky, Phase.FAILED)
    assert await rig.reason(unlucky) == "UnexpectedAdmissionError"
    told = await rig.message(unlucky)
    assert "50 cores and 100 memory blocks do not fit on any single GPU" in told
    assert "the largest free share is 40 cores and 261 memory blocks" in told
    await running(rig, share_pod("modest", 40, 261))


async def test_equal_cores_different_memory_never_swapped(rig: Rig) -> None:
    await serving(rig)
    fillers = [share_pod(f"filler-{n}", 60, 400) for n in range(GPUS - 1)]
    await running(rig, *fillers)
    free = next(gpu for gpu, left in (await check_pairs(rig, fillers)).items() if left == (CORES, BLOCKS))
    # All ask for 20 cores. Only the free GPU has room for the large ones, and room for no more than these.
    large = [share_pod(f"large-{n}", 20, 187) for n in range(3)]
    small = [share_pod(f"small-{n}", 20, 40) for n in range(12)]
    await running(
        rig, *(pod for n in range(3) for pod in (small[4 * n], large[n], *small[4 * n + 1 : 4 * n + 4]))
    )
    assert {await gpu_of(rig, pod) for pod in large} == {free}
    await check_pairs(rig, (*fillers, *large, *small))


async def test_agent_sigkilled_ten_times_in_a_burst(rig: Rig) -> None:
    await serving(rig)
    dice = random.Random(10)
    alive: list[PodSpec] = []
    for turn in range(10):
        burst = [share_pod(f"burst-{turn}-{n}", dice.randint(2, 12), dice.randint(10, 60)) for n in range(3)]
        await created(rig, burst)
        # Counted in pods, since a busy machine admits none within a given time.
        for pod in burst[: dice.randint(0, 2)]:
            await settled(rig, pod)
        await anyio.sleep(dice.uniform(0.0, 0.3))
        await rig.kill_agent()
        await start(rig)
        # A pod that was just being admitted fails for good, as the kubelet has it; all others get their pair.
        alive += [pod for pod in burst if await settled(rig, pod) is Phase.RUNNING]
        left = await check_pairs(rig, alive)
        await offered(rig, GPUS * BLOCKS)
        # The new agent knows to the unit what is left: the whole rest of a GPU is offered, and not one more.
        cores, blocks = max(left.values())
        rest = (
            share_pod(f"rest-{turn}", cores, blocks)
            if cores < CORES
            else share_pod(f"rest-{turn}", 99, BLOCKS)
        )
        await running(rig, rest)
        await check_pairs(rig, (*alive, rest))
        await rig.delete_pod(rest)
    assert alive
    await offered(rig, GPUS * BLOCKS)


async def test_kubelet_restart_under_vgpu_pods(rig: Rig) -> None:
    await serving(rig)
    whole = PodSpec("whole", (share("main", CORES, 5),))
    before = [share_pod("one", 30, 100), share_pod("two", 70, 200), share_pod("memory", 0, 50)]
    # None with init containers: the kubelet checks the devices of ended containers before plugins are back.
    await running(rig, whole, *before)
    held = {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in before}
    await rig.restart_kubelet()
    # The memory of the GPU that is held whole stays unsold but for the 5 blocks that came with it.
    await offered(rig, (GPUS - 1) * BLOCKS + 5)
    for pod in (whole, *before):
        assert await rig.phase(pod) is Phase.RUNNING, await rig.message(pod)
    # The kubelet takes its pods up again one after the other; until then its records lack some.
    with anyio.fail_after(15):
        while {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in before} != held:
            await anyio.sleep(0.1)
    after = share_pod("after", 60, 400)
    await running(rig, after)
    await check_pairs(rig, [*before, after, whole])


async def test_init_and_app_containers_share_one_gpu(rig: Rig) -> None:
    await serving(rig)
    filler = share_pod("filler", 50, 100)
    await running(rig, filler)
    # Packed tightly the init container would join the filler, where those who inherit from it do not fit.
    heirs = [
        PodSpec(
            f"heirs-{n}",
            (share("main", 40, 150), share("second", 10, 20)),
            init_containers=(share("init", 10, 50), share("sidecar", 5, 10, restartable=True)),
        )
        for n in range(3)
    ]
    await running(rig, *heirs)
    for pod in heirs:
        main = await gpu_of(rig, pod, "main")
        nodes = await rig.container_device_nodes(pod, "init")
        assert {node for node in nodes if NUMBERED.fullmatch(node)} == {rig.device_node(main)}
        for name in ("sidecar", "second"):
            await gpu_of(rig, pod, name)
    await gpu_of(rig, filler)


async def test_whole_gpu_takes_its_memory_off_the_lists(rig: Rig) -> None:
    await serving(rig)
    await running(rig, share_pod("share", 10, 10))
    whole = PodSpec("whole", (ContainerSpec("main", {CORE: 2 * CORES}),))
    await running(rig, whole)
    held = {each.partition("::")[0] for each in await rig.held_ids(whole, "main", CORE)}
    assert len(held) == 2
    nodes = await rig.container_device_nodes(whole, "main")
    assert {node for node in nodes if NUMBERED.fullmatch(node)} == {rig.device_node(gpu) for gpu in held}
    await rig.wait_allocatable((GPUS - 2) * BLOCKS, MEMORY)
    await rig.delete_pod(whole)
    await rig.wait_allocatable(GPUS * BLOCKS, MEMORY)


async def test_impossible_requests_say_the_rule(rig: Rig) -> None:
    await serving(rig)
    for name, cores, blocks, rule in (
        ("odd", 150, 10, "must be a multiple of 100"),
        ("no-memory", 30, 0, "add tencent.com/vcuda-memory to its limits"),
    ):
        pod = share_pod(name, cores, blocks)
        await rig.create_pod(pod)
        await rig.wait_phase(pod, Phase.FAILED)
        assert rule in await rig.message(pod)


ALL = (
    test_forty_random_pairs_on_one_gpu_each,
    test_pair_that_fits_no_gpu_is_refused_with_largest_free_share,
    test_equal_cores_different_memory_never_swapped,
    test_agent_sigkilled_ten_times_in_a_burst,
    test_kubelet_restart_under_vgpu_pods,
    test_init_and_app_containers_share_one_gpu,
    test_whole_gpu_takes_its_memory_off_the_lists,
    test_impossible_requests_say_the_rule,
)
