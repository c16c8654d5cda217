"""Monitoring at its largest: 8 GPUs with 100 containers each."""

import random
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread

from agent.app.build_telemetry import SWITCH_SECONDS
from agent.kit.tasks import Cell
from agent.model.pod import VGPU
from agent.simulator.kubelet import ContainerSpec, Phase, PodSpec
from agent.simulator.kubelet.api_server import Api
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.machine import SimulatedMachine
from agent.telemetry.rendering import MetricsPage
from agent.telemetry.series import Sources
from agent.web.server import HttpRequest
from tests.bench.agent import BenchAgent
from tests.bench.conditions import Conditions, short_folder
from tests.bench.figures.scrape import HEADERS
from tests.bench.prepared import PreparedRecords, entry
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.unit.telemetry.agents import Parts
from tests.unit.telemetry.uses import many_uses

PER_GPU = 100
SCRAPES, WARM_UP = 60, 5
FIRST_PID = 5_000_000


@measurement(
    Figure(
        "scrape_800_containers_ms", "ms", 15, "one /metrics with 8 GPUs x 100 containers, gzipped; median"
    ),
    Figure("scrape_800_containers_p99_ms", "ms", None, "its 99th percentile"),
)
async def scrape_800_containers(conditions: Conditions) -> Mapping[str, Taken]:
    """Every core of every GPU is a pod's, with a process of its own. NVML hangs: nothing may ask it."""
    folder = await anyio.to_thread.run_sync(short_folder)
    machine = await anyio.to_thread.run_sync(SimulatedMachine.create, "dgx-h200", folder / "machine")
    await anyio.to_thread.run_sync(machine.write_sysfs, folder / "sys")
    for name in ("cdi", "k/plugins_registry", "k/device-plugins"):
        (folder / name).mkdir(parents=True)
    api, records = await anyio.to_thread.run_sync(_fill, folder, machine)
    with records.serving(folder / "k" / "pod-resources" / "kubelet.sock"):
        async with HttpApi(api).serving() as http:
            await anyio.to_thread.run_sync(http.write_kubeconfig, folder / "kubeconfig")
            settings = conditions.settings(folder) | {
                "defaultMode": "vgpu",
                "host.proc": str(folder / "proc"),
                "cluster.access": "required",
                "cluster.kubeconfig": str(folder / "kubeconfig"),
                "cluster.nodeName": api.node_name,
            }
            agent = BenchAgent(conditions.process(folder), settings)
            await agent.start()
            try:
                await _known(agent)
                fault = machine.hang("nvmlDeviceGetUtilizationRates")
                values = await _scrapes(agent)
                fault.release()
            finally:
                await agent.kill()
                await anyio.to_thread.run_sync(shutil.rmtree, folder)
    return {
        "scrape_800_containers_ms": Taken(percentile(values, 0.5), len(values)),
        "scrape_800_containers_p99_ms": Taken(percentile(values, 0.99), len(values)),
    }


def _fill(folder: Path, machine: SimulatedMachine) -> tuple[Api, PreparedRecords]:
    api, entries = Api("bench", random.Random(1)), []
    for index, uuid in enumerate(machine.uuids):
        for number in range(PER_GPU):
            name, pid = f"pod-{index}-{number}", FIRST_PID + index * PER_GPU + number
            limits = {VGPU.core: 1, VGPU.memory: 1}
            pod = api.create(PodSpec(name, (ContainerSpec("main", limits),), node_name="bench"))
            pod.phase = Phase.RUNNING
            ids = {VGPU.core: [f"{uuid}::c{number}"], VGPU.memory: [f"{uuid}::m{number}"]}
            entries.append(entry(name, ids))
            (folder / "proc" / str(pid)).mkdir(parents=True)
            cgroup = f"0::/kubepods/pod{pod.uid}/{pod.container_id('main')}\n"
            (folder / "proc" / str(pid) / "cgroup").write_text(cgroup)
            machine.processes.start(index, pid, memory_mib=100)
    return api, PreparedRecords(b"".join(entries))


async def _known(agent: BenchAgent) -> None:
    """Wait until the agent reports the memory of all of them."""
    used = f"}} {100 << 20}\n"
    with anyio.fail_after(60):
        while await agent.http_port() is None:
            await anyio.sleep(0.05)
        while (await agent.scrape()).count(used) < 8 * PER_GPU:
            await anyio.sleep(0.5)


async def _scrapes(agent: BenchAgent) -> list[float]:
    values = []
    async with aiohttp.ClientSession(auto_decompress=False) as client:
        url = f"http://127.0.0.1:{await agent.http_port()}/metrics"
        for number in range(WARM_UP + SCRAPES):
            started = time.perf_counter()
            async with client.get(url, headers=HEADERS) as reply:
                reply.raise_for_status()
                await reply.read()
            if number >= WARM_UP:
                values.append((time.perf_counter() - started) * 1000)
    return values


@measurement(
    Figure(
        "scrape_loop_block_ms",
        "ms",
        5,
        "the longest that such a scrape holds the event loop up; median of 60",
    )
)
async def scrape_loop_block(_: Conditions) -> Mapping[str, Taken]:
    """In this process: the longest time between two turns of the loop while a page is made."""
    parts = Parts("dgx-h200")
    uuids = parts.scan()
    sources = replace(parts.sources, uses=Cell(many_uses(uuids, PER_GPU)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        gaps = [await _longest_gap(sources) for _ in range(WARM_UP + SCRAPES)][WARM_UP:]
    finally:
        sys.setswitchinterval(before)
        parts.thread.close()
    return {"scrape_loop_block_ms": Taken(percentile(gaps, 0.5), len(gaps))}


async def _longest_gap(sources: Sources) -> float:
    page, longest, done = MetricsPage(sources), 0.0, False

    async def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done:
            await anyio.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last - 0.0005), now

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await anyio.sleep(0.005)
        await page.reply(HttpRequest("/metrics", headers=HEADERS))
        done = True
    return longest * 1000
