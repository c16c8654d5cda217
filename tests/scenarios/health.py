"""GPUs that fall ill under a node in service: what the node offers, before, meanwhile and after.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster.
"""

from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from agent.nvml.port import NvmlCode
from agent.simulator.kubelet.pod_specs import Phase
from tests.pace import scaled
from tests.scenarios import lists
from tests.scenarios.agent_face import logged, metric
from tests.scenarios.rig import GPU, Rig
from tests.scenarios.skeleton import all_held, check_container, gpu_pod, running

DOUBLE_BIT_ERROR, GSP_TIMEOUT, PAGE_FAULT = 48, 119, 31
# Application, informational, contained, needs a reset, the same but not to be witnessed, needs a reboot.
ONE_OF_EACH_CLASS = (PAGE_FAULT, 63, 94, DOUBLE_BIT_ERROR, GSP_TIMEOUT, 54)
CORE, MEMORY, BLOCK_BYTES = "tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 << 20
# Longer than a status tick of the rigs' kubelets (2 s at most), so that both states show in the node.
QUIET_SECONDS = 6.0
KINDS = ("needsReset", "needsReboot", "contained", "ecc", "lost")
# For a GPU that never gets so far.
BRIEF_SECONDS = 1.0
# A probe round (2 s), what the probe may take, a status tick.
FOUND_SECONDS = 12.0


# Lines that a fault which lasts may add to the log while it is watched, and what part of a processor it may
# take.
MOST_LINES, MOST_CPU = 12, 0.2


def quiet_for(seconds: float) -> Mapping[str, object]:
    """Settings by which a GPU is offered again so long after its last fault."""
    return {"health.kernelLog": None, **dict.fromkeys((f"health.quiet.{kind}" for kind in KINDS), seconds)}


QUIET: Mapping[str, object] = quiet_for(QUIET_SECONDS)


async def serving(rig: Rig, quiet: Mapping[str, object] = QUIET) -> Path:
    """An agent in service; the file where its lists are written down."""
    record = rig.record_lists()
    await rig.start_agent({**quiet, **await rig.api_access()})
    await rig.wait_allocatable(8)
    return record


async def never_flickered(rig: Rig, record: Path, *sick: int) -> None:
    """On every list message all GPUs but the sick ones were offered."""
    well = [uuid for uuid in rig.gpu_uuids() if uuid not in {rig.machine.uuid(slot) for slot in sick}]
    assert await anyio.to_thread.run_sync(lists.flickers, record, GPU, well) == []


async def told(rig: Rig, *reasons: str) -> None:
    """The node's events come to have these reasons."""
    with anyio.fail_after(10):
        while not set(reasons) <= set(await rig.event_reasons()):
            await anyio.sleep(0.1)


async def test_a_gpu_with_an_ecc_error_leaves_and_returns_by_itself(rig: Rig) -> None:
    await serving(rig)
    holder = gpu_pod("holder", 3)
    await running(rig, [holder])
    held = await check_container(rig, holder, "main", 3)
    sick = next(uuid for uuid in rig.gpu_uuids() if uuid not in held)
    async with rig.watching_allocatable() as values:
        rig.machine.xid(sick, DOUBLE_BIT_ERROR)
        rig.machine.ecc_double(sick)
        await rig.wait_allocatable(7, deadline=FOUND_SECONDS)
        assert await rig.capacity() == 8
        await rig.wait_allocatable(8)
        with anyio.move_on_after(scaled(10)):  # a watch may show it later than a GET
            while len(values) < 3:
                await anyio.sleep(0.01)
        assert list(values) == [8, 7, 8]
    assert await rig.phase(holder) is Phase.RUNNING
    rest = gpu_pod("rest", 5)
    await running(rig, [rest])
    assert sorted(await all_held(rig, [holder, rest])) == sorted(rig.gpu_uuids())


async def test_a_gpu_that_is_lost_in_silence_is_found_and_the_others_are_sold(rig: Rig) -> None:
    record = await serving(rig)
    rig.machine.lose(5)
    await rig.wait_allocatable(7, deadline=FOUND_SECONDS)
    await told(rig, "GPULost")
    seven = gpu_pod("seven", 7)
    await running(rig, [seven])
    assert rig.machine.uuid(5) not in await check_container(rig, seven, "main", 7)
    rig.machine.restore(5)
    await rig.wait_allocatable(8)
    last = gpu_pod("last", 1)
    await running(rig, [last])
    assert await rig.held_ids(last, "main") == {rig.machine.uuid(5)}
    await told(rig, "GPURecovered")
    await never_flickered(rig, record, 5)


async def test_a_gpu_that_fell_off_the_bus_returns_once_it_is_back(rig: Rig) -> None:
    record = await serving(rig, quiet_for(BRIEF_SECONDS))
    rig.machine.fall_off_bus(2)
    await rig.wait_allocatable(7, deadline=FOUND_SECONDS)
    await told(rig, "GPUUnhealthy")
    async with rig.watching_allocatable() as values:
        await anyio.sleep(BRIEF_SECONDS + rig.watch_seconds)
        assert list(values) == [7]  # time alone heals nothing
        rig.machine.restore(2)
        await rig.wait_allocatable(8)
    await told(rig, "GPURecovered")
    await never_flickered(rig, record, 2)


