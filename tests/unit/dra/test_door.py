"""The door's own tasks."""

from typing import cast

import anyio
import pytest

from agent.dra.door import LOOK_SECONDS, STOPPING_SECONDS, DraDoor
from agent.dra.ledger import ClaimLedger
from agent.dra.publisher import SlicePublisher
from agent.modes.desired import ClaimRequests
from tests.unit.dra.test_ledger import claim, over, taken
from tests.virtual_time import in_virtual_time


class Keeper(DraDoor):
    """A door of which only its ledger is there; it counts readings of the kubelet's record."""

    def __init__(self, keep: float) -> None:
        self.ledger = ClaimLedger(ClaimRequests(), lambda _: (139, 48), keep)
        self.readings = 0

    async def _read(self) -> bool:
        self.readings += 1
        return True


@in_virtual_time
async def test_the_kubelets_record_is_read_however_often_claims_come_and_go() -> None:
    door, one = Keeper(keep=0.5), claim("one", 30)
    async with anyio.create_task_group() as group:
        group.start_soon(door._keep)
        for _ in range(100):
            await taken(door.ledger, one)
            await anyio.sleep(LOOK_SECONDS / 10)
            over(door.ledger, one)
            await anyio.sleep(LOOK_SECONDS / 10)
        await anyio.sleep(LOOK_SECONDS / 2)
        assert door.readings == 20
        group.cancel_scope.cancel()


@in_virtual_time
async def test_daemons_that_cool_have_the_record_read_no_oftener() -> None:
    door, one = Keeper(keep=LOOK_SECONDS / 50), claim("one", 30)
    await taken(door.ledger, one)
    over(door.ledger, one)
    async with anyio.create_task_group() as group:
        group.start_soon(door._keep)
        await anyio.sleep(LOOK_SECONDS / 2)
        assert not door.readings
        assert door.ledger.cool() is None
        group.cancel_scope.cancel()


class Mute:
    """A publisher whose slices are never written: the API server is away."""

    async def tainted(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await anyio.sleep_forever()


@pytest.mark.parametrize(("left", "waits"), [(5.0, STOPPING_SECONDS), (0.25, 0.25), (-1.0, 0.0)])
def test_an_agent_that_took_long_to_withdraw_waits_no_longer_for_its_devices(
    left: float, waits: float
) -> None:
    @in_virtual_time
    async def run() -> None:
        door = Keeper(keep=0.5)
        door.requests = ClaimRequests()
        door.requests.listed.publish(frozenset({"GPU-a"}))
        door.publisher = cast("SlicePublisher", Mute())
        began = anyio.current_time()
        await door.closed(began + left)
        assert anyio.current_time() - began == pytest.approx(waits)

    run()
