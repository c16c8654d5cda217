"""Who holds what, and who gets it next: pods that wait for an end, held units that no list of pods shows.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.pace import scaled
from tests.scenarios.rig import Rig
from tests.scenarios.skeleton import unschedulable
from tests.scenarios.vgpu import (
    BLOCKS,
    CORES,
    GPUS,
    MEMORY,
    gpu_of,
    offered,
    running,
    serving,
    share,
    share_pod,
    start,
)

TURNS = 20  # half of the holders complete, half are deleted
HOLDS_SECONDS = 2.0  # a holder that completes runs so long, seen first by a kubelet that looks each second
LONGEST_HOLDS_SECONDS = 12.0
COMES_SECONDS = 2.0
# The kubelet takes its pods up again one after another, some of them a second after its start.
TAKEN_UP_SECONDS = 20.0


async def one_free_gpu(rig: Rig, gpus: int) -> None:
    """All GPUs but one have 5 cores left: together not enough for a pod that waits."""
    await running(rig, *(share_pod(f"filler-{number}", CORES - 5, 5) for number in range(gpus - 1)))


async def freed_gpu_goes_to_the_waiting_pod(rig: Rig, gpus: int, blocks: int, turns: int = TURNS) -> None:
    """A holds half of the cores and all memory of the free GPU, C waits for 60 cores; A ends, C runs.

    An extender chooses the GPUs. The other half of A's cores is of no use to anybody: an agent may have taken
    it off its list. The moment A ends C fits, and the scheduler does not wait for that list.
    """
    await one_free_gpu(rig, gpus)
    seconds = min(scaled(HOLDS_SECONDS), LONGEST_HOLDS_SECONDS)
    for turn in range(turns):
        completes = turn % 2 == 0
        holder = PodSpec(
            f"holder-{turn}",
            (ContainerSpec("main", share("", 50, blocks).limits, exits=completes, seconds=seconds),),
        )
        await running(rig, holder)
        held = await gpu_of(rig, holder)
        waits = share_pod(f"waits-{turn}", 60, blocks // 4)
        await rig.create_pod(waits)
        if not completes:
            await unschedulable(rig, waits)
            await rig.ask_to_delete(holder)
        await rig.wait_phase(waits, Phase.RUNNING)
        assert await gpu_of(rig, waits) == held
        await rig.delete_pod(waits)
        await rig.ask_to_delete(holder)


async def test_waiting_pod_fits_after_agent_update(rig: Rig) -> None:
    """A has a GPU to itself over an update of the agent; B comes, A ends, and C is here within seconds."""
    await serving(rig)
    # Few units: over a restart of the agent a kubelet compares each of them with each that is held.
    await running(rig, *(share_pod(f"filler-{number}", 80, 20) for number in range(GPUS - 2)))
    for turn, (cores, blocks) in enumerate(((CORES, 0), (10, BLOCKS))):
        holder, elsewhere = share_pod(f"holder-{turn}", cores, blocks), share_pod(f"b-{turn}", 80, 30)
        await running(rig, holder)
        assert await rig.stop_agent() == 0
        await start(rig)
        await running(rig, elsewhere)
        await rig.delete_pod(holder)
        await anyio.sleep(COMES_SECONDS)
        fits = share_pod(f"fits-{turn}", 50, 40)
        await running(rig, fits)
        assert await gpu_of(rig, fits) != await gpu_of(rig, elsewhere)
        await rig.delete_pod(fits)
        await rig.delete_pod(elsewhere)
    await offered(rig, GPUS * BLOCKS)


@asynccontextmanager
async def restarted(
    rig: Rig, alive: Sequence[PodSpec], restart: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """The kubelet restarts; inside, its plugins are back. At the end it knows all its pods again."""
    held = {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in alive}
    await restart()
    yield
    with anyio.fail_after(TAKEN_UP_SECONDS):
        while {pod.name: await rig.held_ids(pod, "main", MEMORY) for pod in alive} != held:
            await anyio.sleep(0.1)


async def restarted_kubelet_lists_nothing(rig: Rig, restart: Callable[[], Awaitable[None]]) -> None:
    """`restart`: of the kubelet; when it returns, all plugins are back."""
    await serving(rig)
    # One GPU is shared, the second is held by an init container while it runs, all others are held whole.
    shared = share_pod("shared", 35, 500)
    await running(rig, shared)
    compiles = PodSpec(
        "compiles",
        (share("main", 5, 5),),
        init_containers=(ContainerSpec("compile", share("", 90, 500).limits, seconds=3600),),
    )
    await rig.create_pod(compiles)
    await rig.wait_running(compiles, "compile")
    whole = [share_pod(f"whole-{number}", CORES, 0) for number in range(GPUS - 2)]
    await running(rig, *whole)
    left = 2 * BLOCKS
    await rig.wait_allocatable(left, MEMORY)
    backlog = [share_pod(f"memory-only-{number}", 0, 300) for number in range(GPUS)]
    for pod in backlog:
        await rig.create_pod(pod)
    await unschedulable(rig, backlog[-1])
    for turn in range(2):
        async with rig.watching_allocatable(MEMORY) as seen, restarted(rig, (shared, *whole), restart):
            # So many cores are free on the shared GPU alone: the init container holds 90 of the other.
            late = share_pod(f"late-{turn}", 20, 20)
            await running(rig, late)
            assert await gpu_of(rig, late) == await gpu_of(rig, shared)
        assert max(each or 0 for each in seen) <= left, f"memory of held GPUs was on offer: {list(seen)}"
    told = await rig.all_pods()
    assert not [name for name, (phase, *_) in told.items() if phase.finished], told
    assert {told[pod.name][0] for pod in backlog} == {Phase.PENDING}
    assert told[compiles.name][0] is Phase.PENDING
    await rig.delete_pod(compiles)
    # Their turn comes.
    await rig.delete_pod(whole[0])
    await rig.wait_phase(backlog[0], Phase.RUNNING)


async def test_restarted_kubelet_that_lists_nothing(rig: Rig) -> None:
    """It learns its pods a while after its sockets serve: until then it lists none."""
    await restarted_kubelet_lists_nothing(rig, rig.restart_kubelet)


ALL = (
    test_waiting_pod_fits_after_agent_update,
    test_restarted_kubelet_that_lists_nothing,
)
