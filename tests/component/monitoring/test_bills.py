"""Bills: what the agent says that containers hold, through the rules of the chart, by the hour."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.holding import Growth, Holding, Record
from agent.model.pod import VGPU
from agent.telemetry.containers import shares_of
from tests.component.monitoring import queries
from tests.component.monitoring.promtool import Document, check, holds, in_1024ths, series
from tests.unit.modes.nodes import gpu as made_gpu

GIB = 1 << 30
ONE_HOUR = 61  # minutes: the first is charged at its end


def billed(holdings: list[Holding], grown: dict[tuple[str, str, str, str], Growth]) -> Iterator[Document]:
    """Series of these containers by an agent with four GPUs, the first of them in four time slices."""
    gpus = {each.uuid: each for each in (made_gpu(number) for number in range(4))}
    slices = {made_gpu(0).uuid: 4}
    for share in shares_of(Record(tuple(holdings), ()), gpus, slices, grown):
        assert share.held is not None
        labels = {"namespace": share.namespace, "pod": share.pod, "container": share.container}
        place = {"node": "n", "gpu": share.gpu, "index": str(share.index), "mode": share.mode.value, **labels}
        yield series("gpu_agent_container_held_ratio", f"{share.held!r}x{ONE_HOUR}", **place)


def fraction(namespace: str, pod: str, gpu: int, cores: int, gibibytes: int, first: int = 0) -> list[Holding]:
    uuid = made_gpu(gpu).uuid
    units = {"c": range(first, first + cores), "m": range(4 * first, 4 * (first + gibibytes))}
    return [
        Holding(namespace, pod, "main", f"tencent.com/vcuda-{kind}", tuple(f"{uuid}::{kind}{n}" for n in ids))
        for kind, ids in units.items()
        if ids
    ]


def test_slices_and_memory_are_billed_once(tmp_path: Path) -> None:
    total = made_gpu(0).memory_bytes // GIB
    slices = [
        Holding("slices", f"s{n}", "main", "nvidia.com/gpu", (f"{made_gpu(0).uuid}::r{n}",)) for n in range(4)
    ]
    holdings = [
        *slices,
        *fraction("memory", "m", 1, cores=0, gibibytes=total // 2),
        # Most of the cores beside most of the memory: more than one GPU together.
        *fraction("compute", "c", 2, cores=75, gibibytes=1),
        *fraction("memory", "n", 2, cores=5, gibibytes=total * 3 // 4, first=75),
        *fraction("grown", "g", 3, cores=25, gibibytes=1),
    ]
    grown = {("grown", "g", "main", made_gpu(3).uuid): Growth(memory_bytes=GIB, cores=25)}
    half, most = (total // 2 * GIB / offered(), total * 3 // 4 * GIB / offered())
    hours = "sum by (namespace) (namespace_month:gpu_agent_gpu_hours:sum)"
    by_namespace = {"slices": 1.0, "memory": half + most, "compute": 0.75, "grown": 0.5}
    expected = [
        in_1024ths(59, hours, {f'{{namespace="{name}"}}': gpus for name, gpus in by_namespace.items()}),
        in_1024ths(59, "sum(namespace_owner_month:gpu_hours_held:sum)", {"{}": sum(by_namespace.values())}),
        in_1024ths(59, "sum(cluster_month:gpu_hours_overcommitted:sum)", {"{}": most - 0.25}),
        in_1024ths(59, "max(gpu:gpu_agent_held:sum - gpu:gpu_agent_overcommitted:sum)", {"{}": 1.0}),
    ]
    inputs = list(billed(holdings, grown))
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})


def offered() -> int:
    """Bytes that vGPU offers of a GPU."""
    return VGPU.blocks(made_gpu(0).memory_bytes) * VGPU.block_bytes


@pytest.mark.parametrize(
    ("kind", "name", "owner"),
    [
        ("ReplicaSet", "web-api-6c8d9f7b5d", "Deployment/web-api"),
        ("ReplicaSet", "by-hand", "ReplicaSet/by-hand"),
        ("StatefulSet", "db", "StatefulSet/db"),
        ("Job", "nightly-29384756", "CronJob/nightly"),
        # A name for each run.
        ("Job", "train-17", "Job"),
        ("PyTorchJob", "llama-2026-11-24", "PyTorchJob"),
        ("Node", "gpu-1", "Node"),
        ("Invented4711", "anything", "Other"),
        ("NotAJob", "anything", "Other"),
        ("<none>", "<none>", "Pod"),
        ("", "", "Pod"),
    ],
)
def test_owners_do_not_grow_in_number_with_time(tmp_path: Path, kind: str, name: str, owner: str) -> None:
    place = {"node": "n", "gpu": "G0", "index": "0", "mode": "vgpu"}
    inputs = [
        series("gpu_agent_container_held_ratio", "0.5x20", namespace="a", pod=pod, container="main", **place)
        for pod in ("p", "unknown")
    ]
    who = {"namespace": "a", "owner_kind": kind, "owner_name": name}
    inputs += [
        series("kube_pod_owner", "1x20", pod="p", owner_is_controller="true" if kind else "", **who),
        series("kube_pod_owner", "1x20", pod="holds-no-gpu", owner_is_controller="true", **who),
    ]
    expected = {f'{{namespace="a", owner="{owner}"}}': 0.5, '{namespace="a"}': 0.5}
    record = "namespace_owner:gpu_agent_held:sum"
    held = [holds(15, record, {record + labels: value for labels, value in expected.items()})]
    (path,) = (each for each in queries.RULES if each.stem == "recording")
    check(tmp_path, {"input_series": inputs, "promql_expr_test": held}, [path])
