"""From the start of the process to serving."""

import statistics
import time
from collections.abc import Mapping

import anyio
import anyio.to_thread

from tests.bench.client import wait_for_info
from tests.bench.conditions import RESOURCES, Conditions, Node
from tests.bench.registry import Figure, Taken, measurement

STARTS = 10
DEADLINE = 20.0


@measurement(
    Figure(
        "start_to_sockets_ready_ms",
        "ms",
        600,
        "start of the process until every resource's socket answers GetInfo; median",
    )
)
async def start_to_sockets_ready(conditions: Conditions) -> Mapping[str, Taken]:
    """Start the agent again and again on one node."""
    values = []
    async with conditions.node() as node:
        for _ in range(STARTS):
            values.append(await _one_start(node))
            await node.agent.stop()
    return {"start_to_sockets_ready_ms": Taken(statistics.median(values), len(values))}


async def _one_start(node: Node) -> float:
    def start_and_ask() -> float:
        started = time.perf_counter()
        node.agent.process.start(node.agent.settings)
        for resource in RESOURCES:
            told = wait_for_info(node.socket(resource), DEADLINE)
            if told != resource:
                raise RuntimeError(f"the socket of {resource} calls itself {told}")
        return (time.perf_counter() - started) * 1000

    return await anyio.to_thread.run_sync(start_and_ask)
