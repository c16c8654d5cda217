"""Calls that the kubelet waits for."""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from agent._proto.v1beta1 import ContainerAllocateResponse
from agent.simulator.kubelet import ContainerSpec, Pod, PodSpec, checkpoint_file
from agent.simulator.kubelet.api_server import Api
from agent.simulator.kubelet.device_tables import NO_NUMA, Allocation, PodDevices
from tests.bench.client import KubeletClient, kubelet_client, timed, undisturbed
from tests.bench.conditions import RESOURCES, Conditions
from tests.bench.prepared import (
    SHOWN_SECONDS,
    PreparedRecords,
    agent_between,
    entry,
    served,
    simulated_machine,
)
from tests.bench.registry import Figure, Taken, measurement, percentile

RESOURCE = RESOURCES[0]
ROUNDS = 25  # of as many calls as there are GPUs
READ_SECONDS = 10.0
LISTS = 200
WARM_UP = 50
# grpc-go refuses larger messages, so the kubelet would lose the stream.
MESSAGE_LIMIT = 4 * 1024 * 1024


@measurement(
    Figure(
        "allocate_p50_ms",
        "ms",
        1.5,
        "Allocate of a GPU whose last pod has ended, by a C-core client; median",
    ),
    Figure("allocate_p99_ms", "ms", 5, "the same; 99th percentile"),
)
async def allocate(conditions: Conditions) -> Mapping[str, Taken]:
    """Pods take all GPUs one after the other, are recorded by the kubelet, and end; then the next ones."""
    folder, machine = await simulated_machine()
    api, records = Api("bench", random.Random(1)), PreparedRecords(b"")
    taken: list[float] = []
    async with agent_between(conditions, folder, "pgpu", api, records):
        (socket,) = await served(folder, "nvidia-gpu")
        with undisturbed(), kubelet_client(socket) as client:
            for number in range(ROUNDS + 1):
                pods = [api.create(_pod(f"pod-{number}-{n}")) for n in range(len(machine.uuids))]
                await anyio.sleep(SHOWN_SECONDS)
                times = await anyio.to_thread.run_sync(_allocations, client, machine.uuids)
                taken += times if number else []
                held = dict(zip(pods, machine.uuids, strict=True))
                _record(folder / "k" / "device-plugins", held)
                records.newest = b"".join(
                    entry(pod.spec.name, {RESOURCE: [gpu]}) for pod, gpu in held.items()
                )
                read = records.lists
                with anyio.fail_after(READ_SECONDS):
                    while records.lists == read:
                        await anyio.sleep(0.02)
                await anyio.sleep(0.05)
                records.newest = b""
                for pod in pods:
                    api.remove(pod)
                await anyio.sleep(0.1)  # the watch shows the agent their end
    return {
        "allocate_p50_ms": Taken(percentile(taken, 0.5), len(taken)),
        "allocate_p99_ms": Taken(percentile(taken, 0.99), len(taken)),
    }


def _pod(name: str) -> PodSpec:
    return PodSpec(name, (ContainerSpec("main", {RESOURCE: 1}),), node_name="bench")


def _allocations(client: KubeletClient, gpus: Sequence[str]) -> list[float]:
    taken: list[float] = []
    for gpu in gpus:
        started = time.perf_counter()
        answer = client.allocate([gpu])
        taken.append((time.perf_counter() - started) * 1000)
        if gpu not in str(answer):
            raise RuntimeError(f"Allocate does not answer the GPU: {answer}")
    return taken


def _record(folder: Path, held: Mapping[Pod, str]) -> None:
    """Write the kubelet's checkpoint, by which a pod's end frees its GPU before the next List."""
    devices = PodDevices()
    for pod, gpu in held.items():
        devices.insert(pod.uid, "main", RESOURCE, Allocation({NO_NUMA: (gpu,)}, ContainerAllocateResponse()))
    checkpoint_file.write(folder, checkpoint_file.snapshot(devices, {RESOURCE: set(held.values())}))


@measurement(
    Figure("list_send_ms", "ms", 20, "ListAndWatch opened until its first list is read; 99th percentile"),
    Figure("list_bytes", "B", MESSAGE_LIMIT, "the largest list of any resource; the budget is gRPC's limit"),
)
async def lists(conditions: Conditions) -> Mapping[str, Taken]:
    """The list of all GPUs, read by a C-core client."""
    async with conditions.serving() as node:
        count = len(node.machine.uuids)

        def read() -> tuple[list[float], int]:
            with kubelet_client(node.socket()) as client:
                first = client.first_list()
                if len(first.devices) != count:
                    raise RuntimeError(f"the list has {len(first.devices)} devices instead of {count}")
                return timed(client.first_list, LISTS, WARM_UP), first.ByteSize()

        taken, size = await anyio.to_thread.run_sync(read)
    return {
        "list_send_ms": Taken(percentile(taken, 0.99), len(taken)),
        "list_bytes": Taken(size, 1),
    }
