"""Pods a second through the real kube-scheduler, API server and extender, on a thousand made-up nodes."""

import os
import random
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio.to_thread

from agent.model.placement import USUAL
from agent.model.pod import CORES
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement
from tests.cluster import extender_process, made_up
from tests.cluster.build import build_parts
from tests.cluster.extender_process import Replica, free_port
from tests.cluster.waiting import NotYet, eventually

NODES, PODS = 1000, 600
QUERIES_PER_SECOND = 5000.0
WRITERS = 8
FIRST, LAST = 0.1, 0.9  # parts of the pods between which the time is taken
BOUND = re.compile(rb'^gpu_agent_extender_requests_total\{result="ok",verb="bind"\} (\S+)$', re.MULTILINE)


@measurement(
    Figure(
        "extender_pods_per_second_1000_nodes",
        "1/s",
        None,
        f"pods of up to 4 GPUs of the usual mix bound a second, {NODES} made-up nodes of 4 GPUs, real "
        "kube-scheduler with its client's limits raised, real API server, all on this machine; needs root",
    )
)
async def bound(conditions: Conditions) -> Mapping[str, Taken]:
    """All pods wait when kube-scheduler starts."""
    rate = await anyio.to_thread.run_sync(_rate, conditions)
    return {"extender_pods_per_second_1000_nodes": Taken(rate, PODS)}


def _rate(conditions: Conditions) -> float:
    if os.geteuid() != 0:
        raise RuntimeError("the test cluster needs root (namespaces, mounts, cgroups)")
    parts, port = build_parts(lambda _: None), free_port()
    draw = random.Random(13)
    mix = {size: weight for size, weight in USUAL.items() if size <= made_up.GPUS * CORES}
    sizes = draw.choices(list(mix), list(mix.values()), k=PODS)
    with (
        tempfile.TemporaryDirectory(prefix="gnb-") as folder,
        extender_process.directed(parts, port, QUERIES_PER_SECOND) as cluster,
    ):
        replica = Replica(cluster, port, Path(folder) / "extender.log", conditions.interpreter)
        cluster.stop("sched")
        _all(lambda number: made_up.node(cluster, f"made-up-{number:04d}"), range(NODES))
        _all(lambda number: made_up.pod(cluster, f"pod-{number}", sizes[number]), range(PODS))
        replica.start()
        try:
            cluster.start("sched")
            began = _reached(replica, round(FIRST * PODS))
            ended = _reached(replica, round(LAST * PODS))
        finally:
            replica.end(signal.SIGKILL)
    return (ended[1] - began[1]) / (ended[0] - began[0])


def _all(act: Callable[[int], None], numbers: Iterable[int]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(act, number) for number in numbers]:
            done.result()


def _reached(replica: Replica, count: int) -> tuple[float, float]:
    """When so many pods were bound, and how many they were by then."""

    def look() -> tuple[float, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{replica.plain}/metrics", timeout=5) as page:
            found = BOUND.search(page.read())
        bound = float(found[1]) if found else 0.0
        if bound < count:
            raise NotYet(f"{bound:g} pods are bound")
        return time.monotonic(), bound

    return eventually(look, timeout=300, what=f"{count} pods are bound", interval=0.25)
