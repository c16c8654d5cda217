"""What befalls MPS control daemons."""

import random

from tests.storm.mps_daemons import VirtualDaemon
from tests.storm.world import World


def _any(world: World, rng: random.Random) -> VirtualDaemon | None:
    found = [each for each in world.daemons.daemons if world.daemons.identify(each.process.pid)]
    genuine = [each for each in found if not each.forged]
    return rng.choice(genuine) if genuine else None


async def die(world: World, rng: random.Random) -> str:
    """A daemon ends, with its server or without."""
    if (daemon := _any(world, rng)) is None:
        return "no daemon to die"
    alone = rng.random() < 0.5
    world.daemons.end(daemon.process.pid)
    if daemon.server and not alone:
        world.daemons.end(daemon.server.pid)
    return f"daemon {daemon.process.pid} dies{' alone' if alone else ''}"


async def hang(world: World, rng: random.Random) -> str:
    """A daemon answers nobody any more, or answers again."""
    if (daemon := _any(world, rng)) is None:
        return "no daemon to hang"
    daemon.hangs = not daemon.hangs
    return f"daemon {daemon.process.pid} {'hangs' if daemon.hangs else 'answers again'}"


async def refuse(world: World, rng: random.Random) -> str:
    """No daemon can be started, or they can again."""
    del rng
    world.daemons.refuses = not world.daemons.refuses
    return f"daemons {'end at once' if world.daemons.refuses else 'can be started again'}"


async def forge(world: World, rng: random.Random) -> str:
    """A pod runs something that looks like a daemon of a GPU."""
    slots = world.machine.slots
    if not slots:
        return "no GPU to forge a daemon for"
    uuid = world.machine.uuid(rng.choice(slots))
    world.daemons.forge(world.folder / "run" / "mps" / uuid / "pipe")
    return f"a pod forges a daemon of {uuid}"


async def meddle(world: World, rng: random.Random) -> str:
    """Somebody changes a daemon's setting that old drivers let everybody change."""
    if (daemon := _any(world, rng)) is None:
        return "no daemon to meddle with"
    daemon.answer("set_default_active_thread_percentage 10")
    return f"somebody caps all clients of daemon {daemon.process.pid}"
