"""Events that a seed chooses: what users do, and what goes wrong. Each is one step."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio

from agent.simulator.kubelet.pods import PodSpec
from tests.storm import seams
from tests.storm.pods import random_pod
from tests.storm.world import World

Act = Callable[[World, random.Random], Awaitable[str]]
MOST_PODS = 12
XIDS = (13, 31, 43, 48, 63, 74, 79, 94, 95, 119, 999)
LABELS = ("pgpu", "vgpu", "mixed", "disable", "enable", "no-such-layout", None)


@dataclass(frozen=True)
class Family:
    """Events that a storm has or has not: `weights` says how often each comes."""

    name: str
    weights: Mapping[Act, int]


async def create_pod(world: World, rng: random.Random) -> str:
    """A pod of any shape; beyond a number of them one is deleted instead."""
    if len(world.pods) >= MOST_PODS:
        return await delete_pod(world, rng)
    world.made += 1
    pod = random_pod(rng, f"p{world.made}")
    world.kubelet.create_pod(pod)
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
    word = rng.choice(LABELS)
    world.label(word)
    return f"label {word}"


async def xid(world: World, rng: random.Random) -> str:
    """An Xid on a GPU."""
    slot, number = rng.choice(world.machine.slots), rng.choice(XIDS)
    world.machine.xid(slot, number)
    seams.NVML.wake()
    return f"xid {number} on {slot}"


async def fall_off(world: World, rng: random.Random) -> str:
    """A GPU falls off the bus, or comes back."""
    slot = rng.choice(world.machine.slots)
    if slot in world.lost:
        world.lost.discard(slot)
        world.machine.restore(slot)
        return f"restore {slot}"
    world.lost.add(slot)
    world.machine.fall_off_bus(slot)
    seams.NVML.wake()
    return f"lose {slot}"


async def nvml_fault(world: World, rng: random.Random) -> str:
    """NVML calls fail or hang; or all of them work again."""
    if world.nvml_faults:
        world.nvml_faults = 0
        world.machine.clear_faults()
        seams.NVML.wake()
        return "nvml well again"
    world.nvml_faults += 1
    slot = rng.choice((*world.machine.slots, None))
    call = rng.choice(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByUUID", "nvmlEventSetWait", None))
    if rng.random() < 0.5:
        world.machine.hang(call, slot if call else None)
        return f"nvml hangs in {call} of {slot}"
    world.machine.fail(call, 999, slot if call else None)
    return f"nvml fails in {call} of {slot}"


async def kill_agent(world: World, rng: random.Random) -> str:
    """SIGKILL, and a new agent after a while."""
    await world.kill_agent()
    await anyio.sleep(rng.choice((0.0, 0.2, 5.0, 20.0)))
    await world.start_agent()
    return "kill the agent"


async def terminate_agent(world: World, rng: random.Random) -> str:
    """SIGTERM, and a new agent after a while."""
    await world.terminate_agent()
    await anyio.sleep(rng.choice((0.0, 1.0, 15.0)))
    await world.start_agent()
    return "terminate the agent"


async def restart_kubelet(world: World, rng: random.Random) -> str:
    """The kubelet's process ends and comes back."""
    down = rng.choice((0.0, 0.5, 5.0, 40.0))
    await world.kubelet.stop()
    await anyio.sleep(down)
    seams.KUBELET.started = anyio.current_time()
    await world.kubelet.start()
    return f"restart the kubelet, {down:g} s down"


async def api_away(world: World, rng: random.Random) -> str:
    """The API server goes or comes back."""
    world.http.reachable = not world.http.reachable
    return "api server back" if world.http.reachable else "api server away"


async def api_refuses(world: World, rng: random.Random) -> str:
    """The next calls are refused."""
    status, count = rng.choice((403, 409, 429, 500, 503)), rng.choice((1, 2, 5, 20))
    world.api_faults.extend([status] * count)
    return f"api server refuses {count} calls with {status}"


async def api_slow(world: World, rng: random.Random) -> str:
    """Calls take longer, or no longer."""
    world.api_delay = rng.choice((0.0, 0.0, 0.1, 1.0, 3.0, 20.0))
    return f"api server takes {world.api_delay:g} s"


async def lost_answer(world: World, rng: random.Random) -> str:
    """A write is carried out, its answer is lost."""
    world.lost_answers += 1
    return "an answer of the api server will be lost"


async def silence(world: World, rng: random.Random) -> str:
    """Watches of nodes, pods or both stay open and bring nothing, or speak again."""
    world.http.silent = (
        set() if world.http.silent else set(rng.choice((("nodes",), ("pods",), ("nodes", "pods"))))
    )
    return f"silent watches: {sorted(world.http.silent)}"


USERS = Family("users", {create_pod: 40, delete_pod: 25})
FAULTS = (
    Family("labels", {label: 8}),
    Family("gpus", {xid: 4, fall_off: 2}),
    Family("nvml", {nvml_fault: 3}),
    Family("agent killed", {kill_agent: 3}),
    Family("agent terminated", {terminate_agent: 3}),
    Family("kubelet", {restart_kubelet: 3}),
    Family("api away", {api_away: 4}),
    Family("api refuses", {api_refuses: 5, lost_answer: 2}),
    Family("api slow", {api_slow: 3}),
    Family("api silent", {silence: 3}),
)


async def calm(world: World) -> None:
    """All faults end."""
    world.machine.clear_faults()
    for slot in sorted(world.lost):
        world.machine.restore(slot)
    world.lost.clear()
    world.nvml_faults = 0
    world.http.reachable = True
    world.http.silent = set()
    world.api_faults.clear()
    world.api_delay, world.lost_answers = 0.0, 0
    seams.NVML.wake()
    await world.start_agent()
