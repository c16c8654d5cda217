"""promtool runs every recording rule over a restart of agent and kube-state-metrics: nothing counts twice."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest
import yaml

from tests.component.monitoring import queries
from tests.component.monitoring.promtool import Document, check, holds, in_1024ths, restarted, series

GIB = 1 << 30
AGENT = {"namespace": "gpu-system", "pod": "agent-1", "container": "agent"}
NEXT = {"namespace": "gpu-system", "pod": "agent-2", "container": "agent"}
GPUS = {"G0": "0", "G1": "1", "G2": "2"}
BY_GPU = {
    "gpu_utilization_mean_ratio": (0.5, 0.25, 0.75),
    "gpu_utilization_max_ratio": (0.9, 0.75, 1),
    "gpu_memory_used_bytes": (10 * GIB, 20 * GIB, 30 * GIB),
    "gpu_memory_used_max_bytes": (12 * GIB, 24 * GIB, 36 * GIB),
    "gpu_memory_total_bytes": (80 * GIB, 80 * GIB, 80 * GIB),
    "gpu_power_mean_watts": (300, 200, 500),
    "gpu_healthy": (1, 0, 1),
}
# Namespace, pod, GPU, mode; utilization: mean and most, memory used, shares of cores and memory.
CONTAINERS = (
    ("a", "p1", "G0", "vgpu", 0.25, 0.5, 1 * GIB, 0.5, 4 * GIB),
    ("a", "p2", "G0", "vgpu", 0.125, 0.5, 2 * GIB, 0.25, 2 * GIB),
    ("b", "q", "G1", "mps", 0.25, 0.75, 3 * GIB, 0.5, 8 * GIB),
    ("c", "w", "G2", "pgpu", 0.5, 1.0, 16 * GIB, 1.0, 80 * GIB),
)
FIGURES = (
    "utilization_mean_ratio",
    "utilization_max_ratio",
    "memory_used_max_bytes",
    "core_limit_ratio",
    "memory_limit_bytes",
)
# Of two nodes, in mode vgpu.
FREE = {
    "free_gpus": (1, 2),
    "free_compute_gpus": (2.5, 2),
    "unusable_compute_gpus": (0.5, 0.25),
    "largest_free_ratio": (0.25, 0.75),
}
# Controllers of their pods: kind and name.
OWNERS = {
    "p1": ("ReplicaSet", "web-6c8d9f7b5d"),
    "p2": ("Job", "train-17"),
    "q": ("StatefulSet", "db"),
    "w": ("<none>", "<none>"),
}
RESOURCES = (
    "nvidia.com/gpu",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
    "nvidia.com/mps-core",
    "nvidia.com/mps-memory",
)
GROWS = "tencent.com/vcuda-memory"
N0, N1, N2 = (f'{{node="n", gpu="{gpu}", index="{index}"}}' for gpu, index in GPUS.items())
M0, M1, M2 = (
    f'{{node="n", gpu="{gpu}", index="{index}", mode="{mode}"}}'
    for (gpu, index), mode in zip(GPUS.items(), ("vgpu", "mps", "pgpu"), strict=True)
)
N, NV, NM, NW = '{node="n"}', *(f'{{node="n", mode="{mode}"}}' for mode in ("vgpu", "mps", "pgpu"))
P1 = '{node="n", namespace="a", pod="p1", mode="vgpu"}'
P2 = '{node="n", namespace="a", pod="p2", mode="vgpu"}'
Q = '{node="n", namespace="b", pod="q", mode="mps"}'
W = '{node="n", namespace="c", pod="w", mode="pgpu"}'
A, B, C = '{namespace="a", mode="vgpu"}', '{namespace="b", mode="mps"}', '{namespace="c", mode="pgpu"}'
WEB, TRAIN, DB, ALONE = (
    f'{{namespace="{namespace}", owner="{owner}"}}'
    for namespace, owner in (("a", "Deployment/web"), ("a", "Job"), ("b", "StatefulSet/db"), ("c", "Pod"))
)
MONTH_A = '{namespace="a", mode="vgpu", month="197001"}'
MONTH_B = '{namespace="b", mode="mps", month="197001"}'
MONTH_C = '{namespace="c", mode="pgpu", month="197001"}'


def written(resource: str) -> str:
    """A resource's name as kube-state-metrics writes it."""
    return re.sub(r"\W", "_", resource)


