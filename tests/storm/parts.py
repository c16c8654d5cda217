"""Instances of GPUs in MIG mode: none is destroyed that is held or others made; none is half offered."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio

from agent.inventory.prober import FULL_EVERY
from agent.model.modes import Mode
from agent.simulator import mig
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from agent.simulator.mig_calls import MigCalls
from agent.simulator.nvml import SimulatedNvml

if TYPE_CHECKING:
    from agent.inventory.snapshot import GpuState
    from agent.nvml.port import GpuInstance, MigProfile, Partition
    from tests.storm.world import World

PREFIX = "nvidia.com/mig-"
PROBE_SECONDS = 4.0
# Which instances there are is read with every fifth look; what is gone stays listed, as Unhealthy.
GONE_SECONDS = FULL_EVERY * PROBE_SECONDS + 5.0
LEAVING_SECONDS = 2.0
SERVED_SECONDS = 5.0  # by then an agent and a kubelet that have just started serve each other
STARTED_SECONDS = 45.0  # an agent that has just started, NVML or a kubelet that works again
Place = tuple[int, int]  # profile and start
CALM_SECONDS = 400.0  # a step that failed again and again is tried every five minutes


class Parts:
    """Instances of a world, as far as the driver's own table does not say."""

    def __init__(self) -> None:
        self.others: set[str] = set()  # made by hand
        self.strays = 0  # processes of no pod
        self.found: list[str] = []
        # Those of the agent, and of these what others destroyed since it looked last: by UUID and place. Made
        # again there, one has the same UUID, and nothing shows that it is another (docs/mig.md).
        self._own: dict[str, Place] = {}
        self._lost: dict[str, Place] = {}
        self._since: dict[str, float] = {}
        self._well = 0.0

    def went(self, uuid: str) -> None:
        """Somebody destroyed it by hand."""
        self.others.discard(uuid)
        if place := self._own.pop(uuid, None):
            self._lost[uuid] = place

    def came(self, uuid: str, place: Place) -> None:
        """Somebody made it by hand."""
        if self._lost.pop(uuid, None) == place:
            self._own[uuid] = place
        else:
            self._own.pop(uuid, None)
            self.others.add(uuid)

    def made(self, uuid: str, place: Place) -> None:
        """The agent made it."""
        self.others.discard(uuid)
        self._lost.pop(uuid, None)
        self._own[uuid] = place

    def destroyed(self, uuid: str) -> None:
        """The agent destroyed it."""
        self._own.pop(uuid, None)

    def looked(self) -> None:
        """The agent has seen which there are."""
        self._lost.clear()

    def booted(self) -> None:
        """None is left, and the agent's record of an earlier boot counts no more."""
        self.others.clear()
        self._own.clear()
        self._lost.clear()

    def wrong(self, world: "World") -> str | None:
        """The fault, in words; None: there is none."""
        if not world.shape.mig:
            return None
        if self.found:
            return self.found[0]
        now, life, agent = anyio.current_time(), world.kubelet._life, world.running
        if life is None or agent is None or world.current is None or world.nvml_faults or world.lost:
            self._well = now
        if life is None or agent is None or world.current is None:
            self._since.clear()
            return None
        began = max(world.kubelet_began, world.current.began)
        offered = {
            (uuid, resource)
            for resource, healthy in life.devices.tables.healthy.items()
            if resource.startswith(PREFIX)
            for uuid in healthy
        }
        leaving = agent.wings[Mode.MIG]._layouts.leaving  # type: ignore[attr-defined]
        problems: dict[str, float] = {}
        if now - max(self._well, world.nvml_well, began) >= STARTED_SECONDS:
            there = _there(world)
            problems |= {uuid: GONE_SECONDS for uuid, resource in offered if there.get(uuid) != resource}
        if now - began >= SERVED_SECONDS:
            # What the agent has decided is on its lists at once, whatever the driver says.
            problems |= {uuid: LEAVING_SECONDS for uuid, _ in offered if uuid in leaving}
        self._since = {uuid: self._since.get(uuid, now) for uuid in problems}
        for uuid, seconds in problems.items():
            if (lasts := now - self._since[uuid]) > seconds:
                what = "is to be destroyed" if uuid in leaving else "is not there"
                return f"{uuid} has been offered for {lasts:.0f} s, and {what}"
        return None


def _there(world: "World") -> dict[str, str]:
    """The resource of each instance that the driver has."""
    return {
        each.uuid.decode(): PREFIX + each.profile.decode().replace("+", ".")
        for slot in world.machine.slots
        for each in world.machine.gpu(slot).instances
        if each.used
    }


