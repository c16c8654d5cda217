"""Acts of several tenants: equal pods in two namespaces, names that come again, ends that take their time."""

import random
from dataclasses import replace

import anyio

from agent.model.modes import SEPARATOR, Mode
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.storm import lingering
from tests.storm.acts import users
from tests.storm.holders import MODES, OURS
from tests.storm.neighbours import OTHERS
from tests.storm.pods import random_pod
from tests.storm.world import World

NAMESPACES = ("default", "strict")
# Seconds that processes of a deleted pod take to end; Kubernetes' own default is 30.
GRACE = (0.5, 3.0, 31.0, 90.0)
HANG_SECONDS = (0.5, 8.0, 45.0, 130.0)  # of a process, after its pod was deleted by force
AGAIN_SECONDS = 5.0  # that a name is waited for until it is free


async def twins(world: World, rng: random.Random) -> str:
    """Pods of two tenants that ask for the same, at once; some by the same name, some past the scheduler."""
    if len(world.pods) + 2 > users.MOST_PODS:
        return await users.delete_pod(world, rng)
    world.made += 1
    one = _pod(world, rng, f"t{world.made}")
    node = world.kubelet.api.node_name if rng.random() < 0.4 else None
    same = rng.random() < 0.5
    other = one if rng.random() < 0.6 else _pod(world, rng, one.name)
    first, second = rng.sample(NAMESPACES, 2)
    told = users.create(world, replace(one, namespace=first, node_name=node))
    name = one.name if same else f"{one.name}b"
    users.create(world, replace(other, name=name, namespace=second, node_name=node))
    return f"{told} in {first}, and {name} in {second}"


async def with_neighbour(world: World, rng: random.Random) -> str:
    """A pod that asks for another plugin's resource, too, which may refuse it; its twin does not."""
    if len(world.pods) + 2 > users.MOST_PODS:
        return await users.delete_pod(world, rng)
    world.made += 1
    world.neighbour.refuses, world.neighbour.seconds = (
        rng.choice((0.0, 0.5, 1.0)),
        rng.choice((0.0, 0.0, 0.3)),
    )
    one = _pod(world, rng, f"n{world.made}")
    main = one.containers[0]
    # More than there are: the kubelet refuses the pod itself.
    count = rng.choice((1, 1, 2, 99))
    both = ContainerSpec(main.name, {**main.limits, OTHERS: count}, exits=main.exits)
    node = world.kubelet.api.node_name if count == 99 or rng.random() < 0.5 else None
    bad = replace(
        one, containers=(both, *one.containers[1:]), namespace=rng.choice(NAMESPACES), node_name=node
    )
    told = users.create(world, bad)
    if rng.random() < 0.8:
        twin = replace(one, name=f"{one.name}b", namespace=rng.choice(NAMESPACES), node_name=node)
        users.create(world, twin)
        told += f", its twin in {twin.namespace}"
    return f"{told} in {bad.namespace}"


async def again(world: World, rng: random.Random) -> str:
    """A pod is deleted, and one of the same name comes as soon as that is free, as of a StatefulSet."""
    if not world.pods:
        return "no name to come again"
    pod = world.pods.pop(rng.randrange(len(world.pods)))
    force = rng.random() < 0.4
    end(world, pod, force=force)
    with anyio.move_on_after(AGAIN_SECONDS):
        while pod.key in world.kubelet.api.pods:
            await world.kubelet.api.changes.wait_change(world.kubelet.api.changes.version)
        new = pod if rng.random() < 0.5 else replace(_pod(world, rng, pod.name), namespace=pod.namespace)
        return f"{users.create(world, new)} again{', the first by force' if force else ''}"
    return f"delete {pod.name}, whose name is not free yet"


async def linger(world: World, rng: random.Random) -> str:
    """A pod whose processes take their time to end, and which is deleted."""
    pods = [each for each in world.pods if each.grace]
    if pods and (rng.random() < 0.6 or len(world.pods) >= users.MOST_PODS):
        pod = rng.choice(pods)
        world.pods.remove(pod)
        force = rng.random() < 0.5
        end(world, pod, force=force)
        return f"delete {pod.name}{' by force' if force else ''}, which takes {pod.grace:g} s"
    if len(world.pods) >= users.MOST_PODS:
        return await users.delete_pod(world, rng)
    world.made += 1
    pod = replace(
        _pod(world, rng, f"l{world.made}"), grace=rng.choice(GRACE), namespace=rng.choice(NAMESPACES)
    )
    return f"{users.create(world, pod)} which takes {pod.grace:g} s to end"


async def outlive(world: World, rng: random.Random) -> str:
    """A pod is deleted by force whose process hangs in the driver, and ends some time later."""
    life = world.kubelet._life
    running = {
        pod.uid: pod
        for spec in world.pods
        if (pod := world.kubelet.api.pods.get(spec.key)) and pod.phase is Phase.RUNNING and not pod.deleting
    }
    slots = {world.machine.uuid(slot): slot for slot in world.machine.slots}
    held = sorted(
        (uid, container, gpu)
        for uid, container, resource, units in (life.devices.tables.pods.entries() if life else ())
        if uid in running and MODES.get(resource, Mode.PGPU) is not Mode.MPS and resource in OURS
        for gpu in {text.partition(SEPARATOR)[0] for text in units.ids} & slots.keys()
    )
    if not held:
        return "no process to outlive its pod"
    uid, container, gpu = rng.choice(held)
    pod, seconds = running[uid], rng.choice(HANG_SECONDS)
    pid = lingering.outlive(world, slots[gpu], uid, pod.container_id(container))
    world.pods.remove(pod.spec)
    world.kubelet.api.delete_by_force(pod.spec)

    async def ends() -> None:
        await anyio.sleep(seconds)
        lingering.end(world, pid)

    world.group.start_soon(ends)
    return f"delete {pod.spec.name} by force, whose process {pid} stays on {gpu} for {seconds:g} s"


def end(world: World, pod: PodSpec, *, force: bool) -> None:
    api = world.kubelet.api
    if pod.key not in api.pods:
        return
    if force and api.pods[pod.key].phase is not Phase.PENDING:
        api.delete_by_force(pod)
    else:
        api.delete(pod)


def _pod(world: World, rng: random.Random, name: str) -> PodSpec:
    return random_pod(rng, name, mps=world.shape.mps, mig=world.shape.mig, offered=users.offered(world))
