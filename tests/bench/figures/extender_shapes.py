"""Pods of shapes that the extender has not seen: plain ones, and the worst that a search for them finds."""

import random
from collections.abc import Mapping, Sequence

import aiohttp
import anyio.to_thread

from agent.extender.fleet import BoundPod, Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import pod_demand
from agent.model.pod import CORES, VGPU, Container
from tests.bench import arrivals
from tests.bench.conditions import Conditions
from tests.bench.large_cluster import GPUS, extender, pod, populate, post, ready
from tests.bench.registry import Figure, Taken, measurement
from tests.component.extender.api import ClusterApi, Object
from tests.pods import a_pod

SHAPES, WORST = 400, 5  # shapes that are tried, and how many of the worst are sent
SAMPLE = 12  # nodes on which a shape's work is measured
CONTAINERS = 20
NEW_SIZES = (3, 7, 13, 19, 29, 41, 53, 67, 79, 97)  # hundredths that the usual mix has not
Share = tuple[int, int]  # cores and blocks of memory


@measurement(
    Figure(
        "extender_new_shape_10000_nodes_ms",
        "ms",
        60,
        f"filter over HTTP for a share of a new size, 10,000 nodes; the slowest of {len(NEW_SIZES)}",
    ),
    Figure(
        "extender_worst_pod_ms",
        "ms",
        100,
        f"filter or score over HTTP, 10,000 nodes, 9 x 60 cores and the {WORST} pods of up to {CONTAINERS} "
        f"containers that take the most work of {SHAPES} random ones; the slowest call",
    ),
)
async def shapes(conditions: Conditions) -> Mapping[str, Taken]:
    """One replica against an API server in memory."""
    api = ClusterApi()
    await anyio.to_thread.run_sync(populate, api, random.Random(7))
    names = list(api.nodes)
    worst = await anyio.to_thread.run_sync(_worst_shapes, random.Random(23))
    new: list[float] = []
    hard: list[float] = []
    async with api.serving(), extender(conditions, api) as (_, url), aiohttp.ClientSession() as http:
        await ready(http, url)
        # The first call works out what each node has free.
        await post(http, f"{url}/scheduler/predicates", {"Pod": pod("first", 50), "NodeNames": names})
        for size in NEW_SIZES:
            body = {"Pod": pod(f"new-{size}", size), "NodeNames": names}
            new.append((await post(http, f"{url}/scheduler/predicates", body))[1])
        for number, shape in enumerate([*worst, [(60, 16)] * 9]):
            body = {"Pod": _pod_of(f"hard-{number}", shape), "NodeNames": names}
            hard += [
                (await post(http, f"{url}/scheduler/{verb}", body))[1]
                for verb in ("predicates", "priorities")
            ]
    return {
        "extender_new_shape_10000_nodes_ms": Taken(1000 * max(new), len(new)),
        "extender_worst_pod_ms": Taken(1000 * max(hard), len(hard)),
    }


def _pod_of(name: str, shape: Sequence[Share]) -> Object:
    made = pod(name, 1)
    made["spec"]["containers"] = [
        {"name": f"c{n}", "resources": {"limits": {VGPU.core: str(cores), VGPU.memory: str(blocks)}}}
        for n, (cores, blocks) in enumerate(shape)
    ]
    return made


def _worst_shapes(draw: random.Random) -> list[Sequence[Share]]:
    """Of random pods those whose search takes the most steps on a sample of nodes that are partly full."""
    fleet = _sample(draw)
    found: list[tuple[int, list[Share]]] = []
    for _ in range(SHAPES):
        smallest = draw.randint(1, 50)
        largest = draw.randint(smallest, 70)
        blocks = draw.choice([16, 60, 150])
        shape = [
            (draw.randint(smallest, largest), draw.randint(1, blocks))
            for _ in range(draw.randint(2, CONTAINERS))
        ]
        containers = (Container(f"c{n}", {VGPU.core: c, VGPU.memory: b}) for n, (c, b) in enumerate(shape))
        demand = pod_demand(a_pod("ns", "p", tuple(containers)))
        work = SearchWork()
        for name in fleet.nodes:
            fleet.verdict(name, demand, work)
        found.append((work.steps, shape))
    found.sort(key=lambda each: each[0], reverse=True)
    return [shape for _, shape in found[:WORST]]


def _sample(draw: random.Random) -> Fleet:
    fleet = arrivals.fleet_of(SAMPLE, GPUS)
    for node in list(fleet.nodes):
        for gpu in range(GPUS):
            size = draw.randint(1, CORES // 2)
            claim = PodClaim(arrivals.demand(size), chosen=((gpu,),))
            fleet.set_pod(BoundPod(f"{node}-{gpu}", node, claim))
    return fleet
