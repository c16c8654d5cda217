"""A thousand random events, losses and recoveries over eight GPUs end with the truth."""

import random

import anyio
import pytest

from agent.inventory.snapshot import GpuState
from agent.model.health import HealthState
from agent.nvml.port import NvmlEvent
from agent.simulator.machine import SimulatedMachine
from tests.component.health.bench import FACE, Watched, watching

EVENTS = 1000
HARMLESS = (13, 31, 43, 45, 63, 92, 109)
GRAVE = (48, 74, 94, 95, 119, 79, 140, 999)
UNWITNESSED = (95, 119, 79)


class Storm:
    """Bad weather for the first seven GPUs, and what it must have done to them."""

    def __init__(self, machine: SimulatedMachine, seed: int) -> None:
        self.machine = machine
        self.gone: set[int] = set()
        self.condemned: set[int] = set()  # had a fault that only a reset ends
        self._chance = random.Random(seed)

    def strike(self) -> None:
        """One event of any kind."""
        slot, kind = self._chance.randrange(7), self._chance.randrange(10)
        if slot in self.gone:
            if kind < 5:
                self.bring_back(slot)
        elif kind == 0:
            self.machine.lose(slot)
            self.gone.add(slot)
        elif kind == 1:
            self.machine.ecc_double(slot)
        elif kind < 5:
            xid = self._chance.choice(GRAVE)
            self.machine.xid(slot, xid)
            if xid in UNWITNESSED:
                self.condemned.add(slot)
        else:
            self.machine.xid(slot, self._chance.choice(HARMLESS))

    def bring_back(self, slot: int) -> None:
        """The GPU is there again, as after a reset."""
        self.machine.restore(slot)
        self.gone.discard(slot)

    def agrees(self, slot: int, state: GpuState) -> bool:
        """Whether the agent's verdict is what the machine's truth allows."""
        verdict = state.health.state
        if slot in self.gone:
            return verdict is HealthState.UNHEALTHY and state.health.away
        return verdict is HealthState.HEALTHY or (verdict is HealthState.UNHEALTHY and slot in self.condemned)


async def _heard_all(watched: Watched) -> None:
    """Return once the agent has an event that came after all others: of the GPU that was spared.

    It is sent again and again, for one may be lost with an event set that is made again.
    """
    events, uuid = watched.gpu_monitor.events, watched.machine.uuid(7)
    deliver, heard = events._deliver, anyio.Event()

    async def noting(event: NvmlEvent) -> None:
        await deliver(event)
        if event.uuid == uuid:
            heard.set()

    events._deliver = noting
    with anyio.fail_after(30):
        while not heard.is_set():
            watched.machine.xid(7, HARMLESS[0])
            await anyio.sleep(0.1)


@pytest.mark.usefixtures("face")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_inventory_ends_equal_to_the_machine(seed: int) -> None:
    storm = Storm(await FACE.machine("dgx-h200"), seed)
    machine = storm.machine
    async with watching(machine) as watched:
        for number in range(EVENTS):
            storm.strike()
            if number % 50 == 0:
                await anyio.sleep(0.05)
        for slot in sorted(storm.gone)[::2]:
            storm.bring_back(slot)
        await _heard_all(watched)
        await watched.settled(
            lambda now: all(storm.agrees(slot, now.by_uuid[machine.uuid(slot)]) for slot in range(8)), 30.0
        )
        watched.steady(7)
        # A reset, seen as going and coming back, ends what the storm left.
        for slot in range(7):
            machine.lose(slot)
        await watched.settled(
            lambda now: all(state.health.away for state in now.gpus if state.uuid != machine.uuid(7))
        )
        for slot in range(7):
            machine.restore(slot)
        await watched.settled(lambda now: all(state.healthy for state in now.gpus))
        assert {state.uuid for state in watched.snapshot.gpus} == set(machine.uuids)
        watched.steady(7)
