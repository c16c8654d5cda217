"""Acts of users: pods, labels, annotations, some of them forged, and manifests of static pods."""

import random

import anyio

from agent.model.placement import RESIZE
from agent.simulator.kubelet.pod_specs import PodSpec
from tests.storm.pods import random_pod, static_pod_of
from tests.storm.world import World

MOST_PODS = 12
MOST_STATIC_PODS = 2
LABELS = ("pgpu", "vgpu", "mixed", "disable", "enable", "no-such-layout", None)
DOORS = ("dra", "dra", "dra", "doors", "others")


async def create_pod(world: World, rng: random.Random) -> str:
    """A pod of any shape; beyond a number of them one is deleted instead."""
    if len(world.pods) >= MOST_PODS:
        return await delete_pod(world, rng)
    world.made += 1
    return create(
        world,
        random_pod(rng, f"p{world.made}", mps=world.shape.mps, mig=world.shape.mig, offered=offered(world)),
    )


def offered(world: World) -> list[str]:
    """Resources of which the node has some."""
    return [name for name, count in sorted(world.kubelet.allocatable.items()) if count]


def create(world: World, pod: PodSpec) -> str:
    """Hand a pod to the API server."""
    world.kubelet.create_pod(pod)
    world.created[pod.key] = anyio.current_time()
    world.pods.append(pod)
    limits = {each.name: dict(each.limits) for each in (*pod.init_containers, *pod.containers)}
    return f"create {pod.name} {limits}"


async def delete_pod(world: World, rng: random.Random) -> str:
    """Any pod."""
    if not world.pods:
        return "delete nothing"
    pod = world.pods.pop(rng.randrange(len(world.pods)))
    _delete(world, pod)
    return f"delete {pod.name}"


def _delete(world: World, pod: PodSpec) -> None:
    if pod.key in world.kubelet.api.pods:
        world.kubelet.api.delete(pod)


async def label(world: World, rng: random.Random) -> str:
    """Another mode, a layout, a word that nobody knows, no label."""
    words = (*LABELS, "mps", "shared") if world.shape.mps else LABELS
    words = (*words, *DOORS) if world.shape.claims else words
    word = rng.choice(words)
    world.label(word)
    return f"label {word}"


async def forge_annotation(world: World, rng: random.Random) -> str:
    """A tenant writes on a pod of its own what only kubelet, scheduler or agent should write."""
    pods = [pod for pod in world.kubelet.api.pods.values() if not pod.deleting]
    if not pods:
        return "forge nothing"
    forger, victim = rng.choice(pods), rng.choice(pods)
    claims = victim.uid
    text = rng.choice(
        (
            {"kubernetes.io/config.hash": claims},
            {"kubernetes.io/config.hash": claims, "kubernetes.io/config.mirror": claims},
            {"kubernetes.io/config.hash": claims},
            {"tencent.com/gpu-assigned": rng.choice(("true", "false", "\N{SNOWMAN}"))},
            {"tencent.com/predicate-gpu-idx-0": rng.choice(("0", "1", "7", "-1", "1,0", "x"))},
            {"gpu-node-agent.io/placement": rng.choice(("spread", "binpack", "best"))},
            {"gpu-node-agent.io/limits": "{"},
        )
    )
    forger.written |= text
    world.kubelet.api.changed()
    return f"forge on {forger.spec.name}: {text}"


async def resize(world: World, rng: random.Random) -> str:
    """The memory of a container's share is to change while it runs."""
    pods = [pod for pod in world.kubelet.api.pods.values() if not pod.deleting]
    if not pods:
        return "resize nothing"
    pod = rng.choice(pods)
    name = rng.choice(pod.spec.containers).name
    text = rng.choice((f'{{"{name}":{rng.choice((1, 5, 12, 30, 47, 4000))}}}', "{", '{"other":3}'))
    pod.written[RESIZE] = text
    world.kubelet.api.changed()
    return f"resize {pod.spec.name}: {text}"


async def static_pod(world: World, rng: random.Random) -> str:
    """A manifest comes, or goes."""
    known = [pod.spec for pod in world.kubelet.api.manifests.values()]
    if known and (len(known) >= MOST_STATIC_PODS or rng.random() < 0.5):
        spec = rng.choice(known)
        world.kubelet.api.delete(spec)
        return f"remove the manifest of {spec.name}"
    world.made += 1
    spec = static_pod_of(rng, f"s{world.made}", world.kubelet.api.node_name)
    world.kubelet.create_pod(spec)
    return f"manifest of {spec.name} {dict(spec.containers[0].limits)}"
