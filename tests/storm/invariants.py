"""What must hold after every step, and what must come true once faults have stopped."""

import anyio

from agent.model.demand import CORES, VGPU
from agent.model.ids import parse
from agent.model.modes import MODE_OF_UNIT, Mode
from agent.node.taint import TAINT
from agent.simulator.kubelet.pods import ContainerSpec, Phase, PodSpec
from tests.storm.world import World


class Violation(AssertionError):
    """An invariant does not hold."""


def held(world: World) -> dict[str, dict[tuple[str, str], set[str]]]:
    """Pod UID -> (container, resource) -> device IDs, of pods that have not ended."""
    life = world.kubelet._life
    if life is None:
        return {}
    ended = {pod.uid for pod in world.kubelet.api.pods.values() if pod.phase.finished}
    present = {pod.uid for pod in world.kubelet.api.pods.values()}
    found: dict[str, dict[tuple[str, str], set[str]]] = {}
    for uid, container, resource, allocation in life.devices.tables.pods.entries():
        if uid in present and uid not in ended:
            found.setdefault(uid, {})[container, resource] = set(allocation.ids)
    return found


def check(world: World) -> None:
    """After every step. Raises Violation."""
    _units_have_one_holder(world)
    for gpu, modes in world.modes_of_lists().items():
        if len(modes) > 1:
            raise Violation(f"{gpu} stands on lists of {sorted(mode.value for mode in modes)}")
    if world.kubelet.panics:
        raise Violation(f"the kubelet panicked: {world.kubelet.panics}")
    if world.current is not None and world.current.failure is not None:
        raise Violation(f"the agent ended by itself: {world.current.failure!r}")


def _units_have_one_holder(world: World) -> None:
    modes: dict[str, tuple[Mode, str]] = {}
    owner: dict[str, str] = {}
    for uid, parts in held(world).items():
        gpus: dict[str, dict[str, set[str]]] = {}
        for (container, resource), ids in parts.items():
            for each in sorted(ids):
                if owner.setdefault(each, uid) != uid:
                    raise Violation(f"{each} is held by pods {owner[each]} and {uid}")
                device = parse(each)
                mode = MODE_OF_UNIT[device.unit]
                before, holder = modes.setdefault(device.gpu, (mode, uid))
                if before is not mode:
                    raise Violation(
                        f"{device.gpu} is held as {before.value} by {holder}, as {mode.value} by {uid}"
                    )
                gpus.setdefault(container, {}).setdefault(resource, set()).add(device.gpu)
        for container, found in gpus.items():
            core, memory = found.get(VGPU.core), found.get(VGPU.memory)
            if core and memory and core != memory:
                raise Violation(f"pod {uid} container {container}: cores on {core}, memory on {memory}")


CALM_SECONDS = 420.0  # quiet times of health rules are 300 s
PROBE = {VGPU.core: CORES}  # a whole GPU


async def check_calm(world: World) -> None:
    """Once faults have stopped: bounded time, then all is as asked for. Raises Violation."""
    for pod in list(world.pods):
        if pod.key in world.kubelet.api.pods:
            world.kubelet.api.delete(pod)
    world.pods.clear()
    world.label("vgpu")
    agent = world.running
    if agent is None:
        await anyio.sleep(5)
    await anyio.sleep(30)
    agent = world.running
    if agent is None:
        raise Violation("no agent runs")
    await anyio.sleep(CALM_SECONDS)
    if any(each["key"] == TAINT for each in world.kubelet.api.taints):
        raise Violation(f"a taint is left: {world.kubelet.api.taints}")
    snapshot = agent.inventory.snapshot.value
    healthy = [state for state in snapshot.gpus if state.healthy]
    wanted = CORES * len(healthy)
    offered, known = world.kubelet.allocatable.get(VGPU.core, 0), world.kubelet.healthy(VGPU.core)
    if not offered == known == wanted:
        raise Violation(
            f"{len(healthy)} GPUs are well, so {wanted} cores should be on offer; node.status says "
            f"{offered}, the kubelet knows {known}"
        )
    begun = len(world.writes)
    await anyio.sleep(300)
    if len(world.writes) - begun > 10:
        raise Violation(f"{len(world.writes) - begun} API writes in five quiet minutes: {world.writes[-3:]}")
    for state in healthy:
        pod = PodSpec(f"probe-{state.gpu.index}", (ContainerSpec("main", PROBE),))
        world.kubelet.create_pod(pod)
        with anyio.move_on_after(60):
            while world.kubelet.pod(pod).phase not in (Phase.RUNNING, Phase.FAILED):
                await anyio.sleep(0.5)
        seen = world.kubelet.pod(pod)
        if seen.phase is not Phase.RUNNING:
            raise Violation(f"a pod that fits is {seen.phase}: {seen.reason} {seen.message}")
        world.kubelet.api.delete(pod)
        await anyio.sleep(15)
