"""The series of containers: the agent's own, and those under gpu-manager's names."""

from collections.abc import Iterator, Sequence

from agent.telemetry import definitions as d
from agent.telemetry.attribution import Attribution
from agent.telemetry.container_use import ContainerUse
from agent.telemetry.reading import Series


def _memory_known(each: ContainerUse) -> bool:
    return each.use.memory_grade is not Attribution.ALLOCATED


def _utilization_known(each: ContainerUse) -> bool:
    return each.use.utilization_grade is not Attribution.ALLOCATED


def container_series(uses: Sequence[ContainerUse]) -> Iterator[Series]:
    """The series of the figures that are known; plain code, since there may be thousands in a scrape."""
    for each in uses:
        use, share = each.use, each.use.share
        labels = (share.namespace, share.pod, share.container, share.gpu, str(share.index), share.mode.value)
        graded = {grade: (*labels, grade.value) for grade in _grades(each)}
        if _memory_known(each):
            yield d.CONTAINER_MEMORY_USED, use.memory, graded[use.memory_grade]
            yield d.CONTAINER_PROCESSES, use.processes, labels
        if each.memory:
            yield d.CONTAINER_MEMORY_MOST, int(each.memory.most), graded[each.memory_grade]
        yield d.CONTAINER_MEMORY_LIMIT, share.memory_limit, labels
        if _utilization_known(each):
            yield d.CONTAINER_UTILIZATION, use.utilization, graded[use.utilization_grade]
        if each.utilization:
            span, grade = each.utilization, graded[each.utilization_grade]
            yield d.CONTAINER_UTILIZATION_MEAN, span.mean, grade
            yield d.CONTAINER_UTILIZATION_MOST, span.most, grade
        for definition, value in (
            (d.CONTAINER_GPU_SECONDS, each.gpu_seconds),
            (d.CONTAINER_HELD, share.held),
            (d.CONTAINER_CORE_LIMIT, share.core_limit),
        ):
            if value is not None:
                yield definition, value, labels


def _grades(each: ContainerUse) -> set[Attribution]:
    """The grades of its figures, mostly one: each is a label."""
    use = each.use
    return {use.memory_grade, use.utilization_grade, each.memory_grade, each.utilization_grade}


# gpu-manager's names, its label names and its scales: percent, MiB, cores as a share of one GPU.
_MIB = 1 << 20


def _compatible(name: str, label: str, text: str) -> d.Definition:
    return d.Definition(name, "gauge", ("pod_name", "namespace", "node", "container_name", label), text)


COMPATIBLE = (
    _compatible(
        "container_gpu_utilization", "gpu", "Percent of a GPU in use by a container (as gpu-manager has it)."
    ),
    _compatible(
        "container_gpu_memory_total", "gpu_memory", "MiB in use by a container (as gpu-manager has it)."
    ),
    _compatible("container_request_gpu_utilization", "req_of_gpu", "GPUs asked for (as gpu-manager has it)."),
    _compatible(
        "container_request_gpu_memory", "req_of_gpu_memory", "MiB asked for (as gpu-manager has it)."
    ),
)


def compatible_series(uses: Sequence[ContainerUse], node: str) -> Iterator[Series]:
    """gpu-manager's four metrics. Requests come as `total` only, uses by GPU and as `total`.

    A GPU that cannot be read has no use, nor has then the total.
    """
    by_container: dict[tuple[str, str, str], list[ContainerUse]] = {}
    for each in uses:
        share = each.use.share
        by_container.setdefault((share.namespace, share.pod, share.container), []).append(each)
    for (namespace, pod, container), held in by_container.items():
        labels = (pod, namespace, node, container)
        for number, definition in enumerate(COMPATIBLE):
            values = [_compatible_values(each)[number] for each in held]
            known = [value for value in values if value is not None]
            if number <= 1:
                for each, value in zip(held, values, strict=True):
                    if value is not None:
                        yield definition, value, (*labels, f"gpu{each.use.share.index}")
            if len(known) == len(values):
                yield definition, sum(known), (*labels, "total")


def _compatible_values(each: ContainerUse) -> tuple[float | None, float | None, float, float]:
    use, share = each.use, each.use.share
    return (
        use.utilization * 100 if _utilization_known(each) else None,
        use.memory / _MIB if _memory_known(each) else None,
        share.core_limit or 0.0,
        share.memory_limit / _MIB,
    )
