"""Faults of the scheduler extender and of kube-scheduler's connection to it."""

import random

import anyio

from agent.simulator.kubelet.pod_specs import PodSpec
from tests.storm.acts import users
from tests.storm.extenders import REPLICAS
from tests.storm.pods import random_pod
from tests.storm.world import World


async def end(world: World, rng: random.Random) -> str:
    """SIGKILL or SIGTERM of a replica, in most cases of the one that serves; it comes back after a while."""
    replicas = world.extenders
    serving = [number for number, each in enumerate(replicas.lives) if each is not None and each.serves]
    number = rng.choice(serving) if serving and rng.random() < 0.7 else rng.randrange(REPLICAS)
    kill, down = rng.random() < 0.6, rng.choice((0.0, 0.5, 5.0, 30.0))
    await replicas.stop(number, kill=kill)

    async def start() -> None:
        await anyio.sleep(down)
        replicas.start(number)

    world.group.start_soon(start)
    return f"{'kill' if kill else 'terminate'} extender {number}, {down:g} s down"


async def away(world: World, rng: random.Random) -> str:
    """Nobody reaches the extender, or it can be reached again."""
    del rng
    world.extenders.away = not world.extenders.away
    return f"extenders {'away' if world.extenders.away else 'back'}"


async def slow(world: World, rng: random.Random) -> str:
    """Requests and answers take longer, or no longer: some answers come too late."""
    world.extenders.delay = rng.choice((0.0, 0.0, 0.1, 1.0, 2.4, 3.0))
    return f"the way to the extender takes {world.extenders.delay:g} s"


async def place_without(world: World, rng: random.Random) -> str:
    """A pod that names its node: no scheduler and no extender places it."""
    if len(world.pods) >= users.MOST_PODS:
        return await users.delete_pod(world, rng)
    world.made += 1
    pod = random_pod(
        rng, f"d{world.made}", mps=world.shape.mps, mig=world.shape.mig, offered=users.offered(world)
    )
    spec = PodSpec(
        pod.name, pod.containers, init_containers=pod.init_containers, node_name=world.kubelet.api.node_name
    )
    return users.create(world, spec)
