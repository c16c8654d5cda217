"""The two files that the agent and the enforcement library share, byte by byte; see `clib/layout.h`.

Both layouts only grow: what has a place keeps it, so that libraries of before go on with files of now. The
*limit file* is the agent's alone and read-only in the container. It holds two copies of each GPU's limits,
each with a generation and a checksum: the agent writes the older copy by one pwrite(2), and readers take the
valid one with the highest generation, so that a writer that dies halfway leaves the limits of before in
force. The *usage region* is the container's own, and so a hint at most.
"""

import ctypes
import errno
import mmap
import os
import re
import stat
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from agent.kit import futex
from agent.vgpu.isolation_errors import BadLayout, OtherLayout

# Descriptors of the files that containers can open, kept from before a container starts until it is gone.
#
# The owner of a file may take a lease on it (fcntl(2), F_SETLEASE), and root of a container is theirs. A
# lease has the opens of others wait, or fail where they do not wait. The kernel grants none on a file that
# somebody else has open for writing, and no write lease on one that somebody else has open at all. What is
# open for writing is not executed either. So the agent opens each file once, before its container can, and
# works by that descriptor. All of it blocks, `get` for an instant.

# Threads that wait for leases which containers took while no agent was there. The kernel ends such a wait
# after /proc/sys/fs/lease-break-time, and who asks without waiting can be kept from a file for ever.
MOST_WAITING = 16
# Answers to an open of a file that was the agent's to open before its container had it.
REFUSALS = (errno.EWOULDBLOCK, errno.EACCES, errno.EPERM, errno.ETXTBSY)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Leased(BlockingIOError):
    """A container has a lease on a file: it is being waited for."""


