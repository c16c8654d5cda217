"""Acts with claims (DRA): pods with one each, pods that share one, and what is done to slices and claims."""

import random
from dataclasses import replace
from typing import Any

from agent.model.resource_claim import DRIVER, pool_of
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodClaim, PodSpec
from agent.simulator.kubelet.resource_objects import CLAIMS, SLICES
from tests.storm.acts import tenants, users
from tests.storm.world import World

NAME = "gpu"
MOST_MEMORY = 11  # GiB of a GPU that shares may have
GRACE = (0.0, 0.0, 0.0, 0.5, 3.0, 31.0)
CONFIGURATION = {"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfiguration", "priority": "low"}


def spec_of(word: str, cores: int = 0, gib: int = 0, count: int = 1) -> dict[str, Any]:
    """The spec of a claim of the class `gpu-<word>`."""
    exactly: dict[str, Any] = {"deviceClassName": f"gpu-{word}", "count": count}
    if cores:
        exactly["capacity"] = {"requests": {"cores": str(cores), "memory": f"{gib}Gi"}}
    return {"devices": {"requests": [{"name": NAME, "exactly": exactly}]}}


def _random_spec(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return spec_of("whole", count=rng.choice((1, 1, 1, 2)))
    small = rng.random() < 0.7
    cores, gib = rng.randint(1, 30 if small else 100), rng.randint(1, 4 if small else MOST_MEMORY)
    # One that names no amount gets all of the GPU.
    spec = spec_of("mps", cores if rng.random() < 0.95 else 0, gib)
    if rng.random() < 0.2:
        spec["devices"]["config"] = [{"opaque": {"driver": DRIVER, "parameters": CONFIGURATION}}]
    return spec


def claiming(rng: random.Random, name: str, claim: PodClaim) -> PodSpec:
    """A pod with one claim, which one of its containers has, or both."""
    seconds = rng.choice((0.0, 2.0, 20.0))
    main = ContainerSpec("main", claims=(NAME,), exits=rng.random() < 0.15, seconds=seconds)
    second = ContainerSpec("second", claims=(NAME,) if rng.random() < 0.5 else ())
    containers = (main, second) if rng.random() < 0.2 else (main,)
    namespace = rng.choice(tenants.NAMESPACES)
    return PodSpec(name, containers, namespace, grace=rng.choice(GRACE), claims=(claim,))


async def create(world: World, rng: random.Random) -> str:
    """A pod with a claim of its own: a whole GPU, or a share of any size."""
    if len(world.pods) >= users.MOST_PODS:
        return await users.delete_pod(world, rng)
    world.made += 1
    spec = _random_spec(rng)
    pod = claiming(rng, f"c{world.made}", PodClaim(NAME, template=spec))
    users.create(world, pod)
    return f"create {pod.name} in {pod.namespace} with a claim of {_said(spec)}, takes {pod.grace:g} s to end"


async def share(world: World, rng: random.Random) -> str:
    """A pod that has a claim together with others: a new claim, or one that is there."""
    if len(world.pods) >= users.MOST_PODS:
        return await users.delete_pod(world, rng)
    known = _standing(world)
    world.made += 1
    namespace, name = rng.choice(known) if known and rng.random() < 0.7 else ("", "")
    said = f"claim {name}"
    if not name:
        namespace, name, spec = rng.choice(tenants.NAMESPACES), f"k{world.made}", _random_spec(rng)
        metadata = {"name": name, "namespace": namespace}
        world.kubelet.api.resources.create(CLAIMS, {"metadata": metadata, "spec": spec})
        said = f"claim {name} of {_said(spec)}"
    pod = replace(claiming(rng, f"c{world.made}", PodClaim(NAME, name)), namespace=namespace)
    users.create(world, pod)
    return f"create {pod.name} in {namespace} with {said}, takes {pod.grace:g} s to end"


async def drop(world: World, rng: random.Random) -> str:
    """A claim that pods share is deleted once none has it; sometimes another one takes its name."""
    objects = world.kubelet.api.resources
    free = [
        key for key in _standing(world) if not objects.get(CLAIMS, key).get("status", {}).get("reservedFor")
    ]
    if not free:
        return "no claim to drop"
    namespace, name = rng.choice(free)
    spec = objects.delete(CLAIMS, (namespace, name))["spec"]
    if again := rng.random() < 0.5:
        spec = spec if rng.random() < 0.5 else _random_spec(rng)
        objects.create(CLAIMS, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})
    return f"claim {name} in {namespace} is deleted{', and made again' if again else ''}"


async def delete(world: World, rng: random.Random) -> str:
    """A pod with a claim is deleted, by force or not."""
    pods = [each for each in world.pods if each.claims]
    if not pods:
        return "no pod with a claim to delete"
    pod = rng.choice(pods)
    world.pods.remove(pod)
    force = rng.random() < 0.4
    tenants.end(world, pod, force=force)
    return f"delete {pod.name}{' by force' if force else ''}"


async def wipe(world: World, rng: random.Random) -> str:
    """Somebody deletes slices of the node, all or one."""
    objects = world.kubelet.api.resources
    names = [item["metadata"]["name"] for item in objects.of(SLICES)]
    chosen = names if rng.random() < 0.5 else rng.sample(names, min(1, len(names)))
    for name in chosen:
        objects.delete(SLICES, ("", name))
    return f"slices are deleted: {chosen}"


async def intrude(world: World, rng: random.Random) -> str:
    """Somebody writes a slice that says to be the driver's."""
    del rng
    objects, node = world.kubelet.api.resources, world.kubelet.api.node_name
    if any(item["metadata"]["name"] == "intruder" for item in objects.of(SLICES)):
        return "the intruder's slice is there"
    pool = {"name": f"{pool_of(node)}/x", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": []}
    objects.create(SLICES, {"metadata": {"name": "intruder"}, "spec": spec})
    return "somebody writes a slice of the driver's"


async def forbid(world: World, rng: random.Random) -> str:
    """The kubelet may not read the next claims: the node authorizer lags behind."""
    world.kubelet.api.resources.forbidden_reads = rng.choice((1, 1, 2, 5))
    return f"the kubelet is refused {world.kubelet.api.resources.forbidden_reads} claims"


def _standing(world: World) -> list[tuple[str, str]]:
    """Claims that belong to no pod, by namespace and name."""
    metadata = [item["metadata"] for item in world.kubelet.api.resources.of(CLAIMS)]
    return [(each["namespace"], each["name"]) for each in metadata if not each.get("ownerReferences")]


def _said(spec: dict[str, Any]) -> str:
    (request,) = spec["devices"]["requests"]
    exact = request["exactly"]
    amounts = exact.get("capacity", {}).get("requests", {})
    return " ".join((str(exact["count"]), exact["deviceClassName"], *amounts.values()))
