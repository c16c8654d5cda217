"""Injected faults: slow, hung and failing NVML calls, as a small table in the mapping.

Both faces walk the table at every call, in order: first delays, then hangs, then failures.
"""

import time

from agent.kit import futex
from agent.nvml.port import NvmlCode
from agent.simulator.futex_wait import wait
from agent.simulator.mapping import Mapping
from agent.simulator.nvml_functions import ANY, number_of
from agent.simulator.state import FaultKind, FaultState

_FOREVER = -1


class Fault:
    """One injected fault, to be taken back."""

    def __init__(self, table: "FaultTable", ticket: int) -> None:
        self._table = table
        self._ticket = ticket

    def release(self) -> None:
        """End the fault; calls that hang in it go on. Harmless when it is over already."""
        self._table.remove(self._ticket)

    @property
    def active(self) -> bool:
        """Whether the fault still stands (a counted failure ends by itself)."""
        return self._table.holds(self._ticket)


class FaultTable:
    """The faults of one machine: written by tests, consulted by the Python face."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._word = mapping.address_of("fault_word")

    def add(
        self,
        kind: FaultKind,
        call: str | None,
        slot: int | None,
        *,
        code: int = 0,
        times: int | None = None,
        milliseconds: int = 0,
    ) -> Fault:
        """Put a fault into the table. Raises ValueError for an unknown call, RuntimeError when full."""
        number = number_of(call)
        state = self._mapping.state
        with self._mapping.writing:
            entry = next((fault for fault in state.faults if fault.kind == FaultKind.NONE), None)
            if entry is None:
                raise RuntimeError(f"all {len(state.faults)} faults of the machine are in use: release some")
            state.fault_tickets += 1
            entry.ticket = state.fault_tickets
            entry.call, entry.slot = number, ANY if slot is None else slot
            entry.code, entry.milliseconds = code, milliseconds
            entry.remaining = _FOREVER if times is None else times
            entry.kind = kind  # last: a reader in another process takes the entry from here on
            return Fault(self, entry.ticket)

    def remove(self, ticket: int | None = None) -> None:
        """Take one fault back, or all of them."""
        state = self._mapping.state
        with self._mapping.writing:
            for entry in state.faults:
                if ticket in (None, entry.ticket):
                    entry.kind = FaultKind.NONE
            state.fault_word = (state.fault_word + 1) & 0xFFFFFFFF
        futex.wake(self._word)

    def holds(self, ticket: int) -> bool:
        """Whether a fault still stands."""
        return any(
            entry.ticket == ticket and entry.kind != FaultKind.NONE for entry in self._mapping.state.faults
        )

    def strike(self, call: int, slot: int) -> int:
        """Let the faults of a call happen: sleeps, hangs; answers an NVML code, 0 for none.

        `slot` is -1 for a call about no GPU; then only faults for every GPU apply.
        """
        if self._mapping.state.fault_tickets == 0:
            return 0
        hits = [fault for fault in self._mapping.state.faults if self._matches(fault, call, slot)]
        for fault in hits:
            if fault.kind == FaultKind.SLOW:
                time.sleep(fault.milliseconds / 1000)
        for fault in hits:
            if fault.kind == FaultKind.HANG:
                self._hang(fault.ticket)
        for fault in hits:
            if fault.kind == FaultKind.FAIL and self._use_up(fault):
                return fault.code or NvmlCode.UNKNOWN
        return 0

    @staticmethod
    def _matches(fault: FaultState, call: int, slot: int) -> bool:
        return fault.kind != FaultKind.NONE and fault.call in (ANY, call) and fault.slot in (ANY, slot)

    def _hang(self, ticket: int) -> None:
        while True:
            seen = self._mapping.state.fault_word
            if not self.holds(ticket):
                return
            wait(self._word, seen, None)

    def _use_up(self, fault: FaultState) -> bool:
        if fault.remaining == _FOREVER:
            return True
        with self._mapping.writing:  # within this process; the C library counts down atomically
            if fault.remaining <= 0:
                return False
            fault.remaining -= 1
            if fault.remaining == 0:
                fault.kind = FaultKind.NONE
            return True