def month_of(labels: str) -> str:
    return labels.replace("}", ', month="197001"}')


EVERYWHERE: dict[str, dict[str, float]] = {
    "gpu:gpu_agent_utilization:mean5m": {N0: 0.5, N1: 0.25, N2: 0.75},
    "gpu:gpu_agent_utilization:max5m": {N0: 0.9, N1: 0.75, N2: 1},
    "gpu:gpu_agent_memory_used_bytes:mean5m": {N0: 10 * GIB, N1: 20 * GIB, N2: 30 * GIB},
    "gpu:gpu_agent_memory_used_bytes:max5m": {N0: 12 * GIB, N1: 24 * GIB, N2: 36 * GIB},
    "gpu:gpu_agent_power_watts:mean5m": {N0: 300, N1: 200, N2: 500},
    "gpu:gpu_agent_core_limit:sum": {M0: 0.75, M1: 0.5, M2: 1},
    "gpu:gpu_agent_memory_limit_bytes:sum": {M0: 6 * GIB, M1: 8 * GIB, M2: 80 * GIB},
    "node:gpu_agent_gpus:count": {N: 3},
    "node:gpu_agent_healthy_gpus:sum": {N: 2},
    "node:gpu_agent_utilization:mean5m": {N: 0.5},
    "node:gpu_agent_memory_used_bytes:mean5m": {N: 60 * GIB},
    "node:gpu_agent_memory_total_bytes:sum": {N: 240 * GIB},
    "node:gpu_agent_power_watts:mean5m": {N: 1000},
    "node:gpu_agent_core_limit:sum": {NV: 0.75, NM: 0.5, NW: 1},
    "node:gpu_agent_memory_limit_bytes:sum": {NV: 6 * GIB, NM: 8 * GIB, NW: 80 * GIB},
    "node:gpu_agent_expected:last": {N: 1},
    "pod:gpu_agent_utilization:mean5m": {P1: 0.25, P2: 0.125, Q: 0.25, W: 0.5},
    "pod:gpu_agent_utilization:max5m": {P1: 0.5, P2: 0.5, Q: 0.75, W: 1},
    "pod:gpu_agent_memory_used_bytes:max5m": {P1: 1 * GIB, P2: 2 * GIB, Q: 3 * GIB, W: 16 * GIB},
    "pod:gpu_agent_core_limit:sum": {P1: 0.5, P2: 0.25, Q: 0.5, W: 1},
    "pod:gpu_agent_memory_limit_bytes:sum": {P1: 4 * GIB, P2: 2 * GIB, Q: 8 * GIB, W: 80 * GIB},
    "pod:gpu_agent_measured_core_limit:sum": {P1: 0.5, P2: 0.25, Q: 0.5, W: 1},
    "pod:gpu_agent_measured_memory_limit_bytes:sum": {P1: 4 * GIB, P2: 2 * GIB, Q: 8 * GIB, W: 80 * GIB},
    "namespace:gpu_agent_core_limit:sum": {A: 0.75, B: 0.5, C: 1},
    "namespace:gpu_agent_memory_limit_bytes:sum": {A: 6 * GIB, B: 8 * GIB, C: 80 * GIB},
    "namespace:gpu_agent_utilization:mean5m": {A: 0.375, B: 0.25, C: 0.5},
    "namespace:gpu_agent_memory_used_bytes:max5m": {A: 3 * GIB, B: 3 * GIB, C: 16 * GIB},
    "cluster:gpu_agent_gpus:count": {"": 3},
    "cluster:gpu_agent_healthy_gpus:sum": {"": 2},
    "cluster:gpu_agent_held:sum": {"": 2.25},
    "cluster:gpu_agent_utilization:sum": {"": 1.5},
    "mode:gpu_agent_free_gpus:sum": {'{mode="vgpu"}': 3},
    "mode:gpu_agent_free_compute_gpus:sum": {'{mode="vgpu"}': 4.5},
    "mode:gpu_agent_unusable_compute_gpus:sum": {'{mode="vgpu"}': 0.75},
    "mode:gpu_agent_largest_free_ratio:max": {'{mode="vgpu"}': 0.75},
    "gpu:gpu_agent_held:sum": {N0: 0.75, N1: 0.5, N2: 1},
    "gpu:gpu_agent_overcommitted:sum": {N0: 0, N1: 0, N2: 0},
    "node:gpu_agent_held:sum": {N: 2.25},
    "pod:gpu_agent_held:sum": {P1: 0.5, P2: 0.25, Q: 0.5, W: 1},
    "namespace:gpu_agent_held:sum": {A: 0.75, B: 0.5, C: 1},
    "namespace_owner:gpu_agent_held:sum": {WEB: 0.5, TRAIN: 0.25, DB: 0.5, ALONE: 1},
    "pod:gpu_agent_owner:info": {
        '{namespace="a", pod="p1", owner="Deployment/web"}': 1,
        '{namespace="a", pod="p2", owner="Job"}': 1,
        '{namespace="b", pod="q", owner="StatefulSet/db"}': 1,
        '{namespace="c", pod="w", owner="Pod"}': 1,
    },
    "cluster:gpu_agent_month:info": {'{month="197001"}': 1},
    "namespace_resource:gpu_quota:min": {
        f'{{namespace="a", resource="{written(resource)}"}}': 10.0 * number
        for number, resource in enumerate(RESOURCES, 1)
    },
    "namespace_resource:gpu_quota_asked:max": {
        f'{{namespace="a", resource="{written(resource)}"}}': 5.0 * number
        for number, resource in enumerate(RESOURCES, 1)
    },
    # What was grown on two nodes; of a namespace without a quota there is no figure of one.
    "namespace_resource:gpu_grown_units:sum": {
        '{namespace="a", resource="tencent_com_vcuda_memory"}': 8 + 4,
        '{namespace="b", resource="tencent_com_vcuda_memory"}': 1,
    },
    "namespace_resource:gpu_quota_used:max": {
        f'{{namespace="a", resource="{written(resource)}"}}': 5.0 * number + 12 * (resource == GROWS)
        for number, resource in enumerate(RESOURCES, 1)
    },
    "namespace_resource:gpu_agent_used_units:max5m": {
        '{namespace="a", resource="tencent_com_vcuda_core"}': 37.5,
        '{namespace="a", resource="tencent_com_vcuda_memory"}': 12,
        '{namespace="b", resource="nvidia_com_mps_core"}': 25,
        '{namespace="b", resource="nvidia_com_mps_memory"}': 3,
        '{namespace="c", resource="nvidia_com_gpu"}': 0.5,
    },
    "resource:gpu_allocatable:sum": {'{resource="tencent_com_vcuda_core"}': 300},
    "resource:gpu_demand:sum": {'{resource="tencent_com_vcuda_core"}': 155},
    "resource:gpu_demand:max1d": {'{resource="tencent_com_vcuda_core"}': 155},
    "resource:gpu_demand_unsatisfied:sum": {'{resource="tencent_com_vcuda_core"}': 80},
    "cluster:gpu_pods_waiting:count": {"": 1},
}
# Five minutes after a start.
SETTLED: dict[str, dict[str, float]] = {
    "pod:gpu_agent_used:sum": {P1: 0.25, P2: 0.125, Q: 0.25, W: 0.5},
    "pod:gpu_agent_idle:sum": {P1: 0.25, P2: 0.125, Q: 0.25, W: 0.5},
    "node:gpu_agent_idle:sum": {N: 1.125},
    "cluster:gpu_agent_idle:sum": {"": 1.125},
    "namespace:gpu_agent_used:sum": {A: 0.375, B: 0.25, C: 0.5},
    "namespace_owner:gpu_agent_used:sum": {WEB: 0.25, TRAIN: 0.125, DB: 0.25, ALONE: 0.5},
    "namespace_owner:gpu_agent_idle:sum": {WEB: 0.25, TRAIN: 0.125, DB: 0.25, ALONE: 0.5},
}
# Those that follow from these, by what they rise in 32 minutes.
RISES: dict[str, dict[str, float]] = {
    "namespace_month:gpu_agent_used_gpu_hours:sum": {MONTH_A: 0.2, MONTH_B: 0.4 / 3, MONTH_C: 0.8 / 3},
    **{
        f"namespace_owner_month:gpu_hours_{kind}:sum": {
            month_of(owner): 32 * gpus / 60
            for owner, gpus in ((WEB, 0.25), (TRAIN, 0.125), (DB, 0.25), (ALONE, 0.5))
        }
        for kind in ("used", "idle")
    },
}
# Totals by minute; a minute without the agent is not charged.
TOTALS: dict[str, dict[int, dict[str, float]]] = {
    "namespace_month:gpu_agent_gpu_hours:sum": {
        9: {MONTH_A: 10 * 0.75 / 60, MONTH_B: 10 * 0.5 / 60, MONTH_C: 10 / 60},
        31: {MONTH_A: 31 * 0.75 / 60, MONTH_B: 31 * 0.5 / 60, MONTH_C: 31 / 60},
    },
    "namespace_owner_month:gpu_hours_held:sum": {
        9: {month_of(WEB): 5 / 60, month_of(TRAIN): 2.5 / 60, month_of(DB): 5 / 60, month_of(ALONE): 10 / 60},
        31: {
            month_of(WEB): 15.5 / 60,
            month_of(TRAIN): 7.75 / 60,
            month_of(DB): 15.5 / 60,
            month_of(ALONE): 31 / 60,
        },
    },
    "cluster_month:gpu_hours_overcommitted:sum": {9: {'{month="197001"}': 0}, 31: {'{month="197001"}': 0}},
    "namespace_month:gpu_agent_memory_gibibyte_hours:sum": {
        9: {MONTH_A: 10 * 6 / 60, MONTH_B: 10 * 8 / 60, MONTH_C: 10 * 80 / 60},
        31: {MONTH_A: 31 * 6 / 60, MONTH_B: 31 * 8 / 60, MONTH_C: 31 * 80 / 60},
    },
}


