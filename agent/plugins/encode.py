"""Device lists as bytes.

A ListAndWatchResponse is the concatenation of its devices' encodings, so each device is encoded once
per state and a list is a join: sending a changed list costs next to nothing.
"""

from functools import lru_cache

from agent._proto import v1beta1

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


@lru_cache(maxsize=256)
def device(device_id: str, healthy: bool, numa_node: int | None) -> bytes:
    """One device as a ListAndWatchResponse of one; concatenate them for a list.

    `numa_node` None leaves the topology field out: the kubelet then gives no NUMA hints.
    """
    topology = None if numa_node is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa_node)])
    item = v1beta1.Device(id=device_id, health=HEALTHY if healthy else UNHEALTHY, topology=topology)
    return bytes(v1beta1.ListAndWatchResponse(devices=[item]))
