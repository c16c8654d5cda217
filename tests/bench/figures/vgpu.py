"""Fractions: how long a pair's admission takes, and what its long lists cost."""

import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import grpc

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.grpc_server import DrainableServer
from agent.kubelet.podresources import Reader
from agent.kubelet.service import DevicePluginService
from agent.model.gpu import Gpu
from agent.model.holding import PairMember, Record, UnitPool
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.pod import VGPU
from agent.settings import Settings
from agent.simulator.kubelet.api_server import Api
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.vgpu.wing import NodeLimits, VgpuPlugin, build
from tests.bench.client import KubeletClient, kubelet_client, undisturbed
from tests.bench.conditions import Conditions, short_folder
from tests.bench.prepared import (
    SHOWN_SECONDS,
    PreparedRecords,
    agent_between,
    entry,
    served,
    simulated_machine,
)
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.wing_node import wing_node

ADMISSIONS, WARM_UP = 300, 20
READS = 100
MEMORY_BYTES = 143771 << 20  # of an H200
LISTS = 60
PODS_PER_GPU = 9
CORES, BLOCKS = 10, 56  # of each pod: nine of them hold 90 % of a GPU's 100 cores and 561 blocks


def pools(uuids: Sequence[str], memory_bytes: int) -> list[UnitPool]:
    """All units of the machine."""
    return [UnitPool.of(VGPU, uuid, index, memory_bytes) for index, uuid in enumerate(uuids)]