def of_the_agent() -> Iterator[Document]:
    yield from restarted("gpu_agent_ready", 1, AGENT, node="n", **NEXT)
    for metric, by_gpu in BY_GPU.items():
        for (gpu, index), value in zip(GPUS.items(), by_gpu, strict=True):
            yield from restarted(f"gpu_agent_{metric}", value, AGENT, node="n", gpu=gpu, index=index, **NEXT)
    for node, namespace, units in (("n", "a", 8), ("n2", "a", 4), ("n2", "b", 1)):
        grown = "gpu_agent_namespace_grown_memory_bytes"
        before, after = ({**each, "namespace": namespace} for each in (AGENT, NEXT))
        yield from restarted(grown, units << 28, before, node=node, **after)
    for figure, (first, second) in FREE.items():
        for node, value in (("n", first), ("n2", second)):
            name = f"gpu_agent_{figure}"
            yield from restarted(name, value, AGENT, node=node, mode="vgpu", **NEXT)
    for namespace, pod, gpu, mode, *values in CONTAINERS:
        labels = {"namespace": namespace, "pod": pod, "container": "main"}
        for figure, value in zip(FIGURES, values, strict=True):
            graded = {"attribution": "measured"} if "used" in figure or "utilization" in figure else {}
            yield from restarted(
                f"gpu_agent_container_{figure}",
                value,
                {},
                node="n",
                gpu=gpu,
                index=GPUS[gpu],
                mode=mode,
                **labels,
                **graded,
            )
        seconds = 60 * values[0]
        place = {"node": "n", "gpu": gpu, "index": GPUS[gpu], "mode": mode, **labels}
        yield from restarted("gpu_agent_container_held_ratio", values[3], **place)
        counter = "gpu_agent_container_gpu_seconds_total"
        yield series(counter, f"0+{seconds}x10 stale", **place, instance="10.0.0.1:9446", job="first")
        yield series(counter, f"_x12 0+{seconds}x120", **place, instance="10.0.0.2:9446", job="second")


