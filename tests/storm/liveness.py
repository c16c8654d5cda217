"""Conditions that come true once faults have stopped."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import anyio

from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.model.pod import CORES, MPS, VGPU
from agent.model.resource_claim import device_name
from agent.node.capacity import TAINT
from agent.nvml.port import ComputeMode
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from agent.simulator.kubelet.resource_objects import SLICES
from tests.storm import parts
from tests.storm.acts.claims import spec_of
from tests.storm.holders import OURS
from tests.storm.invariants import Violation
from tests.storm.memory import Memory, measured
from tests.storm.pods import GPU
from tests.storm.world import PARTED, PARTS, World

CALM_SECONDS = 420.0  # quiet times of health rules are 300 s
QUIET_SECONDS, QUIET_WRITES = 300.0, 10
WORDS = {Mode.VGPU: "vgpu", Mode.PGPU: "pgpu", Mode.MPS: "mps", Mode.DRA: "dra"}
# What each offers, and how much of it; what a pod for a whole GPU asks for.
PER_GPU = {Mode.VGPU: (VGPU.core, CORES), Mode.PGPU: (GPU, 1), Mode.MPS: (MPS.core, CORES)}
PROBES = {mode: dict([each]) for mode, each in PER_GPU.items()}
PROBES[Mode.MPS] |= {MPS.memory: 1}
# Than a fresh agent has, and for each endpoint that a fresh one has not: those of modes that were left stay,
# and offer nothing. The two of vGPU have 44 tasks together, and 49 with resizes; those of MPS have 36.
MORE_TASKS, TASKS_OF_ENDPOINT = 20, 25
# The same of memory: 3,600 objects and 730 KiB were the most in ten storms, and in quiet none and 20 KiB.
MORE_THAN_FRESH = Memory(8000, 2 << 20)
GROWN_IN_QUIET = Memory(200, 128 << 10)


async def check_calm(world: World, mode: Mode) -> None:
    """Within bounded time all is as asked for: every healthy GPU in `mode`. Raises Violation."""
    _delete_all_pods(world)
    await _parts_settle(world)
    world.label(WORDS[mode])
    await anyio.sleep(35)
    agent = world.running
    if agent is None:
        raise Violation("no agent runs")
    await anyio.sleep(CALM_SECONDS)
    if any(each["key"] == TAINT for each in world.kubelet.api.taints):
        raise Violation(f"a taint is left: {world.kubelet.api.taints}")
    healthy = [state for state in agent.core.inventory.snapshot.value.gpus if state.healthy]
    states = {state.uuid: state for state in agent.core.inventory.snapshot.value.gpus}
    for slot in world.machine.slots:
        state = states.get(uuid := world.machine.uuid(slot))
        if slot not in world.struck and (state is None or not state.healthy):
            why = f"the agent says: {state.health} at {anyio.current_time()}" if state else "it is unknown"
            raise Violation(f"{uuid} does not come back, though nothing is wrong with it; {why}")
    if mode is Mode.DRA:
        _devices_are_offered(world, [state.uuid for state in healthy])
    else:
        _units_are_offered(world, mode, len(healthy))
    _nothing_of_mps_is_left(world, mode)
    begun, memory = len(world.writes), measured()
    await anyio.sleep(QUIET_SECONDS)
    if (grown := measured().beyond(memory)).exceeds(GROWN_IN_QUIET):
        raise Violation(f"memory grew by {grown} in five quiet minutes")
    if len(world.writes) - begun > QUIET_WRITES:
        raise Violation(f"{len(world.writes) - begun} API writes in five quiet minutes: {world.writes[-3:]}")
    for state in healthy:
        for probe in _probes(state.gpu.index, mode):
            await _runs(world, probe)
    await _nothing_is_left(world)


async def _parts_settle(world: World) -> None:
    if world.shape.mig and (problem := await parts.settled(world, PARTS["parts"], "parts", PARTED)):
        raise Violation(problem)


def _delete_all_pods(world: World) -> None:
    for pod in list(world.pods):
        if pod.key in world.kubelet.api.pods:
            world.kubelet.api.delete(pod)
    world.pods.clear()
    for manifest in list(world.kubelet.api.manifests.values()):
        world.kubelet.api.delete(manifest.spec)


def _units_are_offered(world: World, mode: Mode, healthy: int) -> None:
    resource, each_has = PER_GPU[mode]
    wanted = each_has * healthy
    offered, known = world.kubelet.allocatable.get(resource, 0), world.kubelet.known_devices(resource)
    if not offered == known == wanted:
        raise Violation(
            f"{healthy} GPUs are well, so {wanted} of {resource} should be on offer; node.status says "
            f"{offered}, the kubelet knows {known}"
        )
    if devices := list(_devices(world)):
        raise Violation(f"all GPUs are in mode {mode.value}, and there are devices: {devices[:2]}")


def _devices_are_offered(world: World, healthy: list[str]) -> None:
    """All GPUs as devices without taints, and by no plugin."""
    free = {each["name"] for each in _devices(world) if not each.get("taints")}
    wanted = {device_name(uuid, each) for uuid in healthy for each in (WHOLE_GPUS, SHARES)}
    if free != wanted:
        raise Violation(f"devices without taints are {sorted(free)}, and not {sorted(wanted)}")
    if offered := {
        name: count for name, count in world.kubelet.allocatable.items() if name in OURS and count
    }:
        raise Violation(f"all GPUs are devices of DRA, and plugins offer {offered}")
    agent = world.running
    if agent and agent.door and (kept := agent.door.ledger.held.value):
        raise Violation(f"no pod is left, and the agent keeps claims: {sorted(kept)}")


def _devices(world: World) -> Iterator[Mapping[str, Any]]:
    for item in world.kubelet.api.resources.of(SLICES):
        yield from item["spec"].get("devices", ())


def _nothing_of_mps_is_left(world: World, mode: Mode) -> None:
    """GPUs in other modes have neither daemon nor compute mode of MPS; those in it have both."""
    for slot in world.machine.slots:
        uuid = world.machine.uuid(slot)
        daemons = world.daemons.genuine(world.folder / "run" / "mps" / uuid / "pipe")
        exclusive = world.machine.gpu(slot).compute_mode == ComputeMode.EXCLUSIVE_PROCESS
        if (len(daemons), exclusive) != ((1, True) if mode is Mode.MPS else (0, False)):
            raise Violation(
                f"{uuid} in mode {mode.value} has {len(daemons)} MPS daemons, and "
                f"{'is' if exclusive else 'is not'} in compute mode EXCLUSIVE_PROCESS"
            )


def _probes(gpu: int, mode: Mode) -> Iterator[PodSpec]:
    """Pods that run one after the other where a GPU is offered in a mode."""
    name = f"probe-{gpu}"
    if mode is not Mode.DRA:
        yield PodSpec(name, (ContainerSpec("main", PROBES[mode]),))
        return
    for word, spec in (("whole", spec_of("whole")), ("mps", spec_of("mps", 60, 6))):
        main = ContainerSpec("main", claims=("gpu",))
        yield PodSpec(f"{name}-{word}", (main,), claims=(PodClaim("gpu", template=spec),))


async def _runs(world: World, pod: PodSpec) -> None:
    world.kubelet.create_pod(pod)
    with anyio.move_on_after(60):
        while world.kubelet.pod(pod).phase not in (Phase.RUNNING, Phase.FAILED):
            await anyio.sleep(0.5)
    seen = world.kubelet.pod(pod)
    if seen.phase is not Phase.RUNNING:
        raise Violation(f"a pod that fits is {seen.phase}: {seen.reason} {seen.message}")
    world.kubelet.api.delete(pod)
    await anyio.sleep(15)


async def _nothing_is_left(world: World) -> None:
    """An agent that has been through all this has the tasks and the memory that a fresh one has."""
    before, endpoints, memory = len(asyncio.all_tasks()), _endpoints(world), measured()
    await world.terminate_agent()
    await world.start_agent()
    await anyio.sleep(30)
    after = len(asyncio.all_tasks())
    if before > after + MORE_TASKS + TASKS_OF_ENDPOINT * (endpoints - _endpoints(world)):
        raise Violation(f"the agent had {before} tasks, a fresh one has {after}")
    if (more := memory.beyond(measured())).exceeds(MORE_THAN_FRESH):
        raise Violation(f"the agent had {more} more than a fresh one has")


def _endpoints(world: World) -> int:
    """How many resources the agent keeps registered."""
    names = world.running.core.supervisor.states if world.running else ()
    return sum(name.startswith("endpoint ") for name in names)