def held_pods(all_stocks: Sequence[UnitPool]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Pods that hold 90 % of everything."""
    return {
        f"held-{pool.index}-{n}": {
            VGPU.core: pool.cores[n * CORES : (n + 1) * CORES],
            VGPU.memory: pool.blocks[n * BLOCKS : (n + 1) * BLOCKS],
        }
        for pool in all_stocks
        for n in range(PODS_PER_GPU)
    }


def pod_spec(name: str) -> PodSpec:
    """A pod that asks for what is left of any GPU, nearly."""
    return PodSpec(name, (ContainerSpec("main", {VGPU.core: 8, VGPU.memory: 40}),), node_name="bench")


@measurement(
    Figure(
        "pair_admission_p99_ms",
        "ms",
        20,
        "the four calls for core and memory of a pod, 90 % of 8 GPUs held; 99th percentile",
    ),
    Figure("pair_admission_p50_ms", "ms", None, "the same; median"),
)
async def admission(conditions: Conditions) -> Mapping[str, Taken]:
    """Who asks is found in 4,752 held units each time; pods' specs come from a watch."""
    folder, machine = await simulated_machine()
    every = pools(machine.uuids, MEMORY_BYTES)
    holding = held_pods(every)
    api = Api("bench", random.Random(1))
    for name in holding:
        api.create(pod_spec(name))
    records = PreparedRecords(b"".join(entry(name, ids) for name, ids in holding.items()))
    async with agent_between(conditions, folder, "vgpu", api, records):
        taken = await _admissions(folder, every, holding, api, records)
    return {
        "pair_admission_p99_ms": Taken(percentile(taken, 0.99), len(taken)),
        "pair_admission_p50_ms": Taken(percentile(taken, 0.5), len(taken)),
    }


async def _admissions(
    folder: Path,
    every: Sequence[UnitPool],
    holding: Mapping[str, Mapping[str, Sequence[str]]],
    api: Api,
    records: PreparedRecords,
) -> list[float]:
    in_use = {each for ids in holding.values() for held in ids.values() for each in held}
    free = {
        member: [each for pool in every for each in pool.ids(member) if each not in in_use]
        for member in PairMember
    }
    sockets = await served(folder, "tencent-vcuda-core", "tencent-vcuda-memory")
    taken: list[float] = []
    with undisturbed(), kubelet_client(sockets[0]) as core, kubelet_client(sockets[1]) as memory:
        clients = {PairMember.CORE: core, PairMember.MEMORY: memory}
        for n in range(ADMISSIONS + WARM_UP):
            spec = pod_spec(f"new-{n}")
            api.create(spec)
            records.newest = entry(spec.name, {})
            await anyio.sleep(SHOWN_SECONDS)
            members = [PairMember.CORE, PairMember.MEMORY] if n % 2 else [PairMember.MEMORY, PairMember.CORE]
            seconds = await anyio.to_thread.run_sync(_pair, clients, free, members)
            if n >= WARM_UP:
                taken.append(seconds * 1000)
            records.newest = b""
            api.delete(spec)
            api.remove(api.get(spec))
    return taken


def _pair(
    clients: Mapping[PairMember, KubeletClient],
    free: Mapping[PairMember, Sequence[str]],
    members: Sequence[PairMember],
) -> float:
    sizes = {PairMember.CORE: 8, PairMember.MEMORY: 40}
    gpus: set[str] = set()
    spent = 0.0
    for member in members:
        started = time.perf_counter()
        ids = clients[member].prefer(free[member], sizes[member])
        clients[member].allocate(ids)
        spent += time.perf_counter() - started
        gpus |= {each.partition("::")[0] for each in ids}
    if len(gpus) != 1:
        raise RuntimeError(f"the pair lies on {len(gpus)} GPUs")
    return spent


@measurement(
    Figure("podresources_read_ms", "ms", 8, "reading a PodResources List of 5,280 held units; median")
)
async def podresources_read(conditions: Conditions) -> Mapping[str, Taken]:
    """On the event loop nothing else runs meanwhile."""
    every = pools([f"GPU-{n:08d}-86f3-7a43-b711-4771313afc50" for n in range(8)], MEMORY_BYTES)
    data = b"".join(
        entry(
            f"pod-{pool.index}-{n}",
            {VGPU.core: pool.cores[n * 10 : n * 10 + 10], VGPU.memory: pool.blocks[n * 56 : n * 56 + 56]},
        )
        for pool in every
        for n in range(10)
    )
    if sum(len(each.ids) for each in Reader().parse(data).holdings) != 5280:
        raise RuntimeError("the list does not hold 5,280 units")
    taken: list[float] = []
    for _ in range(READS):
        started = time.perf_counter()
        Reader().parse(data)
        taken.append((time.perf_counter() - started) * 1000)
    return {"podresources_read_ms": Taken(percentile(taken, 0.5), len(taken))}


class _NoRecords:
    cell: Cell[Record | None] = Cell(None)

    async def look(self, deadline: float = 1.0) -> Record:
        return Record((), ())


@asynccontextmanager
async def _served(plugin: VgpuPlugin) -> AsyncIterator[Path]:
    folder = await anyio.to_thread.run_sync(short_folder)
    service = DevicePluginService(plugin)
    server = DrainableServer(service.handlers(), folder / "s.sock")
    await server.start()
    try:
        yield folder / "s.sock"
    finally:
        service.drain()
        await server.stop()


@measurement(
    Figure(
        "vgpu_list_block_ms",
        "ms",
        5,
        "longest stall of the event loop while 4,488 memory IDs are built again and sent; median",
    ),
    Figure("vgpu_list_bytes", "B", 4 * 1024 * 1024, "that list; the budget is gRPC's limit"),
)
async def list_block(conditions: Conditions) -> Mapping[str, Taken]:
    """Every GPU changes at once, which is the worst case; a C-core client reads."""
    gpus = [_gpu(f"GPU-{n:08d}-86f3-7a43-b711-4771313afc50", n) for n in range(8)]
    inventory = Cell(_snapshot(gpus))
    modes = Cell(Assignment({each.uuid: GpuMode(Mode.VGPU) for each in gpus}))
    settings = Settings()
    node = wing_node(settings, snapshot=inventory, assignment=modes, holdings=_NoRecords())
    _, plugins = build(node, NodeLimits(node))
    plugin = next(each for each in plugins if each.resource == VGPU.memory)
    stalls: list[float] = []
    async with _served(plugin) as socket:
        done = anyio.Event()

        async def read() -> None:
            await anyio.to_thread.run_sync(_read_lists, socket, LISTS + 1)
            done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.sleep(0.3)
            for n in range(LISTS):
                gpus = [replace(each, blocked="" if n % 2 else "for the bench") for each in gpus]
                inventory.publish(_snapshot(gpus))
                stalls.append(await _longest_stall(plugin))
            with anyio.fail_after(20):
                await done.wait()
    return {
        "vgpu_list_block_ms": Taken(percentile(stalls, 0.5), len(stalls)),
        "vgpu_list_bytes": Taken(len(plugin.lists.value), 1),
    }


async def _longest_stall(plugin: VgpuPlugin) -> float:
    """Refresh the list, then turn the loop for a while; the longest turn in milliseconds."""
    before = time.perf_counter()
    plugin.refresh()
    longest = 0.0
    end = before + 0.06
    while (now := time.perf_counter()) < end:
        longest = max(longest, now - before)
        before = now
        await anyio.lowlevel.checkpoint()
    return longest * 1000


def _read_lists(socket: Path, count: int) -> None:
    """Raw bytes: decoding them here would hold the interpreter lock that the measured loop needs."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stream = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"", timeout=60)
        for _, _message in zip(range(count), stream, strict=False):
            pass
        stream.cancel()


def _gpu(uuid: str, index: int) -> GpuState:
    return GpuState(Gpu(uuid, index, index, f"0000:{index:02x}:00.0", "NVIDIA H200", MEMORY_BYTES, (9, 0)))


def _snapshot(gpus: Sequence[GpuState]) -> Snapshot:
    return Snapshot(1, None, None, tuple(gpus), by_uuid={each.uuid: each for each in gpus})
