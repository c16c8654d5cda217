"""Keeps verdicts over restarts: reads file and kernel log at start, writes the file when verdicts change."""

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.inventory.actor import Inventory
from agent.inventory.kernel_log import KernelLog, LogXid
from agent.inventory.messages import KernelXidSeen, Restored, XidExplained
from agent.inventory.reducer import records
from agent.inventory.snapshot import HealthRecord, KernelXid
from agent.inventory.verdict_file import EarlierVerdicts, VerdictFile
from agent.kit.backoff import Backoff
from agent.kit.follow import follow
from agent.kit.timestamps import boot_seconds

log = structlog.get_logger()

SETTLE_SECONDS = 0.02

Written = tuple[tuple[HealthRecord, ...], int | None, float | None]


class HealthPersistence:
    """The task that remembers. `watched` answers the GPUs whose events NVML delivers itself."""

    def __init__(
        self,
        inventory: Inventory,
        file: VerdictFile,
        kernel_log: Path | None,
        watched: Callable[[], frozenset[str]],
        look_again: Callable[[], None] = lambda: None,
    ) -> None:
        """`look_again` has the GPUs probed at once."""
        self._inventory = inventory
        self._file = file
        self._kernel_log_path = kernel_log
        self._watched = watched
        self._look_again = look_again
        self._log: KernelLog | None = None
        self._sequence: int | None = None
        self._written: Written | None = None
        self._changed = anyio.Event()
        self.problem: str | None = None  # why verdicts would not survive a restart now

    async def restore(self) -> float | None:
        """Give the inventory the verdicts of earlier runs, before it sees any GPU.

        Answers until when NVML was to stay released, in seconds since boot.
        """
        earlier = await anyio.to_thread.run_sync(self._file.load, boot_seconds())
        found = await anyio.to_thread.run_sync(self._read_log_from_start)
        self._sequence = max((xid.sequence for xid in found), default=earlier.log_sequence)
        kernel_xids = _unseen(found, earlier)
        if earlier.records or kernel_xids:
            log.info("verdicts_restored", gpus=len(earlier.records), kernel_xids=len(kernel_xids))
        await self._inventory.mailbox.post(Restored(earlier.records, kernel_xids, boot_seconds()))
        return earlier.released_until

    async def run(self) -> None:
        """Write what changes, follow the kernel log; until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write)
            if self._log is not None and self._log.lasting:
                group.start_soon(self._follow, self._log)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _read_log_from_start(self) -> list[LogXid]:
        if self._kernel_log_path is None:
            return []
        try:
            self._log = KernelLog(self._kernel_log_path)
            return list(self._log.read())
        except OSError as error:
            log.warning(
                "kernel_log_unreadable",
                file=str(self._kernel_log_path),
                problem=error.strerror,
                consequence="Xids that fall while the agent is away go unseen",
            )
            return []

    async def _follow(self, kernel_log: KernelLog) -> None:
        while True:
            await anyio.wait_readable(kernel_log.descriptor)
            for xid in kernel_log.read():
                self._sequence = xid.sequence
                self._changed.set()
                await self._hand_on(xid)

    async def _hand_on(self, xid: LogXid) -> None:
        """To the inventory; where NVML reports it anyway only what NVML leaves out."""
        watched = self._watched()
        for state in self._inventory.snapshot.value.gpus:
            if not state.gpu.pci_bus_id.startswith(f"{xid.bus}."):
                continue
            seen = KernelXid(xid.bus, xid.number, xid_class=xid.xid_class)
            if state.uuid not in watched:
                await self._inventory.mailbox.post(KernelXidSeen(seen, boot_seconds()))
                self._look_again()
            elif xid.xid_class is not None:
                await self._inventory.mailbox.post(XidExplained(seen, boot_seconds()))

    async def _write(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(follow, lambda: self._changed.set(), self._inventory.snapshot)  # noqa: PLW0108
            backoff = Backoff(first=1.0, longest=60.0)
            while True:
                self._changed = anyio.Event()
                wanted = self._wanted()
                if wanted == self._written:
                    await self._changed.wait()
                    # The lists go first: a thread that writes would take turns with them. Storms are
                    # written once. A crash in between is made good by the kernel log.
                    await anyio.sleep(SETTLE_SECONDS)
                    continue
                try:
                    await anyio.to_thread.run_sync(self._file.save, *wanted)
                except OSError as error:
                    self._log_problem(f"{self._file.path} cannot be written: {error.strerror}")
                    await anyio.sleep(backoff.next())
                else:
                    self._log_problem(None)
                    self._written = wanted
                    backoff.reset()

    def _wanted(self) -> Written:
        snapshot = self._inventory.snapshot.value
        return records(snapshot), self._sequence, snapshot.released_until

    def _log_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            if problem:
                log.error("verdicts_not_kept", problem=problem)
            else:
                log.info("verdicts_kept")
            self.problem = problem


def _unseen(found: list[LogXid], earlier: EarlierVerdicts) -> tuple[KernelXid, ...]:
    seen = -1 if earlier.log_sequence is None else earlier.log_sequence
    return tuple(
        KernelXid(xid.bus, xid.number, earlier.continuous, xid.xid_class)
        for xid in found
        if xid.sequence > seen
    )
