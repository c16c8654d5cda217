"""The Python face of the CUDA double: makes the shared file, reads its counters, injects faults."""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from clib.headers import entry_points
from tests.cuda_double import layout
from tests.cuda_double.layout import CudaMachineState, FaultAction, MemoryKind, Watch
from tests.cuda_double.layout_time import ClockMode

MIB: Final = 1 << 20
OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY
_FLOCK: Final = "hhqqi4x"  # struct flock


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGpu:
    """One GPU to simulate; sizes in bytes. `pool_chunk` is the step by which pools and graphs reserve.

    `granularity` is that of all memory, from 64 KiB to 4 MiB.
    """

    uuid: str = "GPU-8f2b1c3d-0000-4000-8000-000000000001"
    name: str = "NVIDIA H200"
    bus_id: str = "0000:19:00.0"
    total: int = 16384 * MIB
    context_bytes: int = 300 * MIB
    module_bytes: int = 2 * MIB
    pool_chunk: int = 2 * MIB
    granularity: int = 2 * MIB
    compute_capability: tuple[int, int] = (9, 0)
    processors: int = 132


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the driver, with its arguments as unsigned numbers."""

    symbol: str
    arguments: tuple[int, ...]
    pid: int


class CudaMachine:
    """The shared file. Programs under test find it by `environment`.

    Nothing here takes the file's lock, so a stopped program cannot block a test. Do not close it in a process
    that has loaded the double itself: the kernel would drop that process's record lock.
    """

    def __init__(self, path: Path, release: str) -> None:
        self.path = path
        self.release = release
        self._numbers = {point.symbol: number for number, point in enumerate(entry_points(release))}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._mapping = mmap.mmap(self._descriptor, layout.SIZE)
        self.state = CudaMachineState.from_buffer(self._mapping)

    @classmethod
    def create(
        cls,
        path: Path,
        gpus: Sequence[CudaGpu] = (CudaGpu(),),
        release: str = "13",
        *,
        clock: ClockMode = ClockMode.OFF,
        tasks: int = 0,
        speed: float = 1,
    ) -> Self:
        """A new file, for the driver of a release; the GPUs in CUDA's order. Any user may write to it.

        `clock` says how the GPUs' time passes; the virtual one begins once so many `tasks` take part,
        and that on the wall has a `speed`.
        """
        state = CudaMachineState(magic=layout.MAGIC, version=layout.VERSION, size=layout.SIZE)
        state.symbols = 0
        state.device_count = len(gpus)
        for number, gpu in enumerate(gpus):
            device = state.devices[number]
            device.uuid, device.name = gpu.uuid.encode(), gpu.name.encode()
            device.bus_id = gpu.bus_id.encode()
            device.total, device.context_bytes = gpu.total, gpu.context_bytes
            device.module_bytes, device.pool_chunk = gpu.module_bytes, gpu.pool_chunk
            device.granularity = gpu.granularity
            device.cc_major, device.cc_minor = gpu.compute_capability
            device.processors = gpu.processors
        state.clock.expected = tasks
        with path.open("wb") as file:
            file.write(bytes(state))
        path.chmod(0o666)
        made = cls(path, release)
        made.start_clock(clock, speed=speed)
        return made

    @property
    def environment(self) -> dict[str, str]:
        """The environment that a program needs."""
        return {layout.STATE_VARIABLE: str(self.path)}

    def processes(self, gpu: int = 0) -> dict[int, int]:
        """Bytes of each living process that has any, by pid as this process sees it."""
        return {pid: sum(kinds.values()) for pid, kinds in self.uses(gpu).items() if any(kinds.values())}

    def uses(self, gpu: int = 0) -> dict[int, dict[MemoryKind, int]]:
        """Bytes of each living process by kind."""
        living = dict(self._living())
        found = {
            slot: {kind: self.state.slots[slot].uses[gpu].bytes[kind] for kind in MemoryKind}
            for slot in living
        }
        for entry in self.state.shared:
            holders = [holder - 1 for holder in entry.holders if holder] if entry.state else []
            heirs = [holder for holder in holders if holder in living]
            # Nobody has looked since its first holder died: the next living one has it.
            if entry.device == gpu and heirs and heirs[0] != holders[0]:
                found[heirs[0]][MemoryKind(entry.kind)] += entry.bytes
        return {pid: found[slot] for slot, pid in living.items()}

    def used(self, gpu: int = 0) -> int:
        """Bytes of all living processes."""
        return sum(self.processes(gpu).values())

    def peak(self, gpu: int = 0) -> int:
        """The most bytes that living processes had at once."""
        return int(self.state.devices[gpu].peak)

    def start_clock(self, mode: ClockMode, *, speed: float = 1) -> None:
        """Have the GPUs' time pass in some way from now on, before any program has used them."""
        clock = self.state.clock
        clock.permille, clock.origin_ns = round(speed * 1000), time.monotonic_ns()
        clock.mode = mode

    def busy_ns(self, pid: int, gpu: int = 0) -> int:
        """For how long a process, of which the double knows this pid, has had the GPU."""
        clock = self.state.clock
        return sum(
            tenant.busy_ns
            for tenant in clock.tenants[: clock.tenant_high]
            if tenant.state and tenant.device == gpu and self.state.slots[tenant.slot].pid == pid
        )

    def launches(self, pid: int, gpu: int = 0) -> int:
        """How many kernels and graphs a process, of which the double knows this pid, has launched."""
        slots = self.state.slots[: self.state.slot_high]
        return sum(slot.uses[gpu].launches for slot in slots if slot.pid == pid)

    def utilization(self, gpu: int = 0) -> dict[int, int]:
        """Of the last period, in whole percent by pid, as NVML says it."""
        clock = self.state.clock
        return {
            self.state.slots[tenant.slot].pid: tenant.percent
            for tenant in clock.tenants[: clock.tenant_high]
            if tenant.state == 1 and tenant.device == gpu
        }

    def calls(self, symbol: str) -> int:
        """How often an entry point was called, by all processes together."""
        return int(self.state.calls[self._numbers[symbol]])

    def called(self) -> dict[str, int]:
        """All entry points that were called."""
        return {symbol: self.calls(symbol) for symbol in self._numbers if self.calls(symbol)}

    def inject(
        self,
        symbol: str | None,
        action: FaultAction,
        *,
        after: int = 0,
        times: int = -1,
        code: int = OUT_OF_MEMORY,
        milliseconds: int = 0,
    ) -> None:
        """A fault for a call (None: for any) once `after` calls have passed; -1 times stands for ever."""
        fault = next(fault for fault in self.state.faults if fault.action == FaultAction.NONE)
        fault.symbol = -1 if symbol is None else self._numbers[symbol]
        fault.after, fault.remaining = after, times
        fault.code, fault.milliseconds = code, milliseconds
        fault.action = action
        self.state.watch |= Watch.FAULTS

    def clear_faults(self) -> None:
        """End all faults; calls that hang go on."""
        for fault in self.state.faults:
            fault.action = FaultAction.NONE
        self.state.watch &= ~Watch.FAULTS

    @contextmanager
    def recording(self, *, probe: bool = False) -> Iterator[list[Call]]:
        """Write down the calls of the block; the list is filled at its end, with the newest 256 at most.

        With `probe` the calls do nothing but answer CUDA_SUCCESS, so that any arguments can be sent.
        """
        calls: list[Call] = []
        for record in self.state.records:
            record.ready = 0
        self.state.record_head = 0
        self.state.watch |= Watch.PROBE if probe else Watch.RECORD
        try:
            yield calls
        finally:
            self.state.watch &= ~(Watch.PROBE | Watch.RECORD)
            calls += self._recorded()

    def _recorded(self) -> Iterable[Call]:
        symbols = list(self._numbers)
        head = self.state.record_head
        for number in range(max(0, head - layout.RECORDS), head):
            record = self.state.records[number % layout.RECORDS]
            arguments = tuple(record.arguments[: min(record.count, layout.ARGUMENTS)])
            yield Call(symbols[record.symbol], arguments, record.pid)

    def _living(self) -> Iterator[tuple[int, int]]:
        for slot in range(self.state.slot_high):
            if self.state.slots[slot].state:
                holder = self._holder(slot)
                if holder is not None:
                    yield slot, holder

    def _holder(self, slot: int) -> int | None:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_BASE + slot, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid
