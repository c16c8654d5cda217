"""Figures on a real kubelet; they start the test cluster."""

import statistics
import time
from collections.abc import Mapping

import anyio
import anyio.to_thread

from tests.bench.agent import BenchAgent
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement
from tests.cluster.agent_process import AgentProcess
from tests.cluster.build import build_parts
from tests.cluster.real_rig import real_rig
from tests.cluster.rig import Cluster

STARTS = 5


@measurement(
    Figure(
        "start_to_registered_real_kubelet_ms",
        "ms",
        None,
        "start of the process until a real kubelet listens, which looks once a second; median",
    ),
    cluster=True,
)
async def start_to_registered(conditions: Conditions) -> Mapping[str, Taken]:
    """Start the agent again and again beside one kubelet."""
    cluster = await anyio.to_thread.run_sync(lambda: Cluster(build_parts(print)))
    try:
        await anyio.to_thread.run_sync(cluster.up)
        async with real_rig(cluster) as rig:
            folder = rig.agent.log.parent
            environment = conditions.environment(folder / "machine")
            process = AgentProcess(folder, environment, cluster.adopt, interpreter=conditions.interpreter)
            agent = BenchAgent(process, rig._settings())
            values = []
            try:
                for _ in range(STARTS):
                    started = time.perf_counter()
                    await agent.start()
                    await agent.ready()
                    values.append((time.perf_counter() - started) * 1000)
                    await agent.stop()
            finally:
                with anyio.CancelScope(shield=True):
                    await agent.kill()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cluster.down)
    return {"start_to_registered_real_kubelet_ms": Taken(statistics.median(values), len(values))}
