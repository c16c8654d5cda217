"""10,000 nodes in memory, an extender's process beside them, and calls as kube-scheduler makes them."""

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

from agent.model.node_inventory import INVENTORY, encode
from agent.model.placement import HINT, USUAL
from agent.model.pod import CORES, VGPU
from tests.bench import arrivals
from tests.bench.conditions import ROOT, Conditions, short_folder
from tests.component.extender.api import ClusterApi, Object

NODES, GPUS = 10_000, 8
READY_SECONDS = 120.0


def populate(api: ClusterApi, draw: random.Random) -> None:
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
                made = pod(f"{name}-{turn}", size, name, {f"{HINT}0": str(index)})
                api.pods[made["metadata"]["name"]] = made


def pod(name: str, size: int, node: str = "", annotations: Mapping[str, str] | None = None) -> Object:
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
async def extender(
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
        "http.verbs": "true",
        "cluster.kubeconfig": folder / "kubeconfig",
        "logging.level": "error",
        "lease.namespace": "ns",
    }
    argv: Sequence[str] = [*conditions.interpreter, "-m", "agent", "extender"]
    argv = [*argv, *(part for key, value in flags.items() for part in ("--set", f"{key}={value}"))]
    environment = os.environ | conditions.environment(folder)
    return subprocess.Popen(argv, cwd=ROOT, env=environment), port


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    with anyio.fail_after(READY_SECONDS):
        while True:
            try:
                async with http.get(f"{url}/serving") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await anyio.sleep(0.1)


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    async with http.post(url, json=body) as reply:
        data = await reply.read()
        seconds = time.perf_counter() - started
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {data[:200]!r}")
        return await reply.json(), seconds


def resident_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(line for line in text.splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) / 1024