class HeldFiles:
    """Files by the folder or library that they belong to, and their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, int]] = {}
        self._waiting: set[tuple[str, str]] = set()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all."""
        for key in self.keys():
            self.drop(key)

    def keys(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._files)

    def has(self, key: str, names: Collection[str]) -> bool:
        """Whether all these are open."""
        with self._lock:
            return self._files.get(key, {}).keys() >= set(names)

    def get(self, key: str, name: str, folder: int, flags: int, mode: int | None = None) -> int:
        """A descriptor of a regular file in an open folder, to be closed by the caller.

        `mode`: what the file has where nobody has changed that. Raises OSError, Leased among them.
        """
        with self._lock:
            if (known := self._files.get(key, {}).get(name)) is not None:
                return os.dup(known)
        try:
            descriptor = opened(folder, name, flags, mode)
        except BlockingIOError as error:
            self._wait(key, name, folder, flags)
            raise Leased(error.errno, "a process of its container has a lease on it") from error
        return self._adopt(key, name, folder, descriptor)

    def drop(self, key: str) -> None:
        """Let go of all files of a folder or library."""
        with self._lock:
            gone = self._files.pop(key, {})
        for each in gone.values():
            os.close(each)

    def _adopt(self, key: str, name: str, folder: int, descriptor: int) -> int:
        """Keep a descriptor unless there is one by now, or the folder has gone; the caller's copy of it."""
        try:
            with self._lock:
                known = self._files.get(key, {}).get(name)
                if known is None and os.fstat(folder).st_nlink:
                    self._files.setdefault(key, {})[name] = os.dup(descriptor)
                return os.dup(descriptor if known is None else known)
        finally:
            os.close(descriptor)

    def _wait(self, key: str, name: str, folder: int, flags: int) -> None:
        with self._lock:
            if (key, name) in self._waiting or len(self._waiting) >= MOST_WAITING:
                return
            inner = os.dup(folder)
            self._waiting.add((key, name))
        # No thread of the loop's: an agent that stops waits for those.
        thread = threading.Thread(target=self._waited, args=(key, name, inner, flags), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no further one now: it is asked for again
            self._over(key, name, inner)

    def _waited(self, key: str, name: str, folder: int, flags: int) -> None:
        try:
            with suppress(OSError):
                os.close(
                    self._adopt(key, name, folder, regular(os.open(name, flags | _FLAGS, dir_fd=folder)))
                )
        finally:
            self._over(key, name, folder)

    def _over(self, key: str, name: str, folder: int) -> None:
        os.close(folder)
        with self._lock:
            self._waiting.discard((key, name))


def opened(folder: int, name: str, flags: int, mode: int | None = None) -> int:
    """A descriptor of a regular file, without a wait. Raises OSError for whatever else has that name."""
    flags |= _FLAGS | os.O_NONBLOCK
    try:
        return regular(os.open(name, flags, dir_fd=folder))
    except PermissionError:
        # Root of a container is the owner of its region, too, and may have closed it to an agent without
        # capabilities. In these folders nobody else puts another file, or a link, in its place.
        if mode is None:
            raise
        os.chmod(name, mode, dir_fd=folder)
        return regular(os.open(name, flags, dir_fd=folder))


def regular(descriptor: int) -> int:
    """The descriptor, if it is of a regular file. Raises OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor


LAYOUT = 1
MOST_DEVICES = 16

LIMITS_MAGIC = 0x4C4D4C0041474E47
LIMITS_BYTES = 8192
RECORDS_AT = 512
RECORD_BYTES = 256
COPY_BYTES = 112
STRICT, COMPUTE = 1, 2
GATE_AT = 4608
CHANGES_AT = GATE_AT + 4
BEAT_AT = GATE_AT + 8
CORRECTION_ONE = 65536
RIVAL = 256
HEADER = struct.Struct("<QIIII64sQ412x")
COPY = struct.Struct("<Q16sQQQQIIIIIIIIQ12x")
CRC = struct.Struct("<I")
GATE = struct.Struct("<II")

USAGE_MAGIC = 0x4753550041474E47
USAGE_BYTES = 1 << 20
USAGE_HEADER_BYTES = 4096
USAGE_DEVICE_BYTES = 4096
SLOTS, SLOT_BYTES = 2048, 384
SLOTS_AT = 69632
SLOT = struct.Struct("<II120xQQ240x")  # pid, state, and of the first GPU bytes charged and those for contexts
ENTRY = struct.Struct("<IIQ368x")  # pid, state and start time
MOVABLE = struct.Struct("<4xI112xQ256x")  # state, and bytes that the driver may move to the host and back
FREE_SLOT, PROCESS_SLOT = 0, 1
READ_SLOTS = 64
# Left by pthread_mutex_init in a robust, process-shared mutex of glibc; all else of it is zero.
LOCK_KIND, LOCK_KIND_AT = 144, 16
HEADER_LOCK_AT = 128
USAGE_HEADER = struct.Struct("<QIIIIII")
FIGURES = struct.Struct("<QQQQ")
FIGURES_AT = 128
SHARE = struct.Struct("<QQQ")
SHARE_AT = 256
UNMEASURED_AT = 280
NEWER_AT = 272
COUNT = struct.Struct("<Q")
NEWER = struct.Struct("<Q16x64s")  # how many, and the name of the last one
ENTRY_POINT = re.compile(r"cu[A-Za-z0-9_]{1,61}")


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    gpu: str  # UUID as NVML writes it, GPU-...
    memory_bytes: int
    cores: int = 0  # percent; 0: no claim
    unseen_bytes: int = 0  # of the memory, what no counted allocation explains
    strict: bool = False
    driver: bool = False  # whether the driver caps the memory, too
    compute: bool = False  # whether the container is held to `share`
    share: int = 0  # of compute, in 1/100 %; 0: nothing may be launched now
    correction: float = 1.0  # learned device times are worth 1 / this much of the share
    context_bytes: int = 0  # charged for each context
    rivals: float | None = None  # other processes at work on the GPU at a time, on average; None: not known
    forgiven_bytes: int = 0  # charged, and by the driver's measure not there: they do not count


@dataclass(frozen=True, slots=True)
class CountedUsage:
    """The library's count for one GPU; its container may write anything there."""

    total_bytes: int
    peak_bytes: int
    refused: int
    repaired: int
    next_ns: int = 0  # CLOCK_MONOTONIC: when its share has caught up with what was launched
    waits: int = 0  # launches that waited for the share
    waited_ns: int = 0
    unmeasured: int = 0  # processes that cannot measure their launches
    newer: int = 0  # entry points that were given out uncounted, since they are newer than the library
    newer_name: str = ""  # the last of them


@dataclass(frozen=True, slots=True)
class Entries:
    """The processes that have entered themselves in a usage region: PIDs of theirs, and start times."""

    processes: frozenset[tuple[int, int]] = frozenset()
    whole: bool = True  # False: some share an entry, and are not named


def limit_file(name: str, devices: Sequence[DeviceLimits]) -> bytes:
    """A new limit file. `name` is for people."""
    label = name.encode()[:63]
    header = HEADER.pack(LIMITS_MAGIC, LAYOUT, RECORDS_AT, LIMITS_BYTES, len(devices), label, time.time_ns())
    content = bytearray(LIMITS_BYTES)
    content[:RECORDS_AT] = header + CRC.pack(zlib.crc32(header))
    for number, device in enumerate(devices):
        at = RECORDS_AT + number * RECORD_BYTES
        content[at : at + COPY_BYTES] = _copy(1, device)
    GATE.pack_into(content, GATE_AT, any(device.compute for device in devices), 0)
    CRC.pack_into(content, BEAT_AT, 1)
    return bytes(content)


def read_limits(content: bytes) -> list[DeviceLimits]:
    """The limits in force. Raises BadLayout, OtherLayout."""
    return [limits for _, _, limits in map(_newest, _records(content))]


def write_limits(descriptor: int, number: int, limits: DeviceLimits) -> int:
    """Put limits in force in a file that containers may have mapped, and wake who waits for its share.

    Answers how many threads that were. `descriptor` is open for reading and writing. Raises BadLayout,
    OSError.
    """
    content = os.pread(descriptor, LIMITS_BYTES, 0)
    found = [_newest(record) for record in _records(content)]
    place, generation, before = found[number]
    others = any(each.compute for n, (_, _, each) in enumerate(found) if n != number)
    armed, changes = GATE.unpack_from(content, GATE_AT)
    if limits.compute and not armed:
        os.pwrite(descriptor, GATE.pack(1, changes), GATE_AT)
    at = RECORDS_AT + number * RECORD_BYTES + (1 - place) * COPY_BYTES
    os.pwrite(descriptor, _copy(generation + 1, limits), at)
    if limits.compute or before.compute:
        os.pwrite(descriptor, GATE.pack(limits.compute or others, (changes + 1) & 0xFFFFFFFF), GATE_AT)
        return wake(descriptor, CHANGES_AT, LIMITS_BYTES)
    return 0


def beat(descriptor: int) -> None:
    """Show paused launches that an agent is there to end their pause. Raises OSError."""
    (number,) = CRC.unpack(os.pread(descriptor, CRC.size, BEAT_AT))
    os.pwrite(descriptor, CRC.pack(number % 0xFFFFFFFF + 1), BEAT_AT)


def wake(descriptor: int, offset: int, size: int) -> int:
    """How many threads waited on the word at `offset` of a file of `size` bytes, opened for writing.

    They sleep by futex(2) on the file's page, of which containers have a read-only mapping: waiting takes no
    more than that, and a wake through the agent's own mapping reaches them. 0 also where they cannot be woken
    (a file system without mappings, a sandbox without the call): they look again within 100 ms.
    """
    try:
        with mmap.mmap(descriptor, size) as mapped:
            return max(0, _wake(mapped, offset))
    except (OSError, ValueError):
        return 0


def _wake(mapped: mmap.mmap, offset: int) -> int:
    # In a function of its own: while the word is referred to the mapping cannot be closed.
    return futex.wake(ctypes.addressof(ctypes.c_uint32.from_buffer(mapped, offset)))


def usage_head(devices: int) -> bytes:
    """The beginning of a new usage region; all that follows is zero."""
    content = bytearray(USAGE_HEADER_BYTES + devices * USAGE_DEVICE_BYTES)
    USAGE_HEADER.pack_into(
        content, 0, USAGE_MAGIC, LAYOUT, USAGE_HEADER_BYTES, USAGE_BYTES, devices, SLOTS, SLOT_BYTES
    )
    locks = [USAGE_HEADER_BYTES + number * USAGE_DEVICE_BYTES for number in range(devices)]
    for at in (HEADER_LOCK_AT, *locks):
        CRC.pack_into(content, at + LOCK_KIND_AT, LOCK_KIND)
    return bytes(content)


def usage_head_bytes(devices: int) -> int:
    """How much of a usage region says what the library has counted."""
    return USAGE_HEADER_BYTES + devices * USAGE_DEVICE_BYTES


def read_usage(content: bytes) -> list[CountedUsage]:
    """The library's counts, GPU by GPU. Raises BadLayout."""
    if len(content) < usage_head_bytes(1):
        raise BadLayout(f"a usage region of {len(content)} bytes is too short")
    magic, layout, *_, devices, slots, size = USAGE_HEADER.unpack_from(content)
    if (magic, layout, slots, size) != (USAGE_MAGIC, LAYOUT, SLOTS, SLOT_BYTES):
        raise BadLayout("this is no usage region of a known layout")
    if not 1 <= devices <= MOST_DEVICES or len(content) < usage_head_bytes(devices):
        raise BadLayout(f"a usage region of {devices} GPUs cannot be")
    starts = [USAGE_HEADER_BYTES + number * USAGE_DEVICE_BYTES for number in range(devices)]
    newer, name = NEWER.unpack_from(content, NEWER_AT)
    text = name.partition(b"\0")[0].decode("ascii", "replace")
    named = text if ENTRY_POINT.fullmatch(text) else ""  # the container can write anything there
    counts = [
        CountedUsage(
            *FIGURES.unpack_from(content, start + FIGURES_AT),
            *SHARE.unpack_from(content, start + SHARE_AT),
            *COUNT.unpack_from(content, start + UNMEASURED_AT),
        )
        for start in starts
    ]
    return [replace(each, newer=newer, newer_name=named) for each in counts]


def read_share(descriptor: int, number: int = 0) -> tuple[int, int, int]:
    """`next_ns`, `waits` and `waited_ns` of an open usage region: hints, and zeros where it is too short.

    Raises OSError.
    """
    at = USAGE_HEADER_BYTES + number * USAGE_DEVICE_BYTES + SHARE_AT
    content = os.pread(descriptor, SHARE.size, at)
    return SHARE.unpack(content) if len(content) == SHARE.size else (0, 0, 0)


def sole_process(content: bytes, total_bytes: int) -> tuple[int, int] | None:
    """Bytes charged to the only process in the first slots, and those for contexts; None: it is not alone."""
    whole = len(content) // SLOT_BYTES * SLOT_BYTES
    slots = [
        (charged, contexts) for _, state, charged, contexts in SLOT.iter_unpack(content[:whole]) if state
    ]
    return slots[0] if len(slots) == 1 and slots[0][0] == total_bytes >= slots[0][1] else None


def movable_bytes(content: bytes) -> int:
    """Bytes that processes in these slots were charged for memory which need not be on the GPU now."""
    whole = len(content) // SLOT_BYTES * SLOT_BYTES
    return sum(bytes_ for state, bytes_ in MOVABLE.iter_unpack(content[:whole]) if state)


def read_entries(content: bytes) -> Entries:
    """The processes in a usage region's slots; the last slot is shared by those that found no other."""
    slots = list(ENTRY.iter_unpack(content[: len(content) // SLOT_BYTES * SLOT_BYTES]))
    processes = frozenset((pid, start) for pid, state, start in slots if state == PROCESS_SLOT)
    return Entries(processes, len(slots) == SLOTS and slots[-1][1] == FREE_SLOT)


def _copy(generation: int, limits: DeviceLimits) -> bytes:
    body = COPY.pack(
        generation,
        _uuid(limits.gpu),
        limits.memory_bytes,
        limits.memory_bytes,  # the request: soft caps are not in use
        limits.context_bytes,
        limits.unseen_bytes,
        limits.share if limits.compute else limits.cores * 100,
        0,  # the burst: as the library has it
        round(limits.correction * CORRECTION_ONE),
        int(limits.driver),
        0,
        0,
        STRICT * limits.strict | COMPUTE * limits.compute,
        0 if limits.rivals is None else round(limits.rivals * RIVAL) + 1,
        limits.forgiven_bytes,
    )
    return body + CRC.pack(zlib.crc32(body))


def _records(content: bytes) -> list[bytes]:
    if len(content) != LIMITS_BYTES:
        raise BadLayout(f"a limit file has {LIMITS_BYTES} bytes, not {len(content)}")
    magic, layout, header, size, devices, _, _ = HEADER.unpack_from(content)
    if (magic, header) != (LIMITS_MAGIC, RECORDS_AT):
        raise BadLayout("this is no limit file")
    if CRC.unpack_from(content, HEADER.size)[0] != zlib.crc32(content[: HEADER.size]):
        raise BadLayout("the header's checksum is wrong")
    if layout != LAYOUT:
        text = f"a limit file of layout {layout} is kept as it is; this agent writes layout {LAYOUT}"
        raise OtherLayout(f"{text}: its container keeps its limits until it ends")
    if size != LIMITS_BYTES:
        raise BadLayout(f"a limit file of {size} bytes cannot be")
    if not 1 <= devices <= MOST_DEVICES:
        raise BadLayout(f"a limit file of {devices} GPUs cannot be")
    starts = range(RECORDS_AT, RECORDS_AT + devices * RECORD_BYTES, RECORD_BYTES)
    return [content[start : start + RECORD_BYTES] for start in starts]


def _newest(record: bytes) -> tuple[int, int, DeviceLimits]:
    """Place, generation and values of the copy in force."""
    found = []
    for place in (0, 1):
        body = record[place * COPY_BYTES : (place + 1) * COPY_BYTES]
        generation, gpu, memory, _, context, unseen, share, _, correction, driver, *_, flags, rivals, over = (
            COPY.unpack_from(body)
        )
        if generation and CRC.unpack_from(body, COPY.size)[0] == zlib.crc32(body[: COPY.size]):
            limits = DeviceLimits(
                f"GPU-{uuid.UUID(bytes=gpu)}",
                memory,
                share // 100,
                unseen,
                bool(flags & STRICT),
                bool(driver),
                bool(flags & COMPUTE),
                share if flags & COMPUTE else 0,
                (correction or CORRECTION_ONE) / CORRECTION_ONE,
                context,
                (rivals - 1) / RIVAL if rivals else None,
                over,
            )
            found.append((generation, place, limits))
    if not found:
        raise BadLayout("neither copy of its limits is whole")
    generation, place, limits = max(found, key=lambda each: each[0])
    return place, generation, limits


def _uuid(gpu: str) -> bytes:
    try:
        return uuid.UUID(gpu.removeprefix("GPU-").removeprefix("MIG-")).bytes
    except ValueError as error:
        raise BadLayout(f"{gpu!r} is no UUID of a GPU") from error
