"""How much of a large cluster `explain` holds at a time."""

import json
from typing import Any

from agent.cluster.api import KubeApi, Query
from agent.extender.explain import explain
from agent.model.modes import Mode
from agent.model.node_inventory import INVENTORY, GpuEntry, NodeInventory, encode

PODS, NODES, BYTES = 20_000, 500, 4 << 20
INVENTORY_TEXT = encode(NodeInventory(tuple(GpuEntry(f"GPU-{n}", n, Mode.VGPU, 81920) for n in range(8))))


def node(number: int) -> dict[str, Any]:
    """With the list of images that a real one has: 30 KB."""
    images = [{"names": ["x" * 250], "sizeBytes": 1}] * 100
    meta = {"name": f"n{number}", "uid": f"n{number}", "annotations": {INVENTORY: INVENTORY_TEXT}}
    return {"metadata": meta, "status": {"allocatable": {}, "images": images}}


def pod(number: int, bound: bool = True) -> dict[str, Any]:
    """Of 8 KB, as small real ones have with managedFields; each takes 40 cores of a GPU."""
    limits = {"tencent.com/vcuda-core": "40", "tencent.com/vcuda-memory": "40"}
    return {
        "metadata": {
            "name": f"p{number}",
            "namespace": "ns",
            "uid": f"p{number}",
            "annotations": {"tencent.com/predicate-gpu-idx-0": str(number // NODES % 8)},
            "managedFields": [{"fieldsV1": {"f": "y" * 7500}}],
        },
        "spec": {
            **({"nodeName": f"n{number % NODES}"} if bound else {}),
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        },
        "status": {"phase": "Running" if bound else "Pending"},
    }


class LargeCluster(KubeApi):
    """Answers as an API server: all of a list at once, unless a limit is asked for."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.largest = 0
        self.calls = 0

    async def get(self, path: str, query: Query = None, deadline: float = 0.0) -> bytes:
        if path.endswith("/pods/waits"):
            return json.dumps(pod(PODS, bound=False)).encode()
        kind, count = (node, NODES) if path == "/api/v1/nodes" else (pod, PODS)
        query = query or {}
        start = int(query.get("continue", 0))
        end = min(count, start + int(query.get("limit", count)))
        metadata = {"continue": str(end) if end < count else ""}
        body = json.dumps(
            {"metadata": metadata, "items": [kind(number) for number in range(start, end)]}
        ).encode()
        self.largest, self.calls = max(self.largest, len(body)), self.calls + 1
        return body


async def test_explain_of_20000_pods_is_bounded() -> None:
    cluster = LargeCluster()
    lines = await explain(cluster, "ns", "waits")
    assert cluster.largest < BYTES
    # And it has seen them all: each GPU of each node has five pods of 40 cores, more than it can hold.
    assert lines[1] == f"it fits on none of {NODES} nodes:"
    assert cluster.calls == PODS // 100 + NODES // 100
