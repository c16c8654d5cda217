"""Faults of the API server."""

import random

import anyio

from tests.storm.acts import users
from tests.storm.world import World

OUTAGE_SECONDS = (20.0, 65.0, 130.0, 320.0)  # the longest: beyond all that `agent.cluster` waits for
SLOW_SECONDS = 35.0
STATUSES = (403, 409, 410, 422, 429, 500, 503, 504)


async def away(world: World, rng: random.Random) -> str:
    """The API server goes or comes back."""
    del rng
    world.http.reachable = not world.http.reachable
    return "api server back" if world.http.reachable else "api server away"


async def refuses(world: World, rng: random.Random) -> str:
    """The next calls are refused."""
    status, count = rng.choice(STATUSES), rng.choice((1, 2, 5, 20))
    world.api_faults.extend([status] * count)
    return f"api server refuses {count} calls with {status}"


async def slow(world: World, rng: random.Random) -> str:
    """Calls take longer, or no longer."""
    world.api_delay = rng.choice((0.0, 0.0, 0.1, 1.0, 3.0, 20.0))
    return f"api server takes {world.api_delay:g} s"


async def lost_answer(world: World, rng: random.Random) -> str:
    """A write is carried out, its answer is lost."""
    del rng
    world.lost_answers += 1
    return "an answer of the api server will be lost"


async def silence(world: World, rng: random.Random) -> str:
    """Watches of nodes, pods or both stay open and bring nothing, or speak again: late, and out of order."""
    world.http.silent = (
        set() if world.http.silent else set(rng.choice((("nodes",), ("pods",), ("nodes", "pods"))))
    )
    return f"silent watches: {sorted(world.http.silent)}"


async def outage(world: World, rng: random.Random) -> str:
    """The API server is away, slow or mute for long, while users go on; then all is well again."""
    seconds, kind = rng.choice(OUTAGE_SECONDS), rng.choice(("away", "slow", "mute"))
    world.http.reachable = kind != "away"
    world.api_delay = SLOW_SECONDS if kind == "slow" else 0.0
    world.http.silent = {"nodes", "pods"} if kind == "mute" else set()
    told = []
    for _ in range(3):
        act = rng.choice((users.create_pod, users.delete_pod, users.delete_pod))
        told.append(await act(world, rng))
        await anyio.sleep(seconds / 3)
    world.http.reachable, world.api_delay, world.http.silent = True, 0.0, set()
    world.outage = anyio.current_time()
    if kind != "mute":
        world.unanswered = world.outage
    return f"api server {kind} for {seconds:g} s: {'; '.join(told)}"


async def mute_switch(world: World, rng: random.Random) -> str:
    """Another mode is asked for while the node's watch is mute, for longer than an agent bears that."""
    world.http.silent |= {"nodes"}
    told = await users.label(world, rng)
    await anyio.sleep(rng.choice((92.0, 100.0, 125.0)))
    return f"{told}, unseen: the node's watch is mute"