def of_kube_state_metrics() -> Iterator[Document]:
    yield from restarted("kube_node_info", 1, node="n")
    for namespace, pod, *_ in CONTAINERS:
        kind, name = OWNERS[pod]
        owner = {"owner_kind": kind, "owner_name": name, "owner_is_controller": "true"}
        yield from restarted("kube_pod_owner", 1, namespace=namespace, pod=pod, **owner)
    for number, resource in enumerate(RESOURCES, 1):
        labels = {"namespace": "a", "resource": f"requests.{resource}"}
        for quota, hard in (("strict", 10 * number), ("generous", 99 * number)):
            named = {**labels, "resourcequota": quota}
            yield from restarted("kube_resourcequota", hard, type="hard", **named)
            yield from restarted("kube_resourcequota", 5 * number, type="used", **named)
    yield from restarted(
        "kube_resourcequota", 7, type="hard", namespace="a", resource="pods", resourcequota="strict"
    )
    core = {"resource": "tencent_com_vcuda_core", "unit": "integer"}
    for node, amount in (("n", 100), ("n2", 200)):
        yield from restarted("kube_node_status_allocatable", amount, node=node, **core)
        yield from restarted("kube_node_status_allocatable", 64, node=node, resource="cpu", unit="core")
    for pod, amount, phase, scheduled in (
        ("p1", 50, "Running", True),
        ("p2", 25, "Running", True),
        ("waits", 80, "Pending", False),
        ("done", 100, "Succeeded", True),
    ):
        named = {"namespace": "a", "pod": pod}
        yield from restarted(
            "kube_pod_container_resource_requests", amount, container="main", node="n", **core, **named
        )
        for each in ("Pending", "Running", "Succeeded", "Failed", "Unknown"):
            yield from restarted("kube_pod_status_phase", int(each == phase), phase=each, **named)
        for condition in ("true", "false", "unknown"):
            value = int((condition == "true") == scheduled and condition != "unknown")
            yield from restarted("kube_pod_status_scheduled", value, condition=condition, **named)


