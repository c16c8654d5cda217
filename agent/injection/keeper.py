"""Keeps the file with the CDI specification of the GPUs true to the machine.

Made again at start (a boot included), and when the driver, the GPUs or their MIG mode change. The file is
never removed here: a container that is started again needs its devices whether the agent runs or not.
"""

import math
from collections.abc import Hashable
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.injection.toolkit import (
    FILE,
    MOST_BYTES,
    BadSpecification,
    CdiError,
    Devices,
    Generator,
    Specification,
    parse,
)
from agent.inventory.snapshot import Snapshot
from agent.kit import files
from agent.kit.tasks import Backoff, Cell
from agent.model.holding import Record

log = structlog.get_logger()

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
# How often somebody's `rm` is looked for.
LOOK_SECONDS = 60.0


class SpecificationKeeper:
    """One per agent; `keep` and `run` are not called at the same time."""

    def __init__(
        self, folder: Path, generator: Generator, inventory: Cell[Snapshot], held: Cell[Record | None]
    ) -> None:
        """`held` says whose devices stay in the file although the machine has them no more."""
        self.devices: Cell[Devices] = Cell(Devices())
        self.generations = 0
        self.failures = 0
        self._file = folder / FILE
        self._generator = generator
        self._inventory = inventory
        self._held = held
        self._made_for: Hashable = None
        self._standing: Specification | None = None

    def remarks(self) -> list[str]:
        """Our own CDI specification of the GPUs, where it is not as it should be."""
        problem = self.devices.value.problem
        return [f"the CDI specification of the GPUs is not as it should be: {problem}"] if problem else []

    async def take_up(self) -> None:
        """Go on with the file of an earlier agent: it serves until a new one is made."""
        found = await anyio.to_thread.run_sync(_read, self._file)
        if found:
            self._standing = found
            self._publish(None)

    async def run(self) -> None:
        """Write the file again whenever it is out of date, until cancelled."""
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            seen = self._inventory.version
            await self.keep()
            if self._made_for == await self._needs():
                backoff.reset()
                pause = LOOK_SECONDS
            else:
                pause = backoff.next() if self.devices.value.problem else math.inf
            with anyio.move_on_after(pause):
                await self._inventory.wait_change(seen)

    async def keep(self) -> None:
        """Make the file now if it is not as the machine is; a failure stands in `devices`."""
        wanted = await self._needs()
        if wanted is None:
            return  # no driver to ask, or NVML is released and must stay closed
        if wanted == self._made_for and await anyio.Path(self._file).is_file():
            return
        self._made_for = None
        try:
            made = await self._generator.generate()
            held = self._held.value
            made = made.keeping(self._standing, None if held is None else held.uuids)
            await anyio.to_thread.run_sync(files.write, self._file.parent, self._file.name, made.encoded())
        except (CdiError, OSError) as error:
            self.failures += 1
            problem = str(error) if isinstance(error, CdiError) else f"{self._file}: {error.strerror}"
            if problem != self.devices.value.problem:
                log.warning("gpu_specification_not_made", file=str(self._file), problem=problem)
            self._publish(problem)
            return
        self.generations += 1
        self._made_for, self._standing = wanted, made
        log.info("gpu_specification_made", file=str(self._file), devices=len(made.names))
        self._publish(self._lacking(made))

    async def _needs(self) -> Hashable:
        """The inputs of a specification; None: none can be made now."""
        needs = _needs(self._inventory.value)
        return None if needs is None else (needs, *await self._generator.beside())

    def _lacking(self, made: Specification) -> str | None:
        # In MIG mode only the instances have devices.
        present = {
            uuid
            for state in self._inventory.value.gpus
            if not state.health.away
            for uuid in (
                [each.uuid for each in state.gpu.instances] if state.gpu.mig_enabled else [state.uuid]
            )
        }
        if missing := sorted(present - made.names):
            return (
                f"the generated CDI specification lacks {', '.join(missing)}: nvidia-ctk did not see them; "
                "the agent's container needs the device nodes of all GPUs"
            )
        return None

    def _publish(self, problem: str | None) -> None:
        found = self._standing
        now = Devices(found.names, problem, found.limiting) if found else Devices(problem=problem)
        if now != self.devices.value:
            self.devices.publish(now)


def _needs(snapshot: Snapshot) -> Hashable:
    if snapshot.driver is None or snapshot.problem or snapshot.released_until is not None:
        return None
    gpus = frozenset(
        (state.uuid, state.gpu.minor, state.gpu.mig_enabled, state.gpu.instances)
        for state in snapshot.gpus
        if not state.health.away
    )
    return (snapshot.driver.version, gpus) if gpus else None


def _read(file: Path) -> Specification | None:
    try:
        return parse(files.read_text(file, MOST_BYTES).encode())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, BadSpecification) as error:
        log.warning("gpu_specification_unreadable", file=str(file), problem=str(error)[:200])
        return None
