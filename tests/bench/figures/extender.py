"""The scheduler extender: what it makes of a cluster, how fast it answers for 10,000 nodes, what it costs."""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import yaml

from agent.model.demand import CORES, VGPU
from agent.model.fragmentation import USUAL
from agent.model.node_inventory import INVENTORY, encode
from agent.model.placement import HINT, Policy
from tests.bench import arrivals
from tests.bench.conditions import ROOT, Conditions, short_folder
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.component.extender.api import ClusterApi, Object

SEEDS, NODES_FILLED = 5, 40
NODES, GPUS, CALLS, WARM_UP = 10_000, 8, 1000, 50
READY_SECONDS = 120.0


@measurement(
    Figure(
        "allocation_ratio_110",
        "ratio",
        None,
        f"GPUs sold of {NODES_FILLED} nodes of 8 when 110 % was asked for, mean of 5 seeds (at least 0.955)",
    ),
    Figure("admission_failures_per_1000", "pods", 0, "of those pods, bound where the chosen GPU has no room"),
)
async def filled(_: Conditions) -> Mapping[str, Taken]:
    """The default policy, memory share = core share, arrivals only."""

    def runs() -> list[arrivals.Filled]:
        return [arrivals.fill(NODES_FILLED, Policy.FRAGMENTATION, seed) for seed in range(SEEDS)]

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
        50,
        "filter by names over HTTP, 10,000 nodes of 8 GPUs, a pod of the usual mix bound after each; "
        "99th percentile",
    ),
    Figure("extender_filter_10000_nodes_p50_ms", "ms", None, "the same; median"),
    Figure("extender_bind_p50_ms", "ms", None, "the bindings in between; median"),
    Figure(
        "extender_resident_memory_10000_nodes_mib",
        "MiB",
        300,
        "RSS after these calls; about 40,000 bound pods, without device IDs in their status",
    ),
)
async def large(conditions: Conditions) -> Mapping[str, Taken]:
    """One replica against an API server in memory; the mix's pods in random order."""
    api = ClusterApi()
    await anyio.to_thread.run_sync(_populate, api, random.Random(7))
    draw = random.Random(11)
    filters: list[float] = []
    binds: list[float] = []
    async with api.serving(), _extender(conditions, api) as (process, url), aiohttp.ClientSession() as http:
        await _ready(http, url)
        for number in range(WARM_UP + CALLS):
            pod = _pod(f"new-{number}", draw.choices(list(USUAL), list(USUAL.values()))[0])
            api.pods[pod["metadata"]["name"]] = pod
            body = {"Pod": pod, "Nodes": None, "NodeNames": list(api.nodes)}
            answer, seconds = await _post(http, f"{url}/scheduler/predicates", body)
            if number >= WARM_UP:
                filters.append(seconds)
            fitting = answer["NodeNames"]
            if not fitting:
                continue
            name = pod["metadata"]["name"]
            binding = {"PodName": name, "PodNamespace": "ns", "PodUID": name, "Node": draw.choice(fitting)}
            answer, seconds = await _post(http, f"{url}/scheduler/bind", binding)
            if answer["Error"]:
                raise RuntimeError(f"a pod that fits is not bound: {answer['Error']}")
            binds.append(seconds)
        resident = await anyio.to_thread.run_sync(_resident_mib, process.pid)
    return {
        "extender_filter_10000_nodes_p99_ms": Taken(1000 * percentile(filters, 0.99), len(filters)),
        "extender_filter_10000_nodes_p50_ms": Taken(1000 * percentile(filters, 0.5), len(filters)),
        "extender_bind_p50_ms": Taken(1000 * percentile(binds, 0.5), len(binds)),
        "extender_resident_memory_10000_nodes_mib": Taken(resident, 1),
    }


def _populate(api: ClusterApi, draw: random.Random) -> None:
    """Nodes, each with a random part of its GPUs held by pods whose choice is annotated."""
    sizes, weights = list(USUAL), list(USUAL.values())
    for number in range(NODES):
        name = f"node-{number:05d}"
        inventory = encode(arrivals.inventory(GPUS))
        api.nodes[name] = {
            "metadata": {
                "name": name,
                "uid": name,
                "resourceVersion": "1",
                "annotations": {INVENTORY: inventory},
            }
        }
        left = [CORES] * GPUS
        for turn in range(draw.randint(0, 10)):
            size = draw.choices(sizes, weights)[0]
            index = next((i for i, cores in enumerate(left) if cores >= size), None)
            if index is not None:
                left[index] -= size
                pod = _pod(f"{name}-{turn}", size, name, {f"{HINT}0": str(index)})
                api.pods[pod["metadata"]["name"]] = pod


def _pod(name: str, size: int, node: str = "", annotations: Mapping[str, str] | None = None) -> Object:
    limits = {VGPU.core: str(size)}
    if size < CORES:
        limits[VGPU.memory] = str(size * arrivals.BLOCKS // CORES)
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"}
    return {
        "metadata": {**metadata, "annotations": dict(annotations or {})},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    }


@asynccontextmanager
async def _extender(
    conditions: Conditions, api: ClusterApi
) -> AsyncIterator[tuple["subprocess.Popen[bytes]", str]]:
    folder = await anyio.to_thread.run_sync(short_folder)
    try:
        process, port = await anyio.to_thread.run_sync(_start, conditions, api.url, folder)
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await anyio.to_thread.run_sync(process.wait)
    finally:
        await anyio.to_thread.run_sync(shutil.rmtree, folder)


def _start(conditions: Conditions, url: str, folder: Path) -> tuple["subprocess.Popen[bytes]", int]:
    context = {"name": "one", "context": {"cluster": "one", "user": "one"}}
    document = {
        "clusters": [{"name": "one", "cluster": {"server": url}}],
        "contexts": [context],
        "users": [{"name": "one", "user": {}}],
        "current-context": "one",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(document))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = {
        "http.address": "127.0.0.1",
        "http.port": port,
        "cluster.kubeconfig": folder / "kubeconfig",
        "logging.level": "error",
        "lease.namespace": "ns",
    }
    argv: Sequence[str] = [*conditions.interpreter, "-m", "agent", "extender"]
    argv = [*argv, *(part for key, value in flags.items() for part in ("--set", f"{key}={value}"))]
    environment = os.environ | conditions.environment(folder)
    return subprocess.Popen(argv, cwd=ROOT, env=environment), port


async def _ready(http: aiohttp.ClientSession, url: str) -> None:
    with anyio.fail_after(READY_SECONDS):
        while True:
            try:
                async with http.get(f"{url}/readyz") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await anyio.sleep(0.1)


async def _post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    async with http.post(url, json=body) as reply:
        data = await reply.read()
        seconds = time.perf_counter() - started
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {data[:200]!r}")
        return await reply.json(), seconds


def _resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) / 1024