def held(world: "World") -> dict[str, str]:
    """The instances that pods hold by the kubelet's own tables, and by which pod."""
    found: dict[str, str] = {}
    life = world.kubelet._life
    api = world.kubelet.api
    known = (api.pods.values(), api.manifests.values(), life._pods.values() if life else ())
    alive = {pod.uid: pod.spec.name for pods in known for pod in pods if not pod.phase.finished}
    for uid, _, resource, allocation in life.devices.tables.pods.entries() if life else ():
        if uid in alive and resource.startswith(PREFIX):
            found |= dict.fromkeys(allocation.ids, alive[uid])
    return found


def _take_over(world: "World") -> None:
    """Those that are there were made by the agent before the first act."""
    for slot in world.machine.slots:
        for each in world.machine.gpu(slot).instances:
            if each.used:
                world.parts.made(each.uuid.decode(), (each.profile_number, each.start))


def observe(world: "World") -> Callable[[], None]:
    """Look at each instance that the agent makes or destroys; what ends that is returned."""
    make, destroy, read = MigCalls.make_instance, MigCalls.destroy_instance, MigCalls.partition

    def uuids(uuid: str, number: int) -> Iterator[str]:
        for each in world.machine.gpu(uuid).instances:
            if each.used and each.gpu_instance == number:
                yield each.uuid.decode()

    def made(self: SimulatedNvml, uuid: str, profile: "MigProfile", start: int) -> int:
        number = make(self, uuid, profile, start)
        for each in uuids(uuid, number):
            world.parts.made(each, (profile.number, start))
        return number

    def destroyed(self: SimulatedNvml, uuid: str, expected: "GpuInstance", device: str) -> None:
        doomed, holders = list(uuids(uuid, expected.number)), held(world)
        destroy(self, uuid, expected, device)
        for each in doomed:
            if each in holders:
                world.parts.found.append(f"{each} was destroyed, and pod {holders[each]} holds it")
            if each in world.parts.others:
                world.parts.found.append(f"{each} was destroyed, and others had made it")
            world.parts.destroyed(each)

    def looked(self: SimulatedNvml, uuid: str) -> "Partition":
        found = read(self, uuid)
        world.parts.looked()
        return found

    _take_over(world)
    SimulatedNvml.make_instance = made  # type: ignore[method-assign, assignment]
    SimulatedNvml.destroy_instance = destroyed  # type: ignore[method-assign, assignment]
    SimulatedNvml.partition = looked  # type: ignore[method-assign, assignment]

    def end() -> None:
        del SimulatedNvml.make_instance
        del SimulatedNvml.destroy_instance
        del SimulatedNvml.partition

    return end


async def settled(world: "World", layout: tuple[str, ...], word: str, slot: int) -> str | None:
    """Once others have let go of a GPU it gets its layout, and a pod runs on each kind; why not, in words.

    It leaves MIG mode then.
    """
    for uuid in tuple(world.parts.others):
        world.machine.destroy_instance(slot, uuid)
        world.parts.went(uuid)
    world.machine.set_mig(slot, enabled=True)
    world.label(word)
    await anyio.sleep(CALM_SECONDS)
    there = sorted((each.profile.decode(), bool(each.bare)) for each in mig.there(world.machine.gpu(slot)))
    agent = world.running
    states = agent.core.inventory.snapshot.value.by_uuid if agent else {}
    state = states.get(world.machine.uuid(slot))
    # One that is not well is brought to nothing.
    if state is not None and state.healthy and (problem := await _stands(world, state, there, layout, word)):
        return problem
    world.label("disable")
    await anyio.sleep(30)
    world.machine.set_mig(slot, enabled=False)
    return None


async def _stands(
    world: "World", state: "GpuState", there: list[tuple[str, bool]], layout: tuple[str, ...], word: str
) -> str | None:
    if there != sorted((each, False) for each in layout):
        return f"layout {word} asks for {', '.join(layout)}, and the GPU has {there}"
    for profile in sorted(set(layout)):
        resource, count = PREFIX + profile, layout.count(profile)
        alike = [each for each in state.gpu.instances if each.profile == profile]
        sick = sum(bool(state.trouble_of(each.uuid)) for each in alike)
        if (known := world.kubelet.known_devices(resource)) != count - sick:
            return f"there are {count} of {resource}, {sick} of them not well, and the kubelet knows {known}"
        if known and (problem := await _runs(world, f"part-{profile}", resource)):
            return problem
    return None


async def _runs(world: "World", name: str, resource: str) -> str | None:
    pod = PodSpec(name, (ContainerSpec("main", {resource: 1}),))
    world.kubelet.create_pod(pod)
    with anyio.move_on_after(60):
        while world.kubelet.pod(pod).phase not in (Phase.RUNNING, Phase.FAILED):
            await anyio.sleep(0.5)
    seen = world.kubelet.pod(pod)
    if seen.phase is not Phase.RUNNING:
        return f"a pod for {resource} is {seen.phase}: {seen.reason} {seen.message}"
    world.kubelet.api.delete(pod)
    await anyio.sleep(15)
    return None
