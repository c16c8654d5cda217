"""Parts of an agent to take readings from, over the simulated machine."""

from collections.abc import Sequence
from pathlib import Path

from agent.inventory.actor import Inventory
from agent.inventory.reducer import Scanned, reduce
from agent.kit.tasks import Cell, Supervisor
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.wire import Allocation, PreferenceRequest
from agent.nvml.event_watch import WorkerThread
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.telemetry.sampler import Sampler
from agent.telemetry.series import Sources


class IdlePlugin:
    """A resource that nobody asks."""

    resource = "nvidia.com/gpu"
    offers_preference = True
    needs_pre_start = False

    def __init__(self) -> None:
        self.lists: Cell[bytes] = Cell(b"")

    async def run(self) -> None:
        raise AssertionError

    def refresh(self) -> None:
        raise AssertionError

    def figures(self, assignment: object) -> tuple[int, int]:
        raise AssertionError

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        raise AssertionError

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        raise AssertionError

    async def pre_start(self, ids: Sequence[str]) -> None:
        raise AssertionError


class Parts:
    """A scanned simulated machine and the objects that telemetry reads; nothing runs by itself."""

    def __init__(self, profile: str = "t4-4", interval: float = 0.1, deadline: float = 10.0) -> None:
        """`deadline`: a call hangs after so many seconds; on a busy machine a thread waits for one."""
        self.machine = SimulatedMachine.create(profile)
        self.nvml = SimulatedNvml(self.machine)
        self.inventory = Inventory()
        self.thread = WorkerThread("calls", deadline=deadline)
        self.sampler = Sampler(self.nvml, self.thread, self.inventory.snapshot, interval)
        self.supervisor = Supervisor()
        self.endpoint = Endpoint(IdlePlugin(), Path("/nowhere"), Path("/nowhere/device-plugins"))
        self.blockers: list[str] = []
        self.sources = Sources(
            inventory=self.inventory,
            sampler=self.sampler,
            threads=[self.thread],
            endpoints=[self.endpoint],
            supervisor=self.supervisor,
            blockers=lambda: self.blockers,
        )

    def scan(self) -> tuple[str, ...]:
        """Fill the inventory from the machine; the UUIDs by index."""
        driver = self.nvml.open()
        gpus = tuple(self.nvml.describe(index) for index in range(self.nvml.count()))
        cell = self.inventory.snapshot
        cell.publish(reduce(cell.value, Scanned(driver, gpus)))
        return tuple(gpu.uuid for gpu in gpus)
