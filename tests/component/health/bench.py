"""The watching half of the agent over a simulated machine, in one process: actor, monitor, list plugin."""

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent import settings
from agent._proto import v1beta1
from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.actor import Inventory
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import GpuState, Snapshot
from agent.inventory.verdicts import rules_from
from agent.kit.tasks import Cell, Supervisor
from agent.kubelet.podresources import PodResources
from agent.model.health import HealthState
from agent.model.modes import Assignment, GpuMode, Mode
from agent.nvml.binding import NvmlBinding
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlPort
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.whole.wing import PgpuPlugin
from tests.pace import scaled

# Short enough for tests, long enough to be seen in between.
QUICK: Mapping[str, object] = {
    "health.probeSeconds": 0.2,
    "health.kernelLog": None,
    "health.quiet.needsReset": 0.5,
    "health.quiet.needsReboot": 0.5,
    "health.quiet.contained": 0.5,
    "health.quiet.unknown": 0.5,
    "health.quiet.ecc": 0.5,
    "health.quiet.lost": 0.5,
    "health.quiet.probe": 0.5,
}


class Face:
    """How the agent sees the machine: through the Python face, or through the real binding over a library.

    `folder` is where machines are put that a library has to open, `use` points it at one.
    """

    library: Path | None = None
    folder: Path | None = None
    use: Callable[[Path], None] = staticmethod(lambda _: None)

    async def machine(self, profile: str, hidden: Sequence[int] = ()) -> SimulatedMachine:
        """A new machine."""
        path = None if self.folder is None else self.folder / f"machine{time.monotonic_ns()}"
        machine = await anyio.to_thread.run_sync(SimulatedMachine.create, profile, path, hidden)
        if path is not None:
            self.use(path)
        return machine

    def nvml(self, machine: SimulatedMachine) -> NvmlPort:
        """NVML of the newest machine."""
        return SimulatedNvml(machine) if self.library is None else NvmlBinding(self.library)


FACE = Face()


@dataclass
class Watched:
    """A machine and the agent's picture of it. `lists` holds every list that a kubelet would have got."""

    machine: SimulatedMachine
    inventory: Inventory
    gpu_monitor: GpuMonitor
    supervisor: Supervisor
    lists: list[dict[str, bool]] = field(default_factory=list)

    @property
    def snapshot(self) -> Snapshot:
        return self.inventory.snapshot.value

    def state(self, slot: int) -> GpuState:
        return self.snapshot.by_uuid[self.machine.uuid(slot)]

    def states(self) -> dict[str, HealthState]:
        return {state.uuid: state.health.state for state in self.snapshot.gpus}

    async def until(self, slot: int, wanted: HealthState, deadline: float = 8.0) -> GpuState:
        """Wait until a GPU is in that state."""
        uuid = self.machine.uuid(slot)

        def reached(snapshot: Snapshot) -> bool:
            return uuid in snapshot.by_uuid and snapshot.by_uuid[uuid].health.state is wanted

        await self.settled(reached, deadline)
        return self.state(slot)

    async def settled(self, predicate: Any, deadline: float = 8.0) -> None:
        """Wait until the snapshot satisfies `predicate`."""
        with anyio.move_on_after(scaled(deadline)) as scope:
            await self.inventory.snapshot.wait_for(predicate)
        if scope.cancelled_caught:
            raise TimeoutError(f"after {deadline:g} s: {self.snapshot.gpus}")

    async def listed(self, slot: int, healthy: bool) -> None:
        """Wait for a list with that GPU in that state; `tests.bench` measures how long that takes."""
        uuid = self.machine.uuid(slot)
        with anyio.fail_after(30):
            while self.lists[-1].get(uuid) is not healthy:
                await anyio.sleep(0.001)

    def steady(self, *slots: int) -> None:
        """Assert that these GPUs were on every list, Healthy, from the first full list on."""
        uuids = {self.machine.uuid(slot) for slot in slots}
        full = [entry for entry in self.lists if entry]
        assert full
        for entry in full:
            assert uuids <= {uuid for uuid, healthy in entry.items() if healthy}, entry


def decoded(data: bytes) -> dict[str, bool]:
    """A list message as ID -> healthy."""
    return {
        device.id: device.health == "Healthy" for device in v1beta1.ListAndWatchResponse.parse(data).devices
    }


@asynccontextmanager
async def watching(
    machine: SimulatedMachine | str = "dgx-h200",
    *,
    nvml: NvmlPort | None = None,
    state: Path | None = None,
    keys: Mapping[str, object] | None = None,
    without_events: int = 0,
    ready: bool = True,
) -> AsyncIterator[Watched]:
    """Watch a machine while the context is open; `ready`: from the moment that its GPUs are known on."""
    if isinstance(machine, str):
        machine = await FACE.machine(machine)
    with tempfile.TemporaryDirectory() as folder:
        keys = {**QUICK, "host.state": str(state or folder), **(keys or {})}
        flags = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
        loaded = settings.load(None, {}, flags)
        inventory = Inventory(rules_from(loaded.health))
        supervisor = Supervisor()
        calls = WorkerThread("calls")
        gpu_monitor = GpuMonitor(loaded, nvml or FACE.nvml(machine), calls, inventory, supervisor)
        watched = Watched(machine, inventory, gpu_monitor, supervisor)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(inventory.run)
                await gpu_monitor.start(group)
                group.start_soon(_collect, watched, loaded)
                if ready:
                    await _ready(watched, without_events)
                yield watched
                group.cancel_scope.cancel()
        finally:
            calls.close()
            gpu_monitor.close()


async def _ready(watched: Watched, without_events: int) -> None:
    snapshot = watched.inventory.snapshot
    with anyio.fail_after(10):
        await snapshot.wait_for(lambda now: now.problem is None and bool(now.topology.gpus))
        while len(watched.gpu_monitor.events.watched) + without_events < len(snapshot.value.gpus):
            await anyio.sleep(0.01)


async def _collect(watched: Watched, loaded: settings.Settings) -> None:
    """The pGPU plugin with all GPUs offered whole, and every list that it publishes."""
    modes: Cell[Assignment] = Cell(Assignment())
    record = HoldingsWatch(PodResources(Path("nobody listens here")))
    plugin = PgpuPlugin(watched.inventory.snapshot, modes, record, Injector(loaded))
    async with anyio.create_task_group() as group:
        group.start_soon(plugin.run)
        group.start_soon(_sell, watched.inventory.snapshot, modes)
        async for encoded in plugin.lists.values():
            watched.lists.append(decoded(encoded))


async def _sell(snapshot: Cell[Snapshot], modes: Cell[Assignment]) -> None:
    async for now in snapshot.values():
        wanted = Assignment({state.uuid: GpuMode(Mode.PGPU) for state in now.gpus})
        if wanted != modes.value:
            modes.publish(wanted)
