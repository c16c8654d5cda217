"""Verdicts on GPUs: the rules in force, what is kept over restarts, and Xids of the kernel log."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent import settings
from agent.inventory.actor import Inventory
from agent.inventory.reducer import KernelXidSeen, Restored, XidExplained, records
from agent.inventory.snapshot import HealthRecord, KernelXid, boot_seconds
from agent.kit import files
from agent.kit.tasks import Backoff, follow
from agent.model.gpu import Gpu, normalise_bus_id
from agent.model.health import FaultKind, Health, Rules, after_reboot
from agent.model.xids import NUMBERS as NVLINK_XIDS
from agent.model.xids import UNKNOWN, XIDS, Rule, Verdict, XidClass, class_of, default_verdict

# Xids in the kernel's log: those raised while no agent ran, and those of GPUs that send no events.
#
# Records of /dev/kmsg: `priority,sequence,microseconds,flags;message`, see the kernel's
# Documentation/ABI/testing/dev-kmsg. NVIDIA's driver writes `NVRM: Xid (PCI:0000:1b:00): 79, ...`.

FALLEN_OFF_BUS: Final = 79

_ADDRESS: Final = rb"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
_XID: Final = re.compile(rb"NVRM: Xid \(" + _ADDRESS + rb"\): (\d{1,6})\b")
# Some drivers say it in words only, and with no Xid.
_FALLEN: Final = re.compile(rb"NVRM: GPU (?:at )?" + _ADDRESS + rb": GPU has fallen off the bus")
_RECORD_BYTES: Final = 16384  # read(2) fails where a record does not fit; the kernel's limit is 8 KiB


@dataclass(frozen=True, slots=True)
class LogXid:
    """One Xid line; `sequence` numbers the records of this boot, `bus` is `0000:1b:00`."""

    sequence: int
    bus: str
    number: int
    xid_class: XidClass | None = None  # by the rest of the line, where it decides


def parse(record: bytes) -> LogXid | None:
    """The Xid in one record; None for any other record, and for lines that programs wrote."""
    head, separator, message = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3 or not fields[0].isdigit() or not fields[1].isdigit():
        return None
    if int(fields[0]) >> 3:  # facility: 0 is the kernel itself
        return None
    if found := _XID.search(message):
        number, rest = int(found[2]), message[found.end() :].decode("ascii", "replace")
        return LogXid(int(fields[1]), normalise_bus_id(found[1].decode()), number, class_of(number, rest))
    if found := _FALLEN.search(message):
        return LogXid(int(fields[1]), normalise_bus_id(found[1].decode()), FALLEN_OFF_BUS)
    return None


class KernelLog:
    """The log, open for reading. A plain file (in tests, or a saved log) is read once to its end."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, in a pod without the right to read it for example."""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.lasting = not stat.S_ISREG(os.fstat(self.descriptor).st_mode)
        self._rest = b""

    def close(self) -> None:
        os.close(self.descriptor)

    def read(self) -> Iterator[LogXid]:
        """Every Xid between the last reading and now. Blocks for as long as it takes to read memory."""
        while True:
            try:
                data = os.read(self.descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten before it was read: go on with the oldest left
                    continue
                raise
            if not data:
                return
            # The device gives one record a read; a file gives whatever fits.
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if xid := parse(line):
                    yield xid


# Verdicts on GPUs: the rules in force, and what is kept over restarts of the agent.

# The health rules in force: NVIDIA's table with what the configuration changes.


def rules_from(wanted: settings.HealthSettings) -> Rules:
    """Rules for a configuration. A class set for an Xid brings that class's verdict and quiet time along."""
    quiet = wanted.quiet
    by_class = {
        XidClass.APPLICATION: 0.0,
        XidClass.RESET: quiet.needs_reset,
        XidClass.REBOOT: quiet.needs_reboot,
        XidClass.CONTAINED: quiet.contained,
        XidClass.INFORMATIONAL: 0.0,
    }
    unknown = replace(UNKNOWN, quiet_seconds=quiet.unknown)
    xids = {number: replace(rule, quiet_seconds=by_class[rule.kind]) for number, rule in XIDS.items()}
    for number, override in wanted.xids.items():
        xids[int(number)] = _overridden(xids.get(int(number), unknown), override, by_class)
    others = dict(Rules().others)
    for kind, seconds in (
        (FaultKind.ECC, quiet.ecc),
        (FaultKind.REMAP, quiet.ecc),
        (FaultKind.LOST, quiet.lost),
        (FaultKind.HUNG, quiet.probe),
        (FaultKind.PROBE, quiet.probe),
    ):
        others[kind] = replace(others[kind], quiet_seconds=seconds)
    return Rules(xids, unknown, others, NVLINK_XIDS - {int(number) for number in wanted.xids})


def _overridden(rule: Rule, wanted: settings.XidOverride, quiet: dict[XidClass, float]) -> Rule:
    if wanted.class_ is not None:
        kind = XidClass(wanted.class_)
        rule = replace(rule, kind=kind, verdict=default_verdict(kind), quiet_seconds=quiet[kind])
    if wanted.verdict is not None:
        rule = replace(rule, verdict=Verdict(wanted.verdict))
    if wanted.recovers is not None:
        rule = replace(rule, recovers=wanted.recovers)
    if wanted.quiet_seconds is not None:
        rule = replace(rule, quiet_seconds=wanted.quiet_seconds)
    return rule


# The verdict file: what the agent holds against GPUs, kept over its restarts.
#
# One JSON document with the boot it belongs to. It is replaced as a whole, so a reader finds the old one or
# the new one. One that cannot be read is kept aside and logged, never trusted in parts.

log = structlog.get_logger()

VERSION: Final = 1
NAME: Final = "verdicts.json"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class StoredGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU that was not healthy, or any while NVML was released."""

    gpu: Gpu
    health: Health


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. Times are seconds since that boot."""

    version: int
    boot_id: str
    log_sequence: int | None = None  # the newest Xid line of the kernel log that was seen
    released_until: float | None = None
    gpus: tuple[StoredGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class EarlierVerdicts:
    """Verdicts of earlier runs, seen from this boot."""

    records: tuple[HealthRecord, ...] = ()
    log_sequence: int | None = None  # lines up to this one were seen; None: of this boot, none
    # Whether all Xids behind `log_sequence` fell while a known agent was away.
    continuous: bool = False
    released_until: float | None = None


class VerdictFile:
    """The file in the agent's state folder. All methods block: call them from a thread."""

    def __init__(self, folder: Path, boot_id: Path = BOOT_ID) -> None:
        self.path = folder / NAME
        self._boot_id_file = boot_id

    def boot_id(self) -> str:
        """The present boot. Raises OSError."""
        return self._boot_id_file.read_text(encoding="ascii").strip()

    def load(self, now: float) -> EarlierVerdicts:
        """The file's content; empty where there is none or where it is unusable."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return EarlierVerdicts()
        except OSError as error:
            log.error("verdict_file_unreadable", file=str(self.path), problem=error.strerror)
            return EarlierVerdicts()
        try:
            document = msgspec.json.decode(data, type=Document)
            if document.version != VERSION:
                raise msgspec.ValidationError(f"version {document.version}, this agent reads {VERSION}")
        except msgspec.DecodeError as error:
            self._keep_aside(str(error))
            return EarlierVerdicts()
        if document.boot_id != self.boot_id():
            return EarlierVerdicts(
                tuple(_of_earlier_boot(one, now) for one in document.gpus), continuous=True
            )
        return EarlierVerdicts(
            tuple(HealthRecord(one.gpu, one.health) for one in document.gpus),
            document.log_sequence,
            continuous=document.log_sequence is not None,
            released_until=document.released_until,
        )

    def _keep_aside(self, problem: str) -> None:
        aside = self.path.with_name(f"{NAME}.bad")
        log.error(
            "verdict_file_unusable",
            file=str(self.path),
            problem=problem,
            kept_as=str(aside),
            consequence="verdicts of earlier runs are lost; look at the GPUs, then delete the kept file",
        )
        try:
            self.path.replace(aside)
        except OSError as error:
            log.error("verdict_file_not_moved", file=str(self.path), problem=error.strerror)

    def save(
        self, records: tuple[HealthRecord, ...], log_sequence: int | None, released_until: float | None
    ) -> None:
        """Replace the file; on disk when this returns. Raises OSError."""
        document = Document(
            VERSION,
            self.boot_id(),
            log_sequence,
            released_until,
            tuple(StoredGpu(record.gpu, record.health) for record in records),
        )
        content = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
        files.write(self.path.parent, self.path.name, content, lasting=True)


def _of_earlier_boot(stored: StoredGpu, now: float) -> HealthRecord:
    return replace(HealthRecord(stored.gpu, after_reboot(stored.health, now)), listed=False)


# Keeps verdicts over restarts: reads file and kernel log at start, writes the file when verdicts change.

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
