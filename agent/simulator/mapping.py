"""The simulated machine's state in shared memory: made, opened and checked here."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

from agent.simulator.state import MAGIC, VERSION, GpuState, MachineState

T = TypeVar("T")

SIZE = ctypes.sizeof(MachineState)


class MappingError(Exception):
    """A file is not the state of a simulated machine that this build can read."""


class Mapping:
    """One mapped `MachineState`. Lives until the last reference to it or to its state is gone."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.state = MachineState.from_buffer(memory)
        self.writing = threading.RLock()  # writers are threads of one process
        self._address = ctypes.addressof(self.state)

    @classmethod
    def create(cls, path: Path | None) -> Self:
        """An empty state: anonymous, or a new file that appears whole under `path` (see `reveal`)."""
        if path is None:
            mapping = cls(mmap.mmap(-1, SIZE))
        else:
            # A file of another machine may be mapped by its readers: never truncate it in place.
            draft = cls._draft(path)
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.ftruncate(descriptor, SIZE)
                mapping = cls(mmap.mmap(descriptor, SIZE))
            finally:
                os.close(descriptor)
        mapping.state.magic, mapping.state.version, mapping.state.size = MAGIC, VERSION, SIZE
        return mapping

    @classmethod
    def reveal(cls, path: Path) -> None:
        """Give the state made by `create` its name, now that it is filled."""
        cls._draft(path).replace(path)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map an existing state. Raises MappingError for anything else."""
        with path.open("r+b") as file:
            if (size := os.fstat(file.fileno()).st_size) != SIZE:
                raise MappingError(f"{path} has {size} bytes, a simulated machine has {SIZE}")
            mapping = cls(mmap.mmap(file.fileno(), SIZE))
        if (mapping.state.magic, mapping.state.version) != (MAGIC, VERSION):
            raise MappingError(f"{path} holds no simulated machine of this version: make it again")
        return mapping

    @staticmethod
    def _draft(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")

    def address_of(self, field: str) -> int:
        """Address of a word of the state, for futex(2)."""
        return self._address + int(getattr(MachineState, field).offset)

    @contextmanager
    def editing(self) -> Iterator[MachineState]:
        """Fields written inside are seen together by readers that use `consistent`, and by C."""
        with self.writing:
            self.state.sequence += 1
            try:
                yield self.state
            finally:
                self.state.sequence += 1

    def consistent(self, read: Callable[[MachineState], T]) -> T:
        """The answer of `read` between two changes."""
        for _ in range(1000):  # a writer that died half-way must not hang its readers
            before = self.state.sequence
            value = read(self.state)
            if before % 2 == 0 and self.state.sequence == before:
                return value
            os.sched_yield()
        return read(self.state)

    def gpu(self, slot: int) -> GpuState:
        """The GPU in a slot."""
        return self.state.gpus[slot]
