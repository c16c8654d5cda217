"""The verdict file: what the agent holds against GPUs, kept over its restarts.

One JSON document with the boot it belongs to. It is replaced as a whole, so a reader finds the old one
or the new one. One that cannot be read is kept aside and logged, never trusted in parts.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from agent.inventory.snapshot import HealthRecord
from agent.kit import atomic_file
from agent.model.gpu import Gpu
from agent.model.health import Health, after_reboot

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
        atomic_file.write(self.path.parent, self.path.name, content, lasting=True)


def _of_earlier_boot(stored: StoredGpu, now: float) -> HealthRecord:
    return replace(HealthRecord(stored.gpu, after_reboot(stored.health, now)), listed=False)
