"""Runs a target on seeded inputs: none may crash it, none may keep it for two seconds."""

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import anyio

from tests.fuzz.inputs import inputs

COUNT = int(os.environ.get("FUZZ_COUNT", "10000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
HANG_SECONDS = 2.0
# A busy machine may keep anything waiting for two seconds: a hang is one that comes again and again.
TRIES = 10
CALLERS = 4


@dataclass
class Campaign:
    """The inputs of one target, and how they went."""

    name: str
    told: Callable[[str], None]
    count: int = COUNT
    seed: int = SEED
    ran: int = 0
    slowest: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)

    def inputs(self, samples: Sequence[bytes], tokens: Sequence[bytes] = ()) -> Iterator[bytes]:
        """The inputs, of which `samples` are the seeds."""
        return inputs(self.name, self.seed, self.count, samples, tokens)

    def run(
        self, act: Callable[[bytes], str], samples: Sequence[bytes], tokens: Sequence[bytes] = ()
    ) -> None:
        """Call `act` with each input; it answers what became of it, in a word. Time is the thread's own."""
        for number, data in enumerate(self.inputs(samples, tokens)):
            began = time.thread_time()
            try:
                outcome = act(data)
            except Exception as error:
                raise AssertionError(self._about(number, data, repr(error))) from error
            self._went(number, data, time.thread_time() - began, outcome)
        self._done()

    async def run_async(
        self,
        act: Callable[[bytes], Awaitable[str]],
        samples: Sequence[bytes],
        tokens: Sequence[bytes] = (),
        callers: int = CALLERS,
    ) -> None:
        """The same for `act` that waits, so many at a time."""
        left = enumerate(self.inputs(samples, tokens))

        async def call() -> None:
            for number, data in left:
                try:
                    await self._one(number, data, act)
                except Exception as error:
                    raise AssertionError(self._about(number, data, repr(error))) from error

        async with anyio.create_task_group() as group:
            for _ in range(callers):
                group.start_soon(call)
        self._done()

    async def _one(self, number: int, data: bytes, act: Callable[[bytes], Awaitable[str]]) -> None:
        for _ in range(TRIES):
            began = time.monotonic()
            with anyio.move_on_after(HANG_SECONDS):
                outcome = await act(data)
                if (took := time.monotonic() - began) <= HANG_SECONDS:
                    self._went(number, data, took, outcome)
                    return
        raise TimeoutError(f"no end within {HANG_SECONDS:g} s, {TRIES} times")

    def _went(self, number: int, data: bytes, seconds: float, outcome: str) -> None:
        assert seconds <= HANG_SECONDS, self._about(number, data, f"it took {seconds:.1f} s")
        self.ran += 1
        self.slowest = max(self.slowest, seconds)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _about(self, number: int, data: bytes, what: str) -> str:
        shown = f"{data[:400]!r}{'...' if len(data) > 400 else ''}"
        return f"{self.name}, seed {self.seed}, input {number} ({len(data)} bytes): {what}\n{shown}"

    def _done(self) -> None:
        assert self.ran == self.count
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        slowest = f"slowest {1000 * self.slowest:.0f} ms"
        self.told(f"{self.name}: {self.ran} inputs, seed {self.seed}, {slowest} ({outcomes})")
