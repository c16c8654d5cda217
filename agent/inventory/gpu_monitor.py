"""Keeps the inventory true: opens NVML, waits for its events, looks at all GPUs every few seconds.

For maintenance it closes NVML for a while.
"""

import time
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.inventory.actor import Inventory
from agent.inventory.prober import Prober
from agent.inventory.reducer import Accused, Connected, Unavailable
from agent.inventory.snapshot import LinkReading, boot_seconds
from agent.inventory.verdicts import HealthPersistence, VerdictFile
from agent.kit.tasks import FatalError, Supervisor
from agent.model.gpu import Driver, Gpu
from agent.model.health import Fault, FaultKind
from agent.nvml.event_watch import EventWatch, WorkerThread
from agent.nvml.port import EventKind, NvmlDriverMismatch, NvmlError, NvmlEvent, NvmlHung, NvmlPort
from agent.settings import Settings

log = structlog.get_logger()

GATHER_SECONDS = 0.2
CLOSE_RETRY_SECONDS = 1.0  # of a call that hangs: the thread may come back
OPEN_RETRY_SECONDS = 2.0
OPEN_DEADLINE_SECONDS = 30.0  # a cold driver without persistence mode initialises each GPU in turn


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
        self._nvml = nvml
        self._calls = calls
        self._inventory = inventory
        self._supervisor = supervisor
        self._seconds = settings.health.probe_seconds
        self.thread = WorkerThread("events")
        self.events = EventWatch(nvml, self.thread, self._targets, self._seen, self._deliver)
        kernel_log = settings.health.kernel_log
        self.persistence = HealthPersistence(
            inventory,
            VerdictFile(Path(settings.host.state)),
            Path(kernel_log) if kernel_log else None,
            lambda: self.events.watched,
            self._look_again,
        )
        self._open = False
        self._unclosed = ""  # why NVML could not be closed last
        self._released_until: float | None = None
        self._maintenance = ""  # why it is released
        self._asked = anyio.Event()  # somebody asked for a look, for a release or for its end
        self._changed = anyio.Event()  # somebody changed what a GPU consists of

    async def start(self, group: TaskGroup) -> None:
        """Remember first, then look: no GPU is healthy only because nobody asked yet."""
        until = await self.persistence.restore()
        if until is not None and until > boot_seconds():
            self._release(until)
        group.start_soon(self._supervisor.restarting, "scanner", self._scan)
        group.start_soon(self._supervisor.restarting, "verdicts", self.persistence.run)

    def close(self) -> None:
        self.thread.close()
        self.persistence.close()

    def release(self, seconds: float, why: str = "") -> None:
        """Close NVML for that long and have every ID Unhealthy meanwhile; `why` in a sentence."""
        self._release(boot_seconds() + seconds, why)

    def _release(self, until: float, why: str = "") -> None:
        """`until`: in seconds since boot."""
        self._released_until = until
        self._maintenance = why or _maintenance(until)
        self._asked.set()

    def end_release(self) -> None:
        self._released_until = None
        self._asked.set()

    def read_again(self) -> None:
        """Have what each GPU consists of read at once: its instances were changed."""
        self._changed.set()
        self._asked.set()

    def _targets(self) -> frozenset[str]:
        return frozenset(state.uuid for state in self._inventory.snapshot.value.gpus if not state.health.away)

    async def _seen(self) -> None:
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
        self._asked.set()

    async def _scan(self) -> None:
        """Scan for ever; raises FatalError when only a new process can help."""
        try:
            while True:
                if self._released_until is not None:
                    await self._stay_released()
                try:
                    driver = await self._calls.run(self._nvml.open, deadline=OPEN_DEADLINE_SECONDS)
                    self._open = True
                    await self._session(driver)
                except NvmlDriverMismatch as error:
                    await self._unavailable(str(error))
                    raise FatalError(str(error)) from error
                except NvmlError as error:
                    await self._unavailable(str(error))
                    await self._close()
                    await self._pause(OPEN_RETRY_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _session(self, driver: Driver) -> None:
        """Look around until a release is asked for; then, or on failure, end the wait for events."""
        failure: NvmlError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._supervisor.restarting, "nvml events", self.events.run)
            try:
                await self._look_around(Prober(self._nvml, self._calls, driver))
            except NvmlError as error:
                failure = error
            if self._released_until is not None:
                # First the lists, then the closing: nobody is given a GPU that is about to be reset.
                await self._unavailable(self._maintenance, self._released_until)
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        await self._close()

    async def _look_around(self, prober: Prober) -> None:
        connected: tuple[str, ...] | None = None
        while self._released_until is None:
            known = [state.uuid for state in self._inventory.snapshot.value.gpus]
            changed, self._changed = self._changed.is_set(), anyio.Event()
            try:
                scanned = await prober.look(known, full=changed)
            except NvmlHung as error:
                # Closing NVML under a call that hangs would hang as well: wait for it instead.
                if changed:
                    self._changed.set()  # nobody has looked
                await self._unavailable(str(error))
                await self._pause(self._seconds)
                continue
            await self._inventory.mailbox.post(scanned)
            uuids = tuple(gpu.uuid for gpu in scanned.gpus)
            if uuids != connected:
                await self._read_links(scanned.gpus)
                connected = uuids
            await self._pause(self._seconds, gather=GATHER_SECONDS)

    async def _read_links(self, gpus: tuple[Gpu, ...]) -> None:
        hung = [gpu.uuid for gpu in gpus if self._calls.hangs(gpu.uuid)]
        reading = LinkReading(self._nvml, gpus, hung)
        try:
            topology = await self._calls.run(reading.run, progress=reading.got_on, about=reading.about)
        except NvmlHung as error:
            log.warning("links_unreadable", problem=str(error), consequence="GPUs are chosen by index")
            return
        await self._inventory.mailbox.post(Connected(topology))

    async def _stay_released(self) -> None:
        while self._released_until is not None and boot_seconds() < self._released_until:
            await self._close()  # again, where it could not be closed so far
            await self._unavailable(self._maintenance, self._released_until, let_go=self._unclosed)
            longest = CLOSE_RETRY_SECONDS if self._unclosed else 60.0
            await self._pause(min(longest, self._released_until - boot_seconds()))
        self._released_until = None
        log.info("release_over")

    async def _pause(self, seconds: float, gather: float = 0.0) -> None:
        """Sleep, but wake when somebody asks for something, after `gather` seconds at the soonest.

        So a storm of events is looked into together; who changed what a GPU consists of is not kept waiting.
        """
        soonest = anyio.current_time() + min(gather, seconds)
        with anyio.move_on_after(max(0.0, seconds)):
            await self._asked.wait()
        if (left := soonest - anyio.current_time()) > 0:
            with anyio.move_on_after(left):
                await self._changed.wait()
        self._asked = anyio.Event()

    async def _unavailable(
        self, problem: str, released_until: float | None = None, let_go: str | None = None
    ) -> None:
        message = Unavailable(problem, released_until, boot_seconds(), let_go)
        await self._inventory.mailbox.post(message)

    async def _close(self) -> None:
        """Close NVML, if it is open; `_unclosed` says why it could not be."""
        if not self._open:
            return
        try:
            await self._calls.run(self._nvml.close)
        except NvmlError as error:
            if self._unclosed != str(error):
                log.warning("nvml_not_closed", problem=str(error))
            self._unclosed = str(error)
        else:
            self._open, self._unclosed = False, ""


def _maintenance(until: float) -> str:
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + until - boot_seconds()))
    return f"NVML is released for maintenance until {clock} (gpu-node-agent release --end ends it)"
