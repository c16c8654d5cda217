"""Our supervisor, NVIDIA's daemon and server, and CUDA processes as its clients, on a real GPU."""

from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest

from agent.model.cuda import limits
from agent.mps.control_commands import ServerState
from agent.mps.daemon_parts import DaemonState, EventReason
from agent.nvml.port import ComputeMode
from tests.gpu.cuda import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.gpu.programs import binding
from tests.gpu.rig import Rig, logs, make, reached, remove

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MIB_OF_CONTEXT = 1024  # a client's own context counts: some hundreds of MiB, by GPU and driver


def compute_mode(uuid: str) -> ComputeMode:
    nvml = binding()
    try:
        nvml.open()
        return nvml.compute_mode(uuid)
    finally:
        nvml.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The first GPU, whose compute mode must be afterwards what it was before."""
    made = make()
    before = compute_mode(made.gpu.uuid)
    yield made
    remove(made)
    assert compute_mode(made.gpu.uuid) is before


async def test_two_clients_share_a_server_and_are_listed(rig: Rig) -> None:
    async with rig.serving() as daemon, rig.client("look") as one, rig.client("look") as other:
        await one.ready()
        await other.ready()
        server = daemon.status.value.server
        assert server is not None
        assert set(await daemon.control.client_pids(server)) == {one.pid, other.pid}, logs(daemon)
        assert daemon.status.value.server_state in (ServerState.ACTIVE, None)  # None: driver before 550
        assert (await one.result())["used"]
        assert (await other.result())["used"]


async def test_blocks_of_a_capped_client_run_on_its_share_of_multiprocessors(rig: Rig) -> None:
    async with rig.client("look") as free:
        await free.ready()
        everything = len((await free.result())["used"])
    async with rig.serving():
        used = {}
        for percent in (100, 50, 25):
            async with rig.client("look", caps=limits(percent, 0)) as client:
                await client.ready()
                used[percent] = len((await client.result())["used"])
    print(f"multiprocessors: {everything} without MPS, {used} by percentage")
    assert used[100] == everything
    # The driver rounds to what the hardware can part, never up.
    assert 0.4 * everything <= used[50] <= 0.5 * everything
    assert 0.15 * everything <= used[25] <= 0.25 * everything


async def test_memory_cap_is_hit_exactly(rig: Rig) -> None:
    taken = {}
    async with rig.serving():
        for gibibytes in (2, 3):
            async with rig.client("allocate", 64, 8192, caps=limits(100, gibibytes)) as client:
                await client.ready()
                result = await client.result()
                assert result["code"] == OUT_OF_MEMORY
                taken[gibibytes] = int(result["mebibytes"])
        async with rig.client("allocate", 64, 4096) as client:
            await client.ready()
            assert await client.result() == {"mebibytes": 4096, "code": 0}, "a client without a cap"
    overhead = 2048 - taken[2]
    print(f"usable: {taken} MiB by GiB; a context takes {overhead} MiB of the cap")
    assert 0 <= overhead <= MIB_OF_CONTEXT
    # Memory comes in pieces of 2 MiB: what one more GiB of cap is worth is one GiB to within a piece.
    assert abs(taken[3] - taken[2] - 1024) <= 2


async def test_caps_of_two_clients_hold_side_by_side(rig: Rig) -> None:
    async with (
        rig.serving(),
        rig.client("allocate", 64, 8192, caps=limits(50, 2)) as small,
        rig.client("allocate", 64, 8192, caps=limits(50, 4)) as large,
    ):
        await small.ready()
        await large.ready()
        of_small, of_large = await small.result(), await large.result()
    assert of_small["code"] == of_large["code"] == OUT_OF_MEMORY
    assert 2048 - MIB_OF_CONTEXT <= of_small["mebibytes"] <= 2048
    assert 4096 - MIB_OF_CONTEXT <= of_large["mebibytes"] <= 4096


async def test_fault_of_one_client_is_seen_and_recovered_from(rig: Rig) -> None:
    async with rig.serving() as daemon:
        server = daemon.status.value.server
        async with rig.client("work", 60, 8) as neighbour, rig.client("fault") as culprit:
            await neighbour.ready()
            await culprit.ready()
            await neighbour.on()
            assert (await culprit.result())["code"] == ILLEGAL_ADDRESS
            # One client's fatal error ends the work of all clients: that is why the agent reports it.
            assert (await neighbour.said())["code"] != 0
            began = anyio.current_time()
            await reached(daemon, DaemonState.FAULT)
            print(f"FAULT seen {anyio.current_time() - began:.3f} s after the clients knew; {logs(daemon)}")
            assert rig.told.kinds == [EventReason.FAULT]
        await reached(daemon, DaemonState.SERVING)
        assert rig.told.kinds == [EventReason.FAULT, EventReason.RECOVERED]
        assert daemon.status.value.faults == 1
        print(f"server {server} before, {daemon.status.value.server} after")
        async with rig.client("look") as client:
            await client.ready()
            assert (await client.result())["used"]


async def test_terminated_client_ends_alone(rig: Rig) -> None:
    async with (
        rig.serving() as daemon,
        rig.client("work", 6, 8) as doomed,
        rig.client("work", 6, 8) as neighbour,
    ):
        for client in (doomed, neighbour):
            await client.ready()
            await client.on()
        await anyio.sleep(1)
        server = daemon.status.value.server
        assert server is not None
        await daemon.control.terminate_client(server, doomed.pid)
        assert (await doomed.said())["code"] != 0
        assert (await neighbour.said())["code"] == 0
        assert rig.told.kinds == []
