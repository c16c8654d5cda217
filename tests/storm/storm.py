"""One storm: a seed, its events, and what it proved."""

import hashlib
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from tests.storm.actions import FAULTS, USERS, Act, calm
from tests.storm.admission import observe
from tests.storm.clock import CLOCK
from tests.storm.invariants import Violation, check, check_calm
from tests.storm.world import World, world

PAUSES = (0.0, 0.0, 0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 30.0)


@dataclass
class Outcome:
    """What became of a storm."""

    seed: int
    families: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    violation: str | None = None
    virtual_seconds: float = 0.0
    faults: int = 0
    steps: int = 0
    checks: int = 0  # how often the invariants were looked at
    skipped: frozenset[int] = frozenset()

    @property
    def digest(self) -> str:
        """Two runs of a seed have the same."""
        return hashlib.sha256("\n".join(self.history).encode()).hexdigest()[:16]


async def storm(outcome: Outcome, steps: int, skip: frozenset[int] = frozenset()) -> None:
    """Let a seed's storm rage for so many steps, then be calm. `skip`: numbers of events to leave out."""
    seed = outcome.seed
    rng = random.Random(seed)
    random.seed(seed)
    # One in four has no fault at all: then no pod that fits may be refused.
    chosen = [] if rng.random() < 0.25 else [family for family in FAULTS if rng.random() < 0.4]
    weights: dict[Act, int] = {}
    for family in (USERS, *chosen):
        weights |= family.weights
    outcome.families = [family.name for family in chosen]
    faults = {act for family in chosen for act in family.weights}
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        async with world(Path(folder), seed) as made:
            made.label(rng.choice(("pgpu", "vgpu", "mixed")))
            await made.start_agent()
            await anyio.sleep(rng.choice((0.0, 0.5, 3.0)))
            refused: list[str] = []
            end = observe(made, refused.append)

            def look() -> None:
                outcome.checks += 1
                check(made)
                if refused:
                    raise Violation(refused[0])

            try:
                for number in range(steps):
                    act = rng.choices(list(weights), list(weights.values()))[0]
                    own = random.Random(f"{seed}/{number}")
                    if number in skip:
                        continue
                    outcome.steps += 1
                    outcome.faults += act in faults
                    await _step(made, act, act in faults, number, own, outcome)
                    look()
                    await anyio.sleep(own.choice(PAUSES))
                    outcome.history.append(_state(made))
                    look()
                outcome.history.append(f"calm {CLOCK.now:.6f}")
                await calm(made)
                await check_calm(made)
                look()
            except Violation as violation:
                outcome.violation = str(violation)
            finally:
                end()
            outcome.history.append(_state(made))
            outcome.virtual_seconds = CLOCK.now


async def _step(
    made: World, act: Act, fault: bool, number: int, own: random.Random, outcome: Outcome
) -> None:
    if fault:
        made.disturbed = CLOCK.now
    told = await act(made, own)
    if fault:
        made.disturbed = CLOCK.now
    outcome.history.append(f"{number} {CLOCK.now:.6f} {told}")


def _state(made: World) -> str:
    pods = ",".join(f"{key[1]}={pod.phase}" for key, pod in sorted(made.kubelet.api.pods.items()))
    offered = dict(sorted(made.kubelet.allocatable.items()))
    return f"  {CLOCK.now:.6f} {offered} [{pods}] writes={len(made.writes)}"
