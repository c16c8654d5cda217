"""Faults of GPUs and the driver."""

import random

import anyio

from tests.storm import seams
from tests.storm.cheaper import NvmlFaults
from tests.storm.world import World

XIDS = (13, 31, 43, 48, 63, 74, 79, 94, 95, 119, 999)
# Faults of a program, which say nothing of its GPU (NVIDIA's "Xid Errors", table of causes).
OF_PROGRAMS = (13, 31, 43)


async def xid(world: World, rng: random.Random) -> str:
    """An Xid on a GPU."""
    if not (slots := world.machine.slots):
        return "no GPU for an xid"
    slot, number = rng.choice(slots), rng.choice(XIDS)
    world.machine.xid(slot, number)
    world.hurt[slot] = anyio.current_time()
    if number not in OF_PROGRAMS:
        world.struck.add(slot)
    seams.NVML.wake()
    return f"xid {number} on {slot}"


async def fall_off(world: World, rng: random.Random) -> str:
    """A GPU falls off the bus, or comes back."""
    if not (slots := world.machine.slots):
        return "no GPU to fall off"
    slot = rng.choice(slots)
    world.hurt[slot] = anyio.current_time()
    if slot in world.lost:
        world.lost.discard(slot)
        world.machine.restore(slot)
        return f"restore {slot}"
    world.lost.add(slot)
    world.struck.add(slot)  # by Xid 79, which ends with a reset that the agent has seen, or by hand
    world.machine.fall_off_bus(slot)
    seams.NVML.wake()
    return f"lose {slot}"


async def plug(world: World, rng: random.Random) -> str:
    """A third GPU is added to the running machine, or taken out of it."""
    del rng
    world.hurt[world.spare] = anyio.current_time()
    if world.spare in world.machine.slots:
        world.machine.hide(world.spare)
        world.lost.discard(world.spare)
        seams.NVML.wake()
        return "unplug the third GPU"
    world.machine.add(world.spare)
    seams.NVML.wake()
    return "plug a third GPU in"


async def nvml_fault(world: World, rng: random.Random) -> str:
    """NVML calls fail or hang; or all of them work again."""
    if world.nvml_faults:
        world.clear_nvml_faults()
        return "nvml well again"
    world.nvml_faults += 1
    NvmlFaults.standing = True
    slot = rng.choice((*world.machine.slots, None))
    call = rng.choice(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByUUID", "nvmlEventSetWait", None))
    if rng.random() < 0.5:
        world.machine.hang(call, slot if call else None)
        return f"nvml hangs in {call} of {slot}"
    world.machine.fail(call, 999, slot if call else None)
    return f"nvml fails in {call} of {slot}"