def test_no_recording_rule_is_forgotten() -> None:
    assert sorted((*EVERYWHERE, *SETTLED, *RISES, *TOTALS)) == sorted(
        queries.named("record", "dcgm-names", "opencost")
    )


def test_a_restart_changes_nothing_that_is_recorded(tmp_path: Path) -> None:
    expected = [
        holds(minute, record, {record + labels: value for labels, value in samples.items()})
        for record, samples in EVERYWHERE.items()
        for minute in (9, 13, 16, 31)
    ]
    expected += [
        in_1024ths(minute, record, samples) for record, samples in SETTLED.items() for minute in (9, 31)
    ]
    expected += [
        in_1024ths(minute, record, samples)
        for record, by_minute in TOTALS.items()
        for minute, samples in by_minute.items()
    ]
    expected += [
        in_1024ths(55, f"{record} - {record} offset 32m", samples) for record, samples in RISES.items()
    ]
    inputs = list(chain(of_the_agent(), of_kube_state_metrics()))
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})


def test_use_that_lasts_over_an_update_is_no_gap(tmp_path: Path) -> None:
    """While the agent is away, five-minute figures reach over it."""
    five_minutes = [record for record in EVERYWHERE if record.endswith("5m")]
    assert len(five_minutes) > 10
    expected = [
        holds(11, record, {record + labels: value for labels, value in EVERYWHERE[record].items()})
        for record in five_minutes
    ]
    check(tmp_path, {"input_series": list(of_the_agent()), "promql_expr_test": expected})


@pytest.mark.parametrize("outage", [0, 600])
def test_a_month_is_charged_to_its_end_and_the_next_begins_at_nothing(tmp_path: Path, outage: int) -> None:
    """Half a GPU; the month ends after 2 h. Ten hours without figures keep the total of the month."""
    (path,) = (each for each in queries.RULES if each.stem == "chargeback")
    text = path.read_text()
    shifted = text.replace("time()", f"(time() + {31 * 86400 - 7200 - outage * 60})")
    assert shifted != text
    rules = tmp_path / path.name
    rules.write_text(shifted)
    record = "namespace_month:gpu_agent_gpu_hours:sum"
    values = f"0.5x59 stale _x{outage - 1} 0.5x240" if outage else "0.5x300"
    january, february = (f'{{namespace="a", mode="vgpu", month="{month}"}}' for month in ("197001", "197002"))
    end = 119 + outage
    expected = [
        in_1024ths(59, record, {january: 0.5}),
        in_1024ths(end, record, {january: 1.0}),
        in_1024ths(end + 60, record, {february: 0.5}),
        in_1024ths(end + 60, f"max_over_time({record}[3h])", {january: 1.0, february: 0.5}),
    ]
    inputs = [series("namespace:gpu_agent_held:sum", values, namespace="a", mode="vgpu")]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected}, [rules])


