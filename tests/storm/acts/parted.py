"""Acts on instances of GPUs in MIG mode: layouts, other people's hands, resets, refusals of the driver."""

import random

import anyio

from agent.nvml.port import NvmlCode
from agent.simulator.state import InstanceState, ProcessKind
from tests.storm import seams
from tests.storm.acts.gpus import OF_PROGRAMS
from tests.storm.cheaper import NvmlFaults
from tests.storm.world import PARTED, World

PROFILES = ("1g.2gb", "1g.2gb", "1g.3gb", "2g.3gb", "3g.6gb", "4g.6gb")
LABELS = ("parts", "halves", "as-they-are", "parts", "halves", "vgpu", "disable")
FAILING = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
)
CODES = (NvmlCode.INSUFFICIENT_RESOURCES, NvmlCode.IN_USE, NvmlCode.NO_PERMISSION, NvmlCode.UNKNOWN)
STRAY = 900_000  # process IDs that nobody else has


def instances(world: World) -> list[InstanceState]:
    """Those that containers could have."""
    return [each for each in world.machine.gpu(PARTED).instances if each.used]


async def label(world: World, rng: random.Random) -> str:
    """Another layout, or another mode."""
    word = rng.choice(LABELS)
    world.label(word)
    return f"label {word}"


async def make(world: World, rng: random.Random) -> str:
    """Somebody makes an instance by hand."""
    profile = rng.choice(PROFILES)
    try:
        uuid = world.machine.make_instance(PARTED, profile)
    except ValueError as error:
        return f"others make no {profile}: {error}"
    one = next(each for each in instances(world) if each.uuid.decode() == uuid)
    world.parts.came(uuid, (one.profile_number, one.start))
    return f"others make {profile} {uuid[-2:]}"


async def destroy(world: World, rng: random.Random) -> str:
    """Somebody destroys an instance by hand; a pod that holds it may have no process on it."""
    if not (there := instances(world)):
        return "others destroy nothing"
    one = rng.choice(there)
    uuid = one.uuid.decode()
    world.machine.destroy_instance(PARTED, uuid)
    world.parts.went(uuid)
    return f"others destroy {uuid[-2:]}"


async def reset(world: World, rng: random.Random) -> str:
    """Somebody resets the GPU: all of its instances go, MIG mode stays; or leaves MIG mode for a while."""
    for each in instances(world):
        world.parts.went(each.uuid.decode())
    away = rng.choice((False, False, True))
    world.machine.set_mig(PARTED, enabled=not away)
    if away:
        await anyio.sleep(rng.choice((0.0, 5.0, 20.0)))
        world.machine.set_mig(PARTED, enabled=True)
    return "leave MIG mode and come back" if away else "reset the instances"


async def refuse(world: World, rng: random.Random) -> str:
    """The driver refuses to make or to destroy, until all calls work again."""
    if world.nvml_faults:
        world.clear_nvml_faults()
        return "nvml well again"
    world.nvml_faults += 1
    NvmlFaults.standing = True
    call, code = rng.choice(FAILING), rng.choice(CODES)
    world.machine.fail(call, int(code), PARTED)
    return f"nvml answers {code.name} in {call}"


async def stray(world: World, rng: random.Random) -> str:
    """A process of no pod opens an instance, or ends."""
    if world.parts.strays:
        world.parts.strays -= 1
        world.machine.processes.stop(STRAY)
        return "the stray process ends"
    if not (there := instances(world)):
        return "no instance for a stray process"
    one = rng.choice(there)
    world.parts.strays += 1
    world.machine.processes.start(PARTED, STRAY, ProcessKind.COMPUTE, gpu_instance=one.gpu_instance)
    return f"a stray process on {one.uuid.decode()[-2:]}"


async def xid(world: World, rng: random.Random) -> str:
    """The driver reports an Xid of one instance."""
    if not (there := instances(world)):
        return "no instance for an xid"
    one, number = rng.choice(there), rng.choice((13, 43, 94, 95))
    world.machine.xid(PARTED, number, one.uuid.decode())
    world.hurt[PARTED] = anyio.current_time()
    if number not in OF_PROGRAMS:
        world.struck.add(PARTED)  # the GPU's own, where the agent does not know the instance yet
    seams.NVML.wake()
    return f"xid {number} on {one.uuid.decode()[-2:]}"
