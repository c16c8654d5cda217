"""The scheduler extender: what it makes of a cluster, how fast it answers for 10,000 nodes, what it costs."""

import random
from collections.abc import Mapping

import aiohttp
import anyio.to_thread

from agent.model.placement import USUAL, PlacementPolicy
from tests.bench import arrivals
from tests.bench.conditions import Conditions
from tests.bench.large_cluster import extender, pod, populate, post, ready, resident_mib
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.component.extender.api import ClusterApi

SEEDS, NODES_FILLED = 5, 40
CALLS, WARM_UP = 1000, 50


@measurement(
    Figure(
        "allocation_ratio_110",
        "ratio",
        None,
        f"GPUs used of {NODES_FILLED} nodes of 8 when 110 % was asked for, mean of 5 seeds (at least 0.955)",
    ),
    Figure("admission_failures_per_1000", "pods", 0, "of those pods, bound where the chosen GPU has no room"),
)
async def filled(_: Conditions) -> Mapping[str, Taken]:
    """The default policy, memory share = core share, arrivals only."""

    def runs() -> list[arrivals.Filled]:
        return [arrivals.fill(NODES_FILLED, PlacementPolicy.FRAGMENTATION, seed) for seed in range(SEEDS)]

    ends = await anyio.to_thread.run_sync(runs)
    pods = sum(end.pods for end in ends)
    return {
        "allocation_ratio_110": Taken(sum(end.ratio for end in ends) / SEEDS, SEEDS),
        "admission_failures_per_1000": Taken(1000 * sum(end.failures for end in ends) / pods, pods),
    }


@measurement(
    Figure(
        "extender_filter_10000_nodes_p99_ms",
        "ms",
        20,
        "filter by names over HTTP, 10,000 nodes of 8 GPUs, a pod of the usual mix bound after each; "
        "99th percentile",
    ),
    Figure("extender_filter_10000_nodes_p50_ms", "ms", None, "the same; median"),
    Figure("extender_bind_p50_ms", "ms", None, "the bindings in between; median"),
    Figure(
        "extender_resident_memory_10000_nodes_mib",
        "MiB",
        150,
        "RSS after these calls; about 40,000 bound pods, without device IDs in their status",
    ),
)
async def large(conditions: Conditions) -> Mapping[str, Taken]:
    """One replica against an API server in memory; the mix's pods in random order."""
    api = ClusterApi()
    await anyio.to_thread.run_sync(populate, api, random.Random(7))
    draw = random.Random(11)
    filters: list[float] = []
    binds: list[float] = []
    async with api.serving(), extender(conditions, api) as (process, url), aiohttp.ClientSession() as http:
        await ready(http, url)
        for number in range(WARM_UP + CALLS):
            new = pod(f"new-{number}", draw.choices(list(USUAL), list(USUAL.values()))[0])
            api.pods[new["metadata"]["name"]] = new
            body = {"Pod": new, "Nodes": None, "NodeNames": list(api.nodes)}
            answer, seconds = await post(http, f"{url}/scheduler/predicates", body)
            if number >= WARM_UP:
                filters.append(seconds)
            fitting = answer["NodeNames"]
            if not fitting:
                continue
            name = new["metadata"]["name"]
            binding = {"PodName": name, "PodNamespace": "ns", "PodUID": name, "Node": draw.choice(fitting)}
            answer, seconds = await post(http, f"{url}/scheduler/bind", binding)
            if answer["Error"]:
                raise RuntimeError(f"a pod that fits is not bound: {answer['Error']}")
            binds.append(seconds)
        resident = await anyio.to_thread.run_sync(resident_mib, process.pid)
    return {
        "extender_filter_10000_nodes_p99_ms": Taken(1000 * percentile(filters, 0.99), len(filters)),
        "extender_filter_10000_nodes_p50_ms": Taken(1000 * percentile(filters, 0.5), len(filters)),
        "extender_bind_p50_ms": Taken(1000 * percentile(binds, 0.5), len(binds)),
        "extender_resident_memory_10000_nodes_mib": Taken(resident, 1),
    }
