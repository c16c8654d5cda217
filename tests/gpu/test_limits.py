"""The enforcement library before a real driver: caps hold, the container sees them, a resize takes effect.

What each process takes beside its allocations (contexts, code) the library does not know ahead; the agent
measures it and passes the figure to the library. Here none does, so the driver may show that much above the
cap.
"""

from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import pytest

from agent.nvml.binding import NvmlBinding
from tests.gpu.cuda import OUT_OF_MEMORY
from tests.gpu.limits import MIB
from tests.gpu.programs import binding
from tests.gpu.rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CAP = 2048  # MiB
PIECE = 64
# Contexts are charged with what the driver shows of them: some hundreds of MiB each, by GPU and driver.
CONTEXT = 1024
RESIZE_SECONDS = 1.0


def used(nvml: NvmlBinding, uuid: str) -> int:
    """Of the GPU, by NVML, in bytes. Blocks."""
    nvml.open()
    try:
        return nvml.sample(uuid).memory_used_bytes
    finally:
        nvml.close()


async def test_a_cap_holds_and_nothing_below_it_is_refused(rig: Rig) -> None:
    limits = await rig.container(CAP)
    before = await anyio.to_thread.run_sync(used, binding(), rig.gpu.uuid)
    async with rig.client("allocate", PIECE, 2 * CAP, limits=limits) as client:
        await client.ready()
        got = await client.result()
        assert got["code"] == OUT_OF_MEMORY
        assert CAP - CONTEXT <= got["mebibytes"] <= CAP
        counted = await anyio.to_thread.run_sync(lambda: limits.usage)
        assert counted.peak_bytes <= CAP * MIB
        # To the last granule: what is left of the cap is less than any piece of memory.
        assert counted.total_bytes > (CAP - 2) * MIB
        after = await anyio.to_thread.run_sync(used, binding(), rig.gpu.uuid)
        assert after - before <= (CAP + CONTEXT) * MIB


async def test_without_limits_the_same_program_gets_more(rig: Rig) -> None:
    async with rig.client("allocate", PIECE, 2 * CAP) as client:
        await client.ready()
        assert await client.result() == {"mebibytes": 2 * CAP, "code": 0}


async def test_a_container_sees_its_cap(rig: Rig) -> None:
    limits = await rig.container(CAP)
    async with rig.client("memory", limits=limits) as client:
        await client.ready()
        seen = await client.result()
        assert seen["total"] == CAP * MIB
        assert (CAP - CONTEXT) * MIB <= seen["free"] <= CAP * MIB


async def test_nvml_in_a_container_has_its_cap_and_its_own_processes(rig: Rig) -> None:
    limits = await rig.container(CAP)
    async with rig.client("nvml", limits=limits) as client, rig.client("nvml") as neighbour:
        await client.ready()
        await neighbour.ready()
        seen = await client.result()
        assert seen["total"] == CAP * MIB
        assert neighbour.pid not in seen["processes"]
        everything = await neighbour.result()
        assert everything["total"] > CAP * MIB
        assert len(everything["processes"]) >= 2


async def test_processes_of_a_container_share_its_cap(rig: Rig) -> None:
    limits = await rig.container(2 * CAP)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(rig.client("allocate", PIECE, 4 * CAP, limits=limits))
            for _ in range(2)
        ]
        for client in clients:
            await client.ready()
        for client in clients:
            await client.on()
        got = [await client.said() for client in clients]
        assert sum(each["mebibytes"] for each in got) <= 2 * CAP
        assert {each["code"] for each in got} == {OUT_OF_MEMORY}
        assert (await anyio.to_thread.run_sync(lambda: limits.usage)).peak_bytes <= 2 * CAP * MIB
    # Both have ended: all of it is the next one's.
    async with rig.client("allocate", PIECE, 4 * CAP, limits=limits) as client:
        await client.ready()
        assert (await client.result())["mebibytes"] >= 2 * CAP - CONTEXT


async def test_two_containers_have_two_caps(rig: Rig) -> None:
    one, two = await rig.container(CAP), await rig.container(2 * CAP, "two")
    async with (
        rig.client("allocate", PIECE, 4 * CAP, limits=one) as small,
        rig.client("allocate", PIECE, 4 * CAP, limits=two) as large,
    ):
        await small.ready()
        await large.ready()
        assert CAP - CONTEXT <= (await small.result())["mebibytes"] <= CAP
        assert 2 * CAP - CONTEXT <= (await large.result())["mebibytes"] <= 2 * CAP


async def test_a_resize_takes_effect_within_a_second(rig: Rig) -> None:
    limits = await rig.container(CAP)
    async with rig.client("follow", PIECE, 2 * CAP, limits=limits) as client:
        await client.ready()
        await client.on()
        first = await client.said()
        assert first["mebibytes"] <= CAP
        await anyio.to_thread.run_sync(limits.resize, 2 * CAP)
        then = await client.result()
        assert then["code"] == 0
        assert then["mebibytes"] == PIECE
        assert then["seconds"] < RESIZE_SECONDS
