"""Xids in the kernel's log: those raised while no agent ran, and those of GPUs that send no events.

Records of /dev/kmsg: `priority,sequence,microseconds,flags;message`, see the kernel's
Documentation/ABI/testing/dev-kmsg. NVIDIA's driver writes `NVRM: Xid (PCI:0000:1b:00): 79, ...`.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.model.gpu import normalise_bus_id
from agent.model.xids import XidClass, class_of

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
