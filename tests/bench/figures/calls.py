"""What the kubelet waits for."""

from collections.abc import Mapping

import anyio.to_thread

from tests.bench.client import kubelet_client, timed
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile

CALLS = 1000
LISTS = 200
WARM_UP = 50
# grpc-go refuses larger messages, so the kubelet would lose the stream.
MESSAGE_LIMIT = 4 * 1024 * 1024


@measurement(
    Figure("allocate_p50_ms", "ms", 1.5, "Allocate of one whole GPU from a C-core client; median"),
    Figure("allocate_p99_ms", "ms", 5, "the same; 99th percentile"),
)
async def allocate(conditions: Conditions) -> Mapping[str, Taken]:
    """Calls one after the other, as the kubelet makes them."""
    async with conditions.serving() as node:
        gpus = node.machine.uuids

        def calls() -> list[float]:
            with kubelet_client(node.socket()) as client:
                answer = client.allocate(gpus[:1])
                if gpus[0] not in str(answer):
                    raise RuntimeError(f"Allocate does not answer the GPU: {answer}")
                return timed(lambda: client.allocate(gpus[:1]), CALLS, WARM_UP)

        taken = await anyio.to_thread.run_sync(calls)
    return {
        "allocate_p50_ms": Taken(percentile(taken, 0.5), len(taken)),
        "allocate_p99_ms": Taken(percentile(taken, 0.99), len(taken)),
    }


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
