"""How soon the kubelet knows of a sick GPU, and how long it waits for a choice of GPUs."""

import time
from collections.abc import Mapping

import anyio.to_thread

from agent.simulator.machine import SimulatedMachine
from tests.bench.client import KubeletClient, kubelet_client, timed
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile

XIDS = 160
CALLS = 400
WARM_UP = 20
UNCORRECTABLE = 48
STREAM_SECONDS = 120.0
# GPUs return at the next probe, so that each can be struck many times.
FORGIVING = {"health.probeSeconds": 0.2, "health.quiet.needsReset": 0, "health.kernelLog": None}


@measurement(
    Figure("xid_to_unhealthy_p99_ms", "ms", 10, "Xid at the NVML library until a C-core client has the list"),
)
async def xid_to_unhealthy(conditions: Conditions) -> Mapping[str, Taken]:
    """GPUs in turn; each is struck again when it is on the list as Healthy."""
    async with conditions.serving(FORGIVING) as node:

        def strike() -> list[float]:
            with kubelet_client(node.socket()) as client:
                return _strike(client, node.machine)

        taken = await anyio.to_thread.run_sync(strike)
    return {"xid_to_unhealthy_p99_ms": Taken(percentile(taken, 0.99), len(taken))}


def _strike(client: KubeletClient, machine: SimulatedMachine) -> list[float]:
    lists = client.lists(STREAM_SECONDS)
    newest = next(lists)
    taken: list[float] = []
    while len(taken) < XIDS:
        uuid = machine.uuid(len(taken) % len(machine.uuids))
        while not newest[uuid]:
            newest = next(lists)
        time.sleep(0.01)  # a list under way is not taken for the answer
        started = time.perf_counter()
        machine.xid(uuid, UNCORRECTABLE)
        while newest[uuid]:
            newest = next(lists)
        taken.append((time.perf_counter() - started) * 1000)
    return taken


@measurement(
    Figure("preferred_4_of_16_p99_ms", "ms", 5, "GetPreferredAllocation, 4 of 16 free GPUs, NVSwitch"),
    Figure("preferred_3_of_16_p99_ms", "ms", 5, "the same, 3 of 16"),
)
async def preferred(conditions: Conditions) -> Mapping[str, Taken]:
    """From a C-core client, one call after the other."""
    async with conditions.serving(profile="hgx-16") as node:
        gpus = node.machine.uuids

        def ask(size: int) -> list[float]:
            with kubelet_client(node.socket()) as client:
                chosen = client.prefer(gpus, size)
                if len(set(chosen)) != size or not set(chosen) <= set(gpus):
                    raise RuntimeError(f"{size} of {len(gpus)} GPUs were asked for, the answer is {chosen}")
                return timed(lambda: client.prefer(gpus, size), CALLS, WARM_UP)

        taken = {size: await anyio.to_thread.run_sync(ask, size) for size in (4, 3)}
    return {
        f"preferred_{size}_of_16_p99_ms": Taken(percentile(values, 0.99), len(values))
        for size, values in taken.items()
    }
