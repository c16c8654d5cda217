"""Faults of MPS control daemons."""

import random

from agent.model.pod import MPS
from agent.simulator.kubelet.pod_specs import Phase
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


async def join(world: World, rng: random.Random) -> str:
    """A process becomes a client: in most cases of a container that holds a share, else a stranger."""
    reap(world)
    served = [each for each in world.daemons.daemons if world.daemons.servers(each.pipe) and not each.faulted]
    if not served:
        return "no server to be a client of"
    daemon = rng.choice(served)
    users = _containers_on(world, daemon.uuid)
    uid, container = rng.choice(users) if users and rng.random() < 0.9 else ("", "")
    pid = daemon.join(uid, container, rng.choice((0, 1000, 1000, 1001)))
    return f"process {pid} of {uid or 'no pod'} becomes a client on {daemon.uuid}"


async def leave(world: World, rng: random.Random) -> str:
    """A client ends; in some cases by an error after which its server takes no more before all have left."""
    reap(world)
    known = [(daemon, pid) for daemon in world.daemons.daemons for pid in daemon.clients]
    if not known:
        return "no client to end"
    daemon, pid = rng.choice(known)
    daemon.faulted = rng.random() < 0.3
    daemon.leave(pid)
    return f"client {pid} ends, and {len(daemon.clients)} are left{' in FAULT' if daemon.faulted else ''}"


async def die_under_clients(world: World, rng: random.Random) -> str:
    """The daemon with most clients ends, with its server or without."""
    reap(world)
    served = [each for each in world.daemons.daemons if world.daemons.identify(each.process.pid)]
    daemon = max(served, key=lambda each: len(each.clients), default=None)
    if daemon is None or not daemon.clients:
        return "no daemon has clients"
    count, alone = len(daemon.clients), rng.random() < 0.5
    world.daemons.end(daemon.process.pid)
    if daemon.server and not alone:
        world.daemons.end(daemon.server.pid)
    return f"daemon {daemon.process.pid} dies{' alone' if alone else ''} under {count} clients"


def reap(world: World) -> None:
    """Processes of pods that have ended are gone."""
    pods = (world.kubelet.api.pods, world.kubelet.api.manifests)
    world.daemons.reap({pod.uid for each in pods for pod in each.values() if not pod.phase.finished})


def _containers_on(world: World, gpu: str) -> list[tuple[str, str]]:
    """Pod UID and container ID of those that hold cores of a GPU for MPS."""
    life = world.kubelet._life
    pods = {pod.uid: pod for pod in world.kubelet.api.pods.values() if pod.phase is Phase.RUNNING}
    return [
        (uid, pods[uid].container_id(container))
        for uid, container, resource, held in (life.devices.tables.pods.entries() if life else ())
        if resource == MPS.core and uid in pods and any(each.startswith(f"{gpu}::") for each in held.ids)
    ]


async def meddle(world: World, rng: random.Random) -> str:
    """Somebody changes a daemon's setting that old drivers let everybody change."""
    if (daemon := _any(world, rng)) is None:
        return "no daemon to meddle with"
    daemon.answer("set_default_active_thread_percentage 10")
    return f"somebody caps all clients of daemon {daemon.process.pid}"