def test_only_nodes_that_should_have_an_agent_are_expected_to(tmp_path: Path) -> None:
    off = {"mode": "off", "desired": "off"}
    inputs = [
        series("kube_node_info", "1x200", node="stays"),
        series("kube_node_info", "1x20 stale", node="deleted"),
        series("kube_node_info", "1x200", node="off"),
        series("gpu_agent_ready", "1x10 stale", node="stays"),
        series("gpu_agent_ready", "1x10 stale", node="deleted"),
        series("gpu_agent_ready", "1x10 stale", node="off"),
        series("gpu_agent_gpu_mode_info", "1x5 stale", node="off", gpu="G0", mode="vgpu", desired="vgpu"),
        series("gpu_agent_gpu_mode_info", "_x6 1x4 stale", node="off", gpu="G0", **off),
        series("gpu_agent_gpu_mode_info", "1x10 stale", node="stays", gpu="G0", **off),
        series("gpu_agent_gpu_mode_info", "1x10 stale", node="stays", gpu="G1", mode="mps", desired="mps"),
    ]
    record = "node:gpu_agent_expected:last"
    stays, deleted, off_node = (f'{record}{{node="{name}"}}' for name in ("stays", "deleted", "off"))
    expected = [
        holds(4, record, {stays: 1, deleted: 1, off_node: 1}),
        holds(8, record, {stays: 1, deleted: 1, off_node: 0}),
        holds(30, record, {stays: 1, deleted: 1, off_node: 0}),
        holds(190, record, {stays: 1, off_node: 0}),
    ]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})


def test_without_kube_state_metrics_a_node_is_expected_for_an_hour(tmp_path: Path) -> None:
    record = "node:gpu_agent_expected:last"
    one = {f'{record}{{node="n"}}': 1.0}
    expected = [holds(10, record, one), holds(65, record, one), holds(80, record, {})]
    inputs = [series("gpu_agent_ready", "1x10 stale", node="n")]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})


LEVELS = re.compile(r"\b(by|on|without) \(([^)]*)\)")


@pytest.mark.parametrize("path", queries.RULES, ids=lambda path: path.stem)
def test_clusters_of_one_prometheus_are_kept_apart(path: Path) -> None:
    for rule in (each for group in yaml.safe_load(path.read_text())["groups"] for each in group["rules"]):
        for _, labels in LEVELS.findall(rule["expr"]):
            assert labels.startswith("cluster") or labels in ("", "month"), rule["expr"]


def test_measured_use_is_divided_by_limits_of_what_is_measured(tmp_path: Path) -> None:
    """Two containers of a pod; of the second one nothing is known, or only an estimate."""
    inputs = []
    for container, grade in (("known", "measured"), ("guessed", "estimated"), ("unread", "")):
        place = {
            "node": "n",
            "gpu": "G0",
            "namespace": "a",
            "pod": "p",
            "mode": "vgpu",
            "container": container,
        }
        inputs += [
            series("gpu_agent_container_memory_limit_bytes", "100x20", **place),
            series("gpu_agent_container_core_limit_ratio", "0.25x20", **place),
        ]
        if grade:
            inputs += [
                series("gpu_agent_container_memory_used_max_bytes", "50x20", **place, attribution=grade),
                series("gpu_agent_container_utilization_mean_ratio", "0.125x20", **place, attribution=grade),
            ]
    pod = '{node="n", namespace="a", pod="p", mode="vgpu"}'
    used, limit = "pod:gpu_agent_memory_used_bytes:max5m", "pod:gpu_agent_measured_memory_limit_bytes:sum"
    work, cores = "pod:gpu_agent_utilization:mean5m", "pod:gpu_agent_measured_core_limit:sum"
    expected = [holds(15, f"{used} / {limit}", {pod: 0.5}), holds(15, f"{work} / {cores}", {pod: 0.5})]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})


def test_two_clusters_with_the_same_names_are_two(tmp_path: Path) -> None:
    """Nodes, pods and namespaces of one name: each cluster has its own figures."""
    inputs = [
        {**each, "series": each["series"].replace("{", f'{{cluster="{cluster}", ', 1)}
        for each in chain(of_the_agent(), of_kube_state_metrics())
        for cluster in ("x", "y")
    ]

    def twice(record: str, samples: Mapping[str, float]) -> dict[str, float]:
        if record == "cluster:gpu_agent_month:info":
            return {record + labels: value for labels, value in samples.items()}
        return {
            f'{record}{{cluster="{cluster}", {labels.strip("{}")}}}'.replace(", }", "}"): value
            for labels, value in samples.items()
            for cluster in ("x", "y")
        }

    expected = [holds(31, record, twice(record, samples)) for record, samples in EVERYWHERE.items()]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected})
