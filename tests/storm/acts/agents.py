"""Faults of the agent's own process."""

import random
from pathlib import Path

import anyio
import anyio.lowlevel

from tests.storm.clock import CLOCK
from tests.storm.world import World

MOST_TURNS = 200  # of the loop, before a signal: it comes at any await of what is under way

# By which the clock is set: longer than anything is waited for, both ways.
STEPS = (-7200.0, -45.0, -2.0, 2.0, 45.0, 7200.0)


async def _at_any_await(rng: random.Random) -> None:
    for _ in range(rng.choice((0, rng.randrange(MOST_TURNS)))):
        await anyio.lowlevel.checkpoint()


async def kill(world: World, rng: random.Random) -> str:
    """SIGKILL, and a new agent after a while."""
    await _at_any_await(rng)
    await world.kill_agent()
    await anyio.sleep(rng.choice((0.0, 0.2, 5.0, 20.0)))
    await world.start_agent()
    return "kill the agent"


async def terminate(world: World, rng: random.Random) -> str:
    """SIGTERM, and a new agent after a while."""
    await _at_any_await(rng)
    await world.terminate_agent()
    await anyio.sleep(rng.choice((0.0, 1.0, 15.0)))
    await world.start_agent()
    return "terminate the agent"


async def update(world: World, rng: random.Random) -> str:
    """The next agent starts before the one that is terminated has gone."""
    await _at_any_await(rng)
    before = world.current
    async with anyio.create_task_group() as group:
        if before is not None:
            group.start_soon(before.terminate)
        await anyio.sleep(rng.choice((0.0, 0.05, 1.0)))
        await world.start_agent(beside=True)
    return "update the agent"


async def step_clock(world: World, rng: random.Random) -> str:
    """Somebody sets the clock of the wall; that since boot goes on."""
    del world
    by = rng.choice(STEPS)
    CLOCK.stepped += by
    return f"the clock is set by {by:g} s"


async def tear_state(world: World, rng: random.Random) -> str:
    """SIGKILL; a file that the agent keeps is cut short or holds anything when the next one starts."""
    await world.kill_agent()
    files = sorted(each for each in (world.folder / "state").rglob("*") if each.is_file())
    names = []
    for file in rng.sample(files, min(len(files), rng.choice((1, 2)))):
        _tear(file, rng)
        names.append(file.name)
    await anyio.sleep(rng.choice((0.0, 1.0)))
    await world.start_agent()
    return f"kill the agent, tear {', '.join(names) or 'nothing'}"


def _tear(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(
        rng.choice((b"", data[: len(data) // 2], b"\0" * len(data), b"{}", rng.randbytes(64), b"\xff" + data))
    )
