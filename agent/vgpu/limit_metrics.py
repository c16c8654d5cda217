"""Metrics of vGPU limits: how many containers each fence holds, and how many are above their caps."""

from collections.abc import Callable, Iterator, Mapping

from agent.kit.cell import Cell
from agent.model.growth import Growth
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series
from agent.vgpu.publishing import Publisher


def limits_collector(
    limits: Publisher, grown: Cell[Mapping[str, Growth]], indices: Callable[[], Mapping[str, int]]
) -> Iterator[Series]:
    """The metrics of limits. `grown`: by GPU; `indices` of the GPUs that are there."""
    for fence, count in limits.by_fence().items():
        yield d.LIMITED_CONTAINERS, count, (fence,)
    for gpu, index in indices().items():
        yield d.GROWN_MEMORY, grown.value.get(gpu, Growth()).memory_bytes, (gpu, str(index))
    for namespace, size in limits.grown().items():
        yield d.NAMESPACE_GROWN_MEMORY, size, (namespace,)
    yield d.CONTAINERS_ABOVE_CAP, limits.above_cap(), ()
    yield d.CONTAINERS_WITHOUT_LIBRARY, limits.without_library(), ()
    yield d.CONTAINERS_REFUSING, limits.refusing(), ()
    for place, usage in limits.counted().items():
        yield d.CONTAINER_REFUSED, usage.refused, place
        yield d.CONTAINER_PEAK, usage.peak_bytes, place
        yield d.CONTAINER_REPAIRED, usage.repaired, place
        yield d.CONTAINER_NEWER, usage.newer, place
    for place, share in limits.shares().items():
        yield d.CONTAINER_THROTTLED, share.throttled_seconds, place
        yield d.CONTAINER_ALLOTTED, share.allotted / 100, place
    yield d.CONTAINERS_AVOIDING, limits.avoidable(), ()
    for result, count in limits.ends.items():
        yield d.CONTAINERS_ENDED, count, (result,)
