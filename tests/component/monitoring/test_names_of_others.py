"""Figures under names that others ask for: dcgm-exporter's dashboards, and OpenCost with its price list."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from agent.model.modes import Assignment, GpuMode, Mode
from agent.node.conditions import labels_of
from tests.component.monitoring import queries
from tests.component.monitoring.promtool import Document, check, holds, in_1024ths, series
from tests.unit.modes.nodes import gpu, snapshot_of

GIB = 1 << 30
# The queries of dashboard 12239 of Grafana (NVIDIA's own) by panel, all variables at `All`. Its first edition
# chose by `instance`, later ones by `Hostname`.
DASHBOARD = {
    "temperature": 'max(DCGM_FI_DEV_GPU_TEMP{Hostname=~".*", gpu=~".*"}) by (Hostname, gpu, uuid)',
    "mean temperature": 'avg(DCGM_FI_DEV_GPU_TEMP{Hostname=~".*", gpu=~".*"})',
    "power": 'max(DCGM_FI_DEV_POWER_USAGE{Hostname=~".*", gpu=~".*"}) by (Hostname, gpu, uuid)',
    "all power": 'sum(max(DCGM_FI_DEV_POWER_USAGE{Hostname=~".*", gpu=~".*"}) by (gpu))',
    "clocks": 'max(DCGM_FI_DEV_SM_CLOCK{Hostname=~".*", gpu=~".*"} * 1000000) by (Hostname, UUID, gpu)',
    "utilization": (
        'max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{Hostname=~".*", gpu=~".*"})'
        " by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)"
    ),
    "tensor cores": (
        'max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{Hostname=~".*", gpu=~".*"})'
        " by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)"
    ),
    "memory": (
        'max(DCGM_FI_DEV_FB_USED{Hostname=~".*", gpu=~".*"}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)'
    ),
    "variables": "count by (Hostname, gpu) (DCGM_FI_DEV_FB_FREE)",
    "first edition": 'sum by (instance) (DCGM_FI_DEV_GPU_UTIL{instance=~".*", gpu=~".*"})',
}
HOST = '{Hostname="n", gpu="3"}'
ANSWERS = {
    "temperature": {HOST: 44.0},
    "mean temperature": {"{}": 44.0},
    "power": {HOST: 300.0},
    "all power": {"{}": 300.0},
    "clocks": {'{Hostname="n", UUID="G3", gpu="3"}': 1.98e9},
    "utilization": {HOST: 0.5},
    "tensor cores": {HOST: 0.25},
    "memory": {HOST: 20.0 * 1024},
    "variables": {HOST: 1.0},
    "first edition": {'{instance="n"}': 50.0},
}


def rule_file(name: str) -> Path:
    (path,) = (each for each in queries.RULES if each.stem == name)
    return path


def test_dcgm_dashboard_answers(tmp_path: Path) -> None:
    figures = {
        "temperature_celsius": 44,
        "power_watts": 300,
        "utilization_ratio": 0.5,
        "tensor_active_ratio": 0.25,
        "memory_used_bytes": 20 * GIB,
        "memory_total_bytes": 80 * GIB,
    }
    place = {"node": "n", "gpu": "G3", "index": "3"}
    inputs = [
        series(f"gpu_agent_gpu_{name}", f"{value}x20", **place, instance=instance)
        for name, value in figures.items()
        for instance in ("10.0.0.1:9446", "10.0.0.2:9446")  # an agent was updated
    ]
    inputs += [
        series("gpu_agent_gpu_info", "1x20", **place, product="NVIDIA H200", pci_bus_id="0000:03:00.0"),
        series("gpu_agent_gpu_clock_hertz", "1.98e9x20", **place, clock="sm"),
    ]
    expected = [holds(10, DASHBOARD[panel], samples) for panel, samples in ANSWERS.items()]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected}, [rule_file("dcgm-names")])


def test_the_page_lists_every_field_of_dcgm() -> None:
    rules = yaml.safe_load(rule_file("dcgm-names").read_text())["groups"][0]["rules"]
    fields = {rule["record"] for rule in rules if rule["record"].startswith("DCGM_")}
    assert fields == set(re.findall(r"`(DCGM_FI_\w+)` \|", queries.DOCUMENT.read_text()))


# OpenCost, by its sources and documents of 2025: a price list has eight columns. A row of class `node` has
# the price of a whole node with its GPUs; `InstanceIDField` names the field of the Node object that
# `InstanceID` stands for, in lower case. Labelled with `nvidia.com/gpu.replicas`, a node has
# `nvidia.com/gpu.count` GPUs. The node's price is shared out among cores, GiB and GPUs in proportion to the
# prices of the configuration.
COLUMNS = (
    *("EndTimestamp", "InstanceID", "Region", "AssetClass"),
    *("InstanceIDField", "InstanceType", "MarketPriceHourly", "Version"),
)
ALLOCATED = (
    'avg(avg_over_time(container_gpu_allocation{container!="", container!="POD", node!=""}[1h]))'
    " by (container, pod, namespace, node, uid)"
)


def block(start: str) -> str:
    """The block of the page that begins so."""
    found = re.search(rf"^```({start}.*?)^```", queries.DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1].partition("\n")[2]


def gpu_price(labels: Mapping[str, str | None], name: str, cores: int, gibibytes: int) -> float:
    """Of a GPU of the node for an hour, as OpenCost works it out from the page's list and configuration."""
    prices = {}
    for row in csv.reader(block("csv").splitlines()):
        assert len(row) == len(COLUMNS)
        one = dict(zip(COLUMNS, row, strict=True))
        if one["AssetClass"] != "AssetClass":
            assert (one["AssetClass"], one["InstanceIDField"]) == ("node", "metadata.name")
            prices[one["InstanceID"].lower()] = float(one["MarketPriceHourly"])
    of = {key: float(value) for key, value in yaml.safe_load(block("text\ncostModel"))["costModel"].items()}
    gpus = int(labels["nvidia.com/gpu.count"] or 0) if "nvidia.com/gpu.replicas" in labels else 0
    in_ram = gpus * of["GPU"] / of["RAM"] + cores * of["CPU"] / of["RAM"] + gibibytes
    return prices[name] / in_ram * of["GPU"] / of["RAM"]


