"""The series of containers, written straight into the page.

There may be thousands, on a page that has 60 ms: going through prometheus_client's objects would take most of
it. Gauges are written alike in Prometheus' text format and in OpenMetrics, but for the line with the unit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from agent.telemetry import definitions as d
from agent.telemetry.attribution import Grade
from agent.telemetry.container_use import ContainerUse

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Value = Callable[[ContainerUse], float | None]


def _memory_known(each: ContainerUse) -> bool:
    return each.use.memory_grade is not Grade.ALLOCATED


def _utilization_known(each: ContainerUse) -> bool:
    return each.use.utilization_grade is not Grade.ALLOCATED


_VALUES: Sequence[tuple[d.Definition, Value]] = (
    (d.CONTAINER_MEMORY_USED, lambda each: each.use.memory if _memory_known(each) else None),
    (d.CONTAINER_MEMORY_MOST, lambda each: int(each.memory.most) if each.memory else None),
    (d.CONTAINER_MEMORY_LIMIT, lambda each: each.use.share.memory_limit),
    (d.CONTAINER_UTILIZATION, lambda each: each.use.utilization if _utilization_known(each) else None),
    (d.CONTAINER_UTILIZATION_MEAN, lambda each: each.utilization.mean if each.utilization else None),
    (d.CONTAINER_UTILIZATION_MOST, lambda each: each.utilization.most if each.utilization else None),
    (d.CONTAINER_CORE_LIMIT, lambda each: each.use.share.core_limit),
    (d.CONTAINER_PROCESSES, lambda each: each.use.processes if _memory_known(each) else None),
)
CONTAINERS = tuple(definition for definition, _ in _VALUES)
_GRADE: dict[str, Callable[[ContainerUse], str]] = {
    d.CONTAINER_MEMORY_USED.name: lambda each: each.use.memory_grade.value,
    d.CONTAINER_MEMORY_MOST.name: lambda each: each.memory_grade.value,
    d.CONTAINER_UTILIZATION.name: lambda each: each.use.utilization_grade.value,
    d.CONTAINER_UTILIZATION_MEAN.name: lambda each: each.utilization_grade.value,
    d.CONTAINER_UTILIZATION_MOST.name: lambda each: each.utilization_grade.value,
}


def container_page(uses: Sequence[ContainerUse], units: bool) -> Iterator[str]:
    """All families of containers, one after the other; `units` for OpenMetrics."""
    labels = [_labels(each) for each in uses]
    for definition, value in _VALUES:
        name, grade = definition.series, _GRADE.get(definition.name)
        lines = [*_head(name, definition.help, definition.unit if units else "")]
        for each, text in zip(uses, labels, strict=True):
            figure = value(each)
            if figure is None:
                continue
            tail = f',attribution="{grade(each)}"' if grade else ""
            lines.append(f"{name}{{{text}{tail}}} {figure!r}")
        yield "\n".join(lines) + "\n"


def _labels(each: ContainerUse) -> str:
    share = each.use.share
    values = (share.namespace, share.pod, share.container, share.gpu, str(share.index), share.mode.value)
    return ",".join(
        f'{label}="{_escaped(value)}"'
        for label, value in zip(d.CONTAINER_MEMORY_LIMIT.labels, values, strict=True)
    )


def _escaped(value: str) -> str:
    return value.translate(_ESCAPES)


def _head(name: str, text: str, unit: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    if unit:
        yield f"# UNIT {name} {unit}"


# gpu-manager's names, its label names and its scales: percent, MiB, cores as a share of one GPU.
_MIB = 1 << 20
COMPATIBLE = (
    ("container_gpu_utilization", "gpu", "Percent of a GPU in use by a container (as gpu-manager has it)."),
    ("container_gpu_memory_total", "gpu_memory", "MiB in use by a container (as gpu-manager has it)."),
    ("container_request_gpu_utilization", "req_of_gpu", "GPUs asked for (as gpu-manager has it)."),
    ("container_request_gpu_memory", "req_of_gpu_memory", "MiB asked for (as gpu-manager has it)."),
)


def compatible_page(uses: Sequence[ContainerUse], node: str) -> Iterator[str]:
    """gpu-manager's four metrics. Requests come as `total` only, uses by GPU and as `total`.

    A GPU that cannot be read has no use, nor has then the total.
    """
    by_container: dict[tuple[str, str, str], list[ContainerUse]] = {}
    for each in uses:
        share = each.use.share
        by_container.setdefault((share.namespace, share.pod, share.container), []).append(each)
    for number, (name, label, text) in enumerate(COMPATIBLE):
        lines = [*_head(name, text, "")]
        for (namespace, pod, container), held in by_container.items():
            base = (
                f'pod_name="{_escaped(pod)}",namespace="{_escaped(namespace)}",'
                f'node="{_escaped(node)}",container_name="{_escaped(container)}"'
            )
            values = [_compatible(each)[number] for each in held]
            known = [value for value in values if value is not None]
            if number <= 1:
                lines += [
                    f'{name}{{{base},{label}="gpu{each.use.share.index}"}} {value!r}'
                    for each, value in zip(held, values, strict=True)
                    if value is not None
                ]
            if len(known) == len(values):
                lines.append(f'{name}{{{base},{label}="total"}} {sum(known)!r}')
        yield "\n".join(lines) + "\n"


def _compatible(each: ContainerUse) -> tuple[float | None, float | None, float, float]:
    use, share = each.use, each.use.share
    return (
        use.utilization * 100 if _utilization_known(each) else None,
        use.memory / _MIB if _memory_known(each) else None,
        share.core_limit or 0.0,
        share.memory_limit / _MIB,
    )
