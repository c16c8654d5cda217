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
    Figure("idle_cpu_percent", "%", 0.5, f"of one core, over {CPU_SECONDS:g} s, sampling every second"),
    Figure("sampler_cpu_percent", "%", 0.5, "what of it an agent saves that never samples"),
)
async def idle_cpu(conditions: Conditions) -> Mapping[str, Taken]:
    """Processor time of two agents that are registered and left alone, over the C double."""
    async with (
        conditions.serving() as sampling,
        conditions.serving({"sampling.intervalSeconds": 60.0}) as other,
    ):
        agents = (sampling.agent, other.agent)
        await anyio.sleep(SETTLE_SECONDS)
        began, before = anyio.current_time(), [each.cpu_seconds() for each in agents]
        await anyio.sleep(CPU_SECONDS)
        passed = anyio.current_time() - began
        used, unsampled = (
            (each.cpu_seconds() - then) / passed for each, then in zip(agents, before, strict=True)
        )
    return {
        "idle_cpu_percent": Taken(100 * used, 1),
        "sampler_cpu_percent": Taken(100 * max(0.0, used - unsampled), 1),
    }