@pytest.mark.parametrize("known", [True, False], ids=["with kube-state-metrics", "without"])
def test_opencost_reads_the_prices(tmp_path: Path, known: bool) -> None:
    gpus = snapshot_of(*map(gpu, range(8)))
    slices = Assignment({gpus.gpus[0].uuid: GpuMode(Mode.PGPU, replicas=4)})
    price = gpu_price(labels_of(gpus, slices, {}), "gpu-1", 192, 2048)
    assert 3.0 < price < 3.6  # of 32 for a node with eight: 27 for the GPUs
    held: Sequence[tuple[str, str, str, float]] = (
        ("slices", "s", "G0", 0.25),
        ("fractions", "f", "G1", 0.3),
        ("fractions", "f", "G2", 0.2),
        ("whole", "w", "G3", 1.0),
    )
    inputs: list[Document] = []
    for namespace, pod, uuid, part in held:
        place = {"node": "gpu-1", "namespace": namespace, "pod": pod, "container": "main", "gpu": uuid}
        inputs += (
            series("gpu_agent_container_held_ratio", f"{part}x60", **place, instance=instance)
            for instance in ("10.0.0.1:9446", "10.0.0.2:9446")
        )
    uid = {pod: f', uid="{pod}-uid"' if known else "" for pod in "sfw"}
    if known:
        inputs += (
            series("kube_pod_info", "1x60", namespace=namespace, pod=pod, uid=f"{pod}-uid")
            for namespace, pod in (("slices", "s"), ("fractions", "f"), ("whole", "w"))
        )
    costs = {
        f'{{container="main", pod="{pod}", namespace="{namespace}", node="gpu-1"{uid[pod]}}}': part * price
        for namespace, pod, part in (("slices", "s", 0.25), ("fractions", "f", 0.5), ("whole", "w", 1.0))
    }
    expected = [in_1024ths(60, f"({ALLOCATED}) * {price!r}", costs)]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": expected}, [rule_file("opencost")])
