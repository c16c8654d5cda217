"""Metrics of vGPU limits: how many containers each fence holds, and how many are above their caps."""

from collections.abc import Callable, Mapping

from agent.isolation.publishing import Publisher
from agent.kit.cell import Cell
from agent.model.growth import Growth
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add, Collector


def limits_collector(
    limits: Publisher, grown: Cell[Mapping[str, Growth]], indices: Callable[[], Mapping[str, int]]
) -> Collector:
    """The metrics of limits. `grown`: by GPU; `indices` of the GPUs that are there."""

    def read() -> Callable[[Add], None]:
        sizes, known = grown.value, indices()
        shares = limits.shares()
        by_fence, above, without = limits.by_fence(), limits.above_cap(), limits.without_library()
        by_namespace = limits.grown()
        avoidable, ends = limits.avoidable(), dict(limits.ends)

        def add(series: Add) -> None:
            for fence, count in by_fence.items():
                series(d.LIMITED_CONTAINERS, count, (fence,))
            for gpu, index in known.items():
                series(d.GROWN_MEMORY, sizes[gpu].memory_bytes if gpu in sizes else 0, (gpu, str(index)))
            for namespace, size in by_namespace.items():
                series(d.NAMESPACE_GROWN_MEMORY, size, (namespace,))
            series(d.CONTAINERS_ABOVE_CAP, above, ())
            series(d.CONTAINERS_WITHOUT_LIBRARY, without, ())
            for place, share in shares.items():
                series(d.CONTAINER_THROTTLED, share.throttled_seconds, place)
                series(d.CONTAINER_ALLOTTED, share.allotted / 100, place)
            series(d.CONTAINERS_AVOIDING, avoidable, ())
            for result, count in ends.items():
                series(d.CONTAINERS_ENDED, count, (result,))

        return add

    return read
