"""One storm: a seed, its events, and what it proved."""

import gc
import hashlib
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from aiohttp import web_app

from tests.storm import attribution, chance, cheaper, parts
from tests.storm.acts import CLAIMS, USERS, Act, calm
from tests.storm.admission import observe
from tests.storm.claim_rules import check_claims_settle
from tests.storm.clock import CLOCK
from tests.storm.excuses import Excuses
from tests.storm.invariants import Invariants, Violation
from tests.storm.liveness import check_calm
from tests.storm.plan import Plan
from tests.storm.tempo import pause
from tests.storm.world import World, world

MORE_FILES = 8  # than before a storm: what is opened once in a process, and mappings that are let go of late
EVENTS_BETWEEN_FILES = 20  # between two looks at all files, whose digest the history has
AGENT_LOCK = "agent.lock"  # it holds the number of this process
# In memory, where there is such a folder: a step writes files.
SCRATCH = next((each for each in ("/dev/shm",) if os.access(each, os.W_OK)), None)


@dataclass
class Outcome:
    """The outcome of a storm."""

    seed: int
    families: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    violation: str | None = None
    virtual_seconds: float = 0.0
    faults: int = 0
    steps: int = 0
    checks: int = 0  # how often the invariants were looked at
    excuses: Excuses | None = None
    skipped: frozenset[int] = frozenset()
    plan: Plan | None = None

    @property
    def digest(self) -> str:
        """Two runs of a seed have the same."""
        return hashlib.sha256("\n".join(self.history).encode()).hexdigest()[:16]


async def storm(outcome: Outcome, plan: Plan) -> None:
    """Let a storm rage, then be calm."""
    seed = plan.seed
    random.seed(seed)
    outcome.plan, outcome.families = plan, plan.families
    files = _open_files()
    chance.install(seed)
    with tempfile.TemporaryDirectory(prefix="gs-", dir=SCRATCH) as folder:
        chance.install(seed)  # again: how many names there were for the folder is not part of a storm
        async with world(Path(folder), seed, plan.shape, sockets=plan.sockets) as made:
            made.label(plan.label)
            await made.start_agent()
            await anyio.sleep(plan.pause)
            invariants = Invariants(made)
            # The outer one first: it ends last.
            ends = [attribution.observe(made, invariants.found.append), parts.observe(made)]
            end = observe(made, invariants.excuses, invariants.found.append)
            try:
                for number, act in plan.acts():
                    own = random.Random(f"{seed}/{number}")
                    fault = act not in USERS.weights and act not in CLAIMS.weights
                    outcome.steps += 1
                    outcome.faults += fault
                    invariants.event()
                    await _step(made, act, number, own, outcome)
                    invariants.look()
                    _extenders_live(made)
                    await anyio.sleep(pause(plan.tempo, own))
                    outcome.history.append(_state(made))
                    if number % EVENTS_BETWEEN_FILES == 0:
                        outcome.history.append(f"  files {_files(made.folder)}")
                    invariants.look()
                outcome.history.append(f"calm {CLOCK.now:.6f}")
                await calm(made)
                if text := await check_claims_settle(made):
                    raise Violation(text)
                await check_calm(made, plan.calm)
                invariants.look()
                _extenders_live(made)
            except Violation as violation:
                outcome.violation = str(violation)
            finally:
                end()
                while ends:
                    ends.pop()()
            outcome.checks = invariants.looks
            outcome.excuses = invariants.excuses
            outcome.history.append(_state(made))
            outcome.virtual_seconds = CLOCK.now
    web_app._cached_build_middleware.cache_clear()  # it would keep the API server, and all with it
    gc.collect()  # what a life that was killed had open
    # A process that is killed has nothing open; a life that plays one leaves what it could not close.
    if outcome.violation is None and made.killed <= 1 and (left := _open_files() - files) > MORE_FILES:
        outcome.violation = f"{left} files were left open"


def _extenders_live(made: World) -> None:
    if problem := made.extenders.problem():
        raise Violation(problem)


def _open_files() -> int:
    """How many descriptors this process has, those aside that are kept to be used again."""
    return len(os.listdir("/proc/self/fd")) - cheaper.kept()  # noqa: PTH208


async def _step(made: World, act: Act, number: int, own: random.Random, outcome: Outcome) -> None:
    told = await act(made, own)
    outcome.history.append(f"{number} {CLOCK.now:.6f} {told}")


def _state(made: World) -> str:
    pods = ",".join(f"{key[1]}={pod.phase}" for key, pod in sorted(made.kubelet.api.pods.items()))
    offered = dict(sorted(made.kubelet.allocatable.items()))
    return f"  {CLOCK.now:.6f} {offered} [{pods}] writes={len(made.writes)}"


def _files(folder: Path) -> str:
    """A digest of what lies in a storm's folder, by names and content."""
    found = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        if file.name != AGENT_LOCK:
            found.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]
