"""Faults of the kubelet and its files."""

import random
from dataclasses import replace
from pathlib import Path

import anyio

from agent.nvml.port import ComputeMode
from agent.simulator.kubelet.checkpoint_file import FILE_NAME
from agent.simulator.kubelet.plugin import PluginClient
from tests.storm import seams
from tests.storm.world import World

# That a restarted kubelet hears of no pod: longer than `agent.kubelet` and `agent.pairing` wait for anything.
BLIND_SECONDS = (40.0, 65.0, 125.0)
ANSWER_SECONDS = (0.0, 0.1, 0.9, 3.0, 8.0)  # of a List: some within the agent's patience, some beyond
READ_SECONDS = (0.0, 0.0, 0.2, 1.5)  # of the checkpoint


async def restart(world: World, rng: random.Random) -> str:
    """The kubelet's process ends, and comes back beside what happens meanwhile."""
    down = rng.choice((0.0, 0.5, 5.0, 12.0, 40.0))
    if not world.kubelet_up.is_set():
        return "the kubelet is down already"
    mend_checkpoint(world)  # its administrator's work: with a torn one it would not start
    await world.restart_kubelet(down)
    return f"restart the kubelet, {down:g} s down"


async def reboot(world: World, rng: random.Random) -> str:
    """The machine restarts: all processes end at once, /run is empty, containers start again."""
    if not world.kubelet_up.is_set():
        return "no reboot while the kubelet is down"
    mend_checkpoint(world)
    await world.kill_agent()
    for daemon in world.daemons.daemons:
        world.daemons.end(daemon.process.pid)
    for slot in range(world.spare + 1):  # the driver is loaded again
        world.machine.gpu(slot).compute_mode = ComputeMode.DEFAULT
    await world.restart_kubelet(rng.choice((0.0, 30.0)), reboot=True)
    await anyio.sleep(rng.choice((0.0, 2.0, 45.0)))
    await world.start_agent()
    return "reboot"


async def slow(world: World, rng: random.Random) -> str:
    """Each container's admission takes longer, or no longer."""
    world.kubelet_delay[0] = rng.choice((0.0, 0.0, 0.05, 1.0, 6.0))
    return f"the kubelet takes {world.kubelet_delay[0]:g} s for a container"


async def forget(world: World, rng: random.Random) -> str:
    """The kubelet forgets that units are held, and offers them."""
    life = world.kubelet._life
    if life is None or not (resources := sorted(life.devices.tables.allocated)):
        return "nothing to forget"
    resource = rng.choice(resources)
    ids = sorted(life.devices.tables.allocated[resource])
    for each in rng.sample(ids, min(len(ids), 10)):
        life.devices.tables.allocated[resource].discard(each)
    return f"the kubelet offers {min(len(ids), 10)} units of {resource} that are held"


async def amnesia(world: World, rng: random.Random) -> str:
    """The kubelet loses its checkpoint while containers run, and starts as one of a new node.

    It goes on without one that is gone or torn (`cm/devicemanager/manager.go`, `Start`).
    """
    if not world.kubelet_up.is_set():
        return "the kubelet is down already"
    world.checkpoint = None
    await world.restart_kubelet(rng.choice((0.0, 5.0)), meanwhile=lambda: _checkpoint(world).unlink(True))
    return "the kubelet loses its checkpoint"


async def late_pods(world: World, rng: random.Random) -> str:
    """The kubelet restarts, and lists no pods for a while."""
    if not world.kubelet_up.is_set():
        return "the kubelet is down already"
    mend_checkpoint(world)
    machine, seconds = world.kubelet._machine, rng.choice((5.0, 15.0, 25.0))
    usual = machine.timings
    machine.timings = replace(usual, first_pods=seconds)

    def again() -> None:
        machine.timings = usual

    await world.restart_kubelet(rng.choice((0.0, 5.0)), after=again)
    return f"restart the kubelet, which lists no pods for {seconds:g} s"


async def blind(world: World, rng: random.Random) -> str:
    """As `late_pods`, for longer than the agent waits for anything: its way to the API server is cut."""
    if not world.kubelet_up.is_set():
        return "the kubelet is down already"
    mend_checkpoint(world)
    machine, seconds = world.kubelet._machine, rng.choice(BLIND_SECONDS)
    usual = machine.timings
    machine.timings = replace(usual, first_pods=seconds)

    def again() -> None:
        machine.timings = usual

    await world.restart_kubelet(rng.choice((0.0, 5.0)), after=again)
    return f"restart the kubelet, which is blind for {seconds:g} s"


async def slow_records(world: World, rng: random.Random) -> str:
    """Answers about who holds what take time, and are older than the moment at which they arrive."""
    del world
    slow = (rng.choice(ANSWER_SECONDS), rng.choice(ANSWER_SECONDS))
    seams.KUBELET.answering, seams.KUBELET.reading = rng.choice(((0.0, 0.0), slow)), rng.choice(READ_SECONDS)
    before, after = seams.KUBELET.answering
    return (
        f"PodResources take {before:g} s to look and {after:g} s to answer, the checkpoint "
        f"{seams.KUBELET.reading:g} s to be read"
    )


async def records(world: World, rng: random.Random) -> str:
    """PodResources refuses, is late, or answers again."""
    seams.KUBELET.records = rng.choice(("", "", "refuses", "late"))
    return f"PodResources {seams.KUBELET.records or 'answers'}"


async def drop_stream(world: World, rng: random.Random) -> str:
    """The kubelet loses a plugin's stream and lives on: it asks for no other by itself.

    Its plugin manager registers a socket again only where the file is new
    (`pkg/kubelet/pluginmanager/reconciler/reconciler.go`, `reconcile`).
    """
    life = world.kubelet._life
    endpoints = life.devices.tables.endpoints if life else {}
    connected = [
        name
        for name, each in sorted(endpoints.items())
        if isinstance(each.calls, PluginClient) and each.stopped_at is None
    ]
    if not connected:
        return "no stream to drop"
    resource = rng.choice(connected)
    calls = endpoints[resource].calls
    assert isinstance(calls, PluginClient)
    calls.close()
    world.dropped[resource] = anyio.current_time()
    return f"the kubelet loses the stream of {resource}"


def _checkpoint(world: World) -> Path:
    return world.kubelet.root / "device-plugins" / FILE_NAME


async def tear_checkpoint(world: World, rng: random.Random) -> str:
    """The kubelet's checkpoint cannot be read, or can again."""
    if world.checkpoint is not None:
        mend_checkpoint(world)
        return "mend the checkpoint"
    file = _checkpoint(world)
    if not file.exists() or not world.kubelet_up.is_set():
        return "no checkpoint to tear"
    data = file.read_bytes()
    torn = rng.choice((b"", data[: len(data) // 2], b"{}", b"[]", b"\xff\xfe"))
    world.checkpoint = (data, torn)
    file.write_bytes(torn)
    return "tear the checkpoint"


def mend_checkpoint(world: World) -> None:
    """Put back what stood there, unless the kubelet has written again."""
    file = _checkpoint(world)
    if world.checkpoint is not None and file.read_bytes() == world.checkpoint[1]:
        file.write_bytes(world.checkpoint[0])
    world.checkpoint = None
