"""All that keeps watch over the GPUs, built and started as one: memory, scanner, event loop."""

from functools import partial
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from agent.inventory.actor import Inventory
from agent.inventory.reducer import Accused
from agent.inventory.scanner import Scanner
from agent.inventory.verdicts import HealthPersistence, VerdictFile
from agent.kit.tasks import Supervisor
from agent.kit.timestamps import boot_seconds
from agent.model.health import Fault, FaultKind
from agent.nvml.event_watch import EventWatch
from agent.nvml.port import EventKind, NvmlEvent, NvmlPort
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings

log = structlog.get_logger()


class GpuMonitor:
    """Watches the GPUs: events of the driver, findings of probes, verdicts of earlier runs."""

    def __init__(
        self,
        settings: Settings,
        nvml: NvmlPort,
        calls: WorkerThread,
        inventory: Inventory,
        supervisor: Supervisor,
    ) -> None:
        self._inventory = inventory
        self._supervisor = supervisor
        self.thread = WorkerThread("events")
        self.events = EventWatch(nvml, self.thread, self._targets, self._changed, self._deliver)
        kernel_log = settings.health.kernel_log
        self.persistence = HealthPersistence(
            inventory,
            VerdictFile(Path(settings.host.state)),
            Path(kernel_log) if kernel_log else None,
            lambda: self.events.watched,
            self._look_again,
        )
        self._scanner = Scanner(
            nvml,
            calls,
            inventory,
            partial(supervisor.restarting, "nvml events", self.events.run),
            settings.health.probe_seconds,
        )

    async def start(self, group: TaskGroup) -> None:
        """Remember first, then look: no GPU is healthy only because nobody asked yet."""
        until = await self.persistence.restore()
        if until is not None and until > boot_seconds():
            self._scanner.release(until)
        group.start_soon(self._supervisor.restarting, "scanner", self._scanner.run)
        group.start_soon(self._supervisor.restarting, "verdicts", self.persistence.run)

    def read_again(self) -> None:
        """Have what each GPU consists of read at once: its instances were changed."""
        self._scanner.read_again()

    def release(self, seconds: float, why: str = "") -> None:
        """Close NVML for that long and have every ID Unhealthy meanwhile; `why` in a sentence."""
        self._scanner.release(boot_seconds() + seconds, why)

    def end_release(self) -> None:
        self._scanner.end_release()

    def close(self) -> None:
        self.thread.close()
        self.persistence.close()

    def _targets(self) -> frozenset[str]:
        return frozenset(state.uuid for state in self._inventory.snapshot.value.gpus if not state.health.away)

    async def _changed(self) -> None:
        cell = self._inventory.snapshot
        await cell.wait_change(cell.version)

    async def _deliver(self, event: NvmlEvent) -> None:
        match event.kind:
            case EventKind.XID:
                fault = Fault(FaultKind.XID, event.data)
            case EventKind.ECC_DOUBLE:
                fault = Fault(FaultKind.ECC)
            case EventKind.ECC_SINGLE:
                return  # corrected: the counters have it
        await self._inventory.mailbox.post(Accused(event.uuid, fault, boot_seconds(), event.instance))
        self._look_again()

    def _look_again(self) -> None:
        """After each fault, a harmless one too: the driver may say by now that it was not."""
        self._scanner.look_now()
