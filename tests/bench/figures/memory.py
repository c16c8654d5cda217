"""The agent's cost while nothing happens."""

from collections.abc import Mapping

import anyio
import anyio.to_thread

from tests.bench.client import kubelet_client, timed
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement

SETTLE_SECONDS = 5.0
CPU_SECONDS = 30.0
CALLS = 500
SCRAPES = 20


@measurement(
    Figure("resident_memory_mib", "MiB", 55, f"RSS by smaps_rollup after {CALLS} Allocate and some scrapes"),
    Figure("resident_memory_peak_mib", "MiB", 70, "the most RSS from the start until then"),
)
async def resident_memory(conditions: Conditions) -> Mapping[str, Taken]:
    """Memory after work, for what is only there before the first call would flatter."""
    async with conditions.serving() as node:
        gpu = node.machine.uuids[0]

        def work() -> None:
            with kubelet_client(node.socket()) as client:
                timed(lambda: client.allocate([gpu]), CALLS, 0)

        await anyio.to_thread.run_sync(work)
        for _ in range(SCRAPES):
            await node.agent.scrape()
        await anyio.sleep(SETTLE_SECONDS)
        return {
            "resident_memory_mib": Taken(node.agent.resident_mib(), 1),
            "resident_memory_peak_mib": Taken(node.agent.peak_mib(), 1),
        }


@measurement(
    Figure("idle_cpu_percent", "%", 0.5, f"of one core, over {CPU_SECONDS:g} s, sampling every second")
)
async def idle_cpu(conditions: Conditions) -> Mapping[str, Taken]:
    """Processor time of an agent that is registered and left alone."""
    async with conditions.serving() as node:
        await anyio.sleep(SETTLE_SECONDS)
        began, before = anyio.current_time(), node.agent.cpu_seconds()
        await anyio.sleep(CPU_SECONDS)
        used, passed = node.agent.cpu_seconds() - before, anyio.current_time() - began
    return {"idle_cpu_percent": Taken(100 * used / passed, 1)}