async def test_each_class_of_xid_has_its_own_end(rig: Rig) -> None:
    record = await serving(rig)
    async with rig.watching_allocatable() as values:
        for slot, xid in enumerate(ONE_OF_EACH_CLASS):
            rig.machine.xid(slot, xid)
        await rig.wait_allocatable(5, deadline=FOUND_SECONDS)
        await rig.wait_allocatable(6)  # the double-bit error's GPU; the last two need a reset, or more
        await anyio.sleep(rig.watch_seconds)
        assert values[-1] == 6
        assert min(value or 0 for value in values) == 5
    await told(rig, "GPUUnhealthy", "GPURecovered")
    six = gpu_pod("six", 6)
    await running(rig, [six])
    held = await check_container(rig, six, "main", 6)
    assert {rig.machine.uuid(slot) for slot in (4, 5)} == set(rig.gpu_uuids()) - held
    await never_flickered(rig, record, 3, 4, 5)


async def test_an_event_wait_that_fails_for_ever_stays_cheap_and_quiet(rig: Rig) -> None:
    record = await serving(rig)
    rig.machine.fail("nvmlEventSetWait", NvmlCode.UNKNOWN)
    with anyio.fail_after(10):
        while not await logged(rig, "event_wait_failing"):
            await anyio.sleep(0.1)
    lines = len(rig.agent_log().read_text().splitlines())
    cpu = await metric(rig, "gpu_agent_process_cpu_seconds_total")
    messages = (await anyio.to_thread.run_sync(lists.check, record)).messages
    await anyio.sleep(rig.watch_seconds)
    assert await metric(rig, "gpu_agent_process_cpu_seconds_total") - cpu < MOST_CPU * rig.watch_seconds
    assert len(rig.agent_log().read_text().splitlines()) - lines < MOST_LINES
    assert (await anyio.to_thread.run_sync(lists.check, record)).messages == messages
    # Probing still finds what is lost.
    rig.machine.lose(3)
    await rig.wait_allocatable(7, deadline=FOUND_SECONDS)
    assert len(await logged(rig, "event_wait_failing")) == 1
    await never_flickered(rig, record, 3)


async def test_an_unhealthy_gpu_stays_so_over_restarts_of_agent_and_kubelet(rig: Rig) -> None:
    await serving(rig, quiet_for(BRIEF_SECONDS))
    rig.machine.fall_off_bus(2)
    rig.machine.xid(6, GSP_TIMEOUT)
    await rig.wait_allocatable(6, deadline=FOUND_SECONDS)
    async with rig.watching_allocatable() as values:
        await rig.restart_kubelet(1.0)
        await rig.wait_allocatable(6)
        await rig.kill_agent()
        await rig.wait_allocatable(0)
        await rig.start_agent(quiet_for(BRIEF_SECONDS))
        await rig.wait_allocatable(6)
        await anyio.sleep(BRIEF_SECONDS + rig.watch_seconds)
        assert max(value or 0 for value in values) == 6
        assert values[-1] == 6
    assert await rig.capacity() == 8
    six = gpu_pod("six", 6)
    await running(rig, [six])
    sick = {rig.machine.uuid(2), rig.machine.uuid(6)}
    assert not sick & await check_container(rig, six, "main", 6)


async def test_faults_of_programs_and_notices_change_nothing(rig: Rig) -> None:
    await serving(rig)
    async with rig.watching_allocatable() as values:
        for xid in (13, PAGE_FAULT, 43, 45, 63, 68, 92, 109):
            for uuid in rig.gpu_uuids():
                rig.machine.xid(uuid, xid)
        await anyio.sleep(rig.watch_seconds)
        assert list(values) == [8]


async def test_a_call_that_never_returns_costs_its_gpu_only(rig: Rig) -> None:
    record = await serving(rig)
    hang = rig.machine.hang(None, 4)
    try:
        await rig.wait_allocatable(7, deadline=3 * FOUND_SECONDS)
        rig.machine.xid(0, GSP_TIMEOUT)
        await rig.wait_allocatable(6, deadline=FOUND_SECONDS)
        six = gpu_pod("six", 6)
        await running(rig, [six])
        assert rig.machine.uuid(4) not in await check_container(rig, six, "main", 6)
        await never_flickered(rig, record, 0, 4)
    finally:
        hang.release()


async def test_a_verdict_reaches_every_unit_of_both_vgpu_resources(rig: Rig) -> None:
    await rig.start_agent({**QUIET, "defaultMode": "vgpu"})
    blocks = 8 * (rig.machine.gpu(0).memory_total // BLOCK_BYTES)
    await rig.wait_allocatable(800, CORE)
    await rig.wait_allocatable(blocks, MEMORY)
    rig.machine.xid(1, GSP_TIMEOUT)
    await rig.wait_allocatable(700, CORE, deadline=FOUND_SECONDS)
    await rig.wait_allocatable(blocks // 8 * 7, MEMORY, deadline=FOUND_SECONDS)
    assert await rig.capacity(CORE) == 800
    assert await rig.capacity(MEMORY) == blocks


ALL = (
    test_a_gpu_with_an_ecc_error_leaves_and_returns_by_itself,
    test_a_gpu_that_is_lost_in_silence_is_found_and_the_others_are_sold,
    test_a_gpu_that_fell_off_the_bus_returns_once_it_is_back,
    test_each_class_of_xid_has_its_own_end,
    test_an_event_wait_that_fails_for_ever_stays_cheap_and_quiet,
    test_an_unhealthy_gpu_stays_so_over_restarts_of_agent_and_kubelet,
    test_faults_of_programs_and_notices_change_nothing,
    test_a_call_that_never_returns_costs_its_gpu_only,
    test_a_verdict_reaches_every_unit_of_both_vgpu_resources,
)
