"""NVML events of the simulated machine: a ring in the mapping, one writer, any number of readers.

Every reader has its own cursor and its own registrations, as event sets have: an event reaches all
sets that registered its GPU and kind before it happened, and none that registered later.
"""

import time
from dataclasses import dataclass
from typing import Final

from agent.kit import futex
from agent.simulator.futex_wait import wait
from agent.simulator.mapping import Mapping
from agent.simulator.state import EVENT_SLOTS, MAX_GPUS, WHOLE_GPU

ECC_SINGLE: Final = 0x1  # nvmlEventType*
ECC_DOUBLE: Final = 0x2
PSTATE: Final = 0x4
XID: Final = 0x8
CLOCK: Final = 0x10


@dataclass(frozen=True, slots=True)
class RawEvent:
    """One event as the ring holds it."""

    slot: int
    kind: int
    data: int
    instance: tuple[int, int] = (WHOLE_GPU, WHOLE_GPU)


def publish(mapping: Mapping, event: RawEvent) -> None:
    """Append an event and wake all readers."""
    state = mapping.state
    with mapping.writing:
        entry = state.events[state.event_head % EVENT_SLOTS]
        entry.kind, entry.data, entry.slot = event.kind, event.data, event.slot
        entry.gpu_instance, entry.compute_instance = event.instance
        # The head after the entry: a reader trusts everything below it.
        state.event_head += 1
        state.event_word = state.event_head & 0xFFFFFFFF
    futex.wake(mapping.address_of("event_word"))


class EventReader:
    """One event set: registrations per GPU and a cursor."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._cursor = mapping.state.event_head
        self._masks = [0] * MAX_GPUS
        self._since = [0] * MAX_GPUS
        self._word = mapping.address_of("event_word")

    def register(self, slot: int, mask: int) -> None:
        """Deliver events of these kinds of a GPU from now on."""
        self._masks[slot] |= mask
        self._since[slot] = self._mapping.state.event_head

    def wait(self, timeout_s: float | None) -> RawEvent | None:
        """The next event of a registered GPU; None once the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # The word before the ring: an event in between makes the futex return at once.
            seen = self._mapping.state.event_word
            if (event := self._next()) is not None:
                return event
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            wait(self._word, seen, left)

    def _next(self) -> RawEvent | None:
        state = self._mapping.state
        head = state.event_head
        self._cursor = max(self._cursor, head - EVENT_SLOTS)
        while self._cursor < head:
            position = self._cursor
            entry = state.events[position % EVENT_SLOTS]
            numbers = (entry.gpu_instance, entry.compute_instance)
            event = RawEvent(entry.slot, entry.kind, entry.data, numbers)
            self._cursor += 1
            if event.kind & self._masks[event.slot] and position >= self._since[event.slot]:
                return event
        return None
