"""The exposition: what it says, that both formats parse, and that the reference document is current."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from agent import __version__
from agent.inventory.reducer import Unavailable, reduce
from agent.kit.tasks import TaskState
from agent.lists.shared_pair import pairs_collector
from agent.nvml.port import Sample
from agent.pairing.pairing import PairingStats
from agent.telemetry import definitions as d
from agent.telemetry import rendering
from agent.telemetry.rendering import render
from agent.telemetry.sampler import Samples, TakenSample
from agent.telemetry.series import Series, read_process_use
from tests import metrics_reference
from tests.unit.telemetry.agents import Parts
from tests.unit.telemetry.pages import OPENMETRICS, page, rendered, value, values
from tests.unit.telemetry.uses import many_uses

ROOT = Path(__file__).resolve().parents[3]


def sampled(parts: Parts, uuid: str, sample: Sample, age: float = 0.0) -> None:
    taken: Mapping[str, TakenSample] = {uuid: TakenSample(sample, anyio.current_time() - age)}
    parts.sampler.samples.publish(Samples(taken, MappingProxyType({uuid: 3})))


FULL = Sample(0.25, 0.5, 2**30, 2**34, 61.5, 44.0)


async def test_a_gpu_shows_identity_health_and_moving_figures() -> None:
    parts = Parts("dgx-h200")
    uuids = parts.scan()
    sampled(parts, uuids[0], FULL)
    text = await page(parts.sources)
    gpu = {"gpu": uuids[0], "index": "0"}
    assert value(text, "gpu_agent_gpu_healthy", **gpu) == 1
    assert value(text, "gpu_agent_gpu_utilization_ratio", **gpu) == 0.25
    assert value(text, "gpu_agent_gpu_memory_utilization_ratio", **gpu) == 0.5
    assert value(text, "gpu_agent_gpu_memory_used_bytes", **gpu) == 2**30
    assert value(text, "gpu_agent_gpu_memory_total_bytes", **gpu) == 2**34
    assert value(text, "gpu_agent_gpu_power_watts", **gpu) == 61.5
    assert value(text, "gpu_agent_gpu_temperature_celsius", **gpu) == 44
    assert value(text, "gpu_agent_gpu_sample_failures_total", **gpu) == 3
    described = parts.inventory.snapshot.value.gpus[0].gpu
    assert described.numa_node is not None
    info = {
        "product": described.product,
        "pci_bus_id": described.pci_bus_id,
        "compute_capability": "9.0",
        "numa_node": str(described.numa_node),
    }
    assert value(text, "gpu_agent_gpu_info", **gpu, **info) == 1
    assert value(text, "gpu_agent_nvml_up") == 1
    assert value(text, "gpu_agent_gpus_unreadable") == 0


async def test_stale_and_missing_figures_are_left_out() -> None:
    parts = Parts()
    uuids = parts.scan()
    sampled(parts, uuids[0], FULL, age=parts.sampler.fresh_seconds + 1)
    assert "gpu_agent_gpu_power_watts{" not in await page(parts.sources)
    sampled(parts, uuids[0], Sample(None, None, 0, 0, None, 44.0))
    text = await page(parts.sources)
    assert "gpu_agent_gpu_temperature_celsius{" in text
    for absent in ("power_watts", "utilization_ratio", "memory_used_bytes", "memory_total_bytes"):
        assert f"gpu_agent_gpu_{absent}{{" not in text


async def test_a_node_without_nvml_shows_it_and_keeps_the_rest() -> None:
    parts = Parts()
    text = await page(parts.sources)
    assert value(text, "gpu_agent_nvml_up") == 0
    assert "gpu_agent_driver_info{" not in text
    uuids = parts.scan()
    assert "gpu_agent_driver_info{" in await page(parts.sources)
    cell = parts.inventory.snapshot
    cell.publish(reduce(cell.value, Unavailable("gone")))
    text = await page(parts.sources)
    assert value(text, "gpu_agent_nvml_up") == 0
    assert value(text, "gpu_agent_gpu_healthy", gpu=uuids[3], index="3") == 0


async def test_the_kubelets_doings_by_resource() -> None:
    parts = Parts()
    stats = parts.endpoint.service.stats
    resource = {"resource": "nvidia.com/gpu"}
    text = await page(parts.sources)
    ok = {**resource, "call": "Allocate", "result": "ok"}
    assert value(text, "gpu_agent_kubelet_calls_total", **ok) == 0  # there before the first call
    assert value(text, "gpu_agent_resource_registered", **resource) == 0
    stats.count("Allocate", "ok", 0.5)
    stats.count("Allocate", "ok", 0.25)
    stats.count("Allocate", "INVALID_ARGUMENT", 0.25)
    stats.lists_sent, stats.bytes_sent, stats.last_list_bytes = 2, 300, 100
    stats.registrations, stats.registration_failures, stats.streams_opened = 1, 4, 1
    parts.endpoint.service.streams.publish(1)
    text = await page(parts.sources)
    assert value(text, "gpu_agent_kubelet_calls_total", **ok) == 2
    assert value(text, "gpu_agent_kubelet_calls_total", **{**ok, "result": "invalid_argument"}) == 1
    assert value(text, "gpu_agent_kubelet_call_seconds_total", **resource, call="Allocate") == 1.0
    assert value(text, "gpu_agent_resource_registered", **resource) == 1
    assert value(text, "gpu_agent_registrations_total", **resource, result="ok") == 1
    assert value(text, "gpu_agent_registrations_total", **resource, result="refused") == 4
    assert value(text, "gpu_agent_list_streams_total", **resource) == 1
    assert value(text, "gpu_agent_lists_sent_total", **resource) == 2
    assert value(text, "gpu_agent_list_sent_bytes_total", **resource) == 300
    assert value(text, "gpu_agent_list_size_bytes", **resource) == 100


async def test_tasks_mailbox_readiness_and_the_process() -> None:
    parts = Parts()
    parts.supervisor.states["scanner"] = TaskState("scanner", running=False, restarts=2)
    parts.blockers.append("something is in the way")
    parts.inventory.mailbox.offer(Unavailable("gone"))
    text = await page(parts.sources)
    assert value(text, "gpu_agent_task_up", task="scanner") == 0
    assert value(text, "gpu_agent_task_restarts_total", task="scanner") == 2
    assert value(text, "gpu_agent_ready") == 0
    assert value(text, "gpu_agent_inventory_mailbox_messages") == 1
    assert value(text, "gpu_agent_inventory_mailbox_dropped_total") == 0
    version = ".".join(map(str, sys.version_info[:3]))
    assert value(text, "gpu_agent_build_info", version=__version__, python_version=version) == 1
    memory = value(text, "gpu_agent_process_resident_memory_bytes")
    assert memory is not None
    assert memory > 2**20


async def test_a_reading_does_not_change_with_the_agent() -> None:
    parts = Parts()
    parts.supervisor.states["scanner"] = TaskState("scanner", running=True)
    parts.endpoint.service.stats.count("Allocate", "ok", 0.5)
    reading = parts.sources.read()
    before = (await rendered(reading)).body.decode()
    parts.supervisor.states["scanner"].running = False
    parts.endpoint.service.stats.count("Allocate", "ok", 0.5)
    after = (await rendered(reading)).body.decode()

    def own(text: str) -> dict[object, float]:
        return {key: item for key, item in values(text).items() if "_process_" not in key[0]}

    assert own(before) == own(after)


async def test_another_room_adds_its_part() -> None:
    parts = Parts()
    units = {"free": 3}

    def part() -> Iterator[Series]:
        yield d.GPUS_UNREADABLE, units["free"], ()
        yield d.TASK_UP, 1, ("another room",)

    parts.sources.collectors.append(part)
    reading = parts.sources.read()
    units["free"] = 99
    text = (await rendered(reading)).body.decode()
    assert "gpu_agent_gpus_unreadable 3\n" in text
    assert value(text, "gpu_agent_task_up", task="another room") == 1


async def test_both_formats_parse_and_hold_exactly_the_defined_families() -> None:
    parts = Parts("dgx-h200")
    uuids = parts.scan()
    sampled(parts, uuids[0], FULL)
    plain = await page(parts.sources)
    names = {definition.name for definition in d.ALL}
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", plain, re.MULTILINE))
    assert set(typed) == {definition.series for definition in d.ALL}
    for definition in d.ALL:
        assert typed[definition.series] == {"info": "gauge"}.get(definition.kind, definition.kind)
    open_page = await page(parts.sources, OPENMETRICS)
    assert open_page.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(open_page)} == names  # type: ignore[no-untyped-call]


def test_names_follow_the_rules() -> None:
    names = [definition.name for definition in d.ALL]
    assert len(set(names)) == len(names)
    for definition in d.ALL:
        assert re.fullmatch(r"gpu_agent_[a-z0-9_]+", definition.name)
        assert not definition.name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
        assert definition.help.endswith(".")


async def test_pairs_that_wait_are_told() -> None:
    parts = Parts()
    stats = PairingStats(granted=3, refused=1)
    parts.sources.collectors.append(
        lambda: pairs_collector("vgpu", stats, reserved=2, fences={"library": False, "sweep": True})
    )
    text = await page(parts.sources)
    assert value(text, "gpu_agent_reservations", mode="vgpu") == 2
    assert value(text, "gpu_agent_pairs_total", mode="vgpu", result="refused") == 1
    assert value(text, "gpu_agent_limits_enforced", mode="vgpu", fence="library") == 0
    assert value(text, "gpu_agent_limits_enforced", mode="vgpu", fence="sweep") == 1


def test_the_agents_own_use(tmp_path: Path) -> None:
    use = read_process_use()
    assert use.cpu_seconds > 0
    assert use.threads >= 1
    assert use.open_fds > 2
    stat = (Path("/proc/self/stat")).read_text()
    (tmp_path / "fd").mkdir()
    (tmp_path / "stat").write_text(f"{os.getpid()} (a) b) {stat.rpartition(')')[2].strip()}")
    odd = read_process_use(tmp_path)
    assert odd.open_fds == 0
    assert odd.start_time == pytest.approx(use.start_time, abs=1)


def test_the_reference_is_current() -> None:
    committed = (ROOT / "docs" / "metrics.md").read_text()
    assert committed == metrics_reference.reference(), "run `make docs` and commit the result"


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_every_series_of_simulated_gpus_says_so(accept: str) -> None:
    parts = Parts("dgx-h200")
    reading = replace(parts.sources.read(), uses=many_uses(parts.scan(), 2))
    plain, marked = [
        (await anyio.to_thread.run_sync(render, reading, accept, "", "node-1", simulated)).body.decode()
        for simulated in (False, True)
    ]
    series = [line for line in marked.splitlines() if not line.startswith("#")]
    assert len(series) > 100
    assert all('{simulated="true"' in line for line in series)
    back = marked.replace('{simulated="true",', "{").replace('{simulated="true"}', "")
    assert _names(back) == _names(plain)


async def test_labels_of_containers_that_are_gone_are_forgotten() -> None:
    parts, kept = Parts("dgx-h200"), []
    uuids = parts.scan()
    for per_gpu in (100, 100, 2):
        reading = replace(parts.sources.read(), uses=many_uses(uuids, per_gpu))
        text = (await rendered(reading)).body.decode()
        assert len(text.splitlines()) == len(set(text.splitlines()))
        kept.append(sum(map(len, rendering._last.values())))
    assert kept[0] == kept[1] > 800 > kept[2]


def _names(page: str) -> list[str]:
    """Lines without values: the process's own figures move."""
    return [line.rpartition(" ")[0] for line in page.splitlines()]
