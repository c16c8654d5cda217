"""A reading of the agent as series."""

import platform
from collections.abc import Iterator

from agent import __version__
from agent.inventory.snapshot import GpuState
from agent.kubelet.plugin_types import Reason
from agent.telemetry import definitions as d
from agent.telemetry.container_metrics import container_series
from agent.telemetry.gpus import sample_series
from agent.telemetry.process import ProcessUse
from agent.telemetry.reading import Reading, Series

# Series that exist from the start, so that the first failure shows as an increase and not as a birth.
_KNOWN_CALLS = tuple(
    (call, outcome)
    for call in ("Allocate", "GetPreferredAllocation")
    for outcome in ("ok", *(reason.value for reason in Reason))
)


def series_of(reading: Reading, process: ProcessUse) -> Iterator[Series]:
    """All series but those under gpu-manager's names, in no order."""
    yield from _gpus(reading)
    yield from _driver(reading)
    yield from _kubelet(reading)
    yield from _agent(reading, process)
    yield from reading.collected
    yield from container_series(reading.uses.containers)


def _gpus(reading: Reading) -> Iterator[Series]:
    for state in reading.snapshot.gpus:
        labels = (state.uuid, str(state.gpu.index))
        gpu = state.gpu
        major, minor = gpu.compute_capability
        numa = "" if gpu.numa_node is None else str(gpu.numa_node)
        yield d.GPU_INFO, 1, (*labels, gpu.product, gpu.pci_bus_id, f"{major}.{minor}", numa)
        yield d.GPU_HEALTHY, state.healthy, labels
        yield d.GPU_SAMPLE_FAILURES, reading.sample_failures.get(state.uuid, 0), labels
        yield from _sample(reading, state, labels)
    yield d.GPUS_UNREADABLE, len(reading.snapshot.unreadable), ()


def _sample(reading: Reading, state: GpuState, labels: tuple[str, str]) -> Iterator[Series]:
    taken = reading.samples.get(state.uuid)
    if taken is not None:
        yield from sample_series(taken, labels)
    other = reading.uses.other.get(state.uuid)
    if other is not None:
        yield d.GPU_OTHER_MEMORY, other[0], (*labels, "host")
        yield d.GPU_OTHER_MEMORY, other[1], (*labels, "unknown")


def _driver(reading: Reading) -> Iterator[Series]:
    snapshot = reading.snapshot
    if snapshot.driver is not None and snapshot.problem is None:
        driver = snapshot.driver
        major, minor = driver.cuda_version
        yield d.DRIVER_INFO, 1, (driver.version, driver.nvml_version, f"{major}.{minor}")
    yield d.NVML_UP, snapshot.problem is None, ()
    yield d.NVML_STUCK_CALLS, reading.stuck_calls, ()


def _kubelet(reading: Reading) -> Iterator[Series]:
    for each in reading.resources:
        resource, stats = each.resource, each.stats
        yield d.RESOURCE_REGISTERED, each.registered, (resource,)
        yield d.REGISTRATIONS, stats.registrations, (resource, "ok")
        yield d.REGISTRATIONS, stats.registration_failures, (resource, "refused")
        yield d.STREAMS, stats.streams_opened, (resource,)
        yield d.LISTS, stats.lists_sent, (resource,)
        yield d.LIST_BYTES, stats.bytes_sent, (resource,)
        yield d.LIST_SIZE, stats.last_list_bytes, (resource,)
        counts = {**dict.fromkeys(_KNOWN_CALLS, 0), **stats.calls}
        for (call, outcome), count in sorted(counts.items()):
            yield d.CALLS, count, (resource, call, outcome.lower())
        for call in sorted({call for call, _ in counts}):
            yield d.CALL_SECONDS, stats.seconds.get(call, 0.0), (resource, call)


def _agent(reading: Reading, process: ProcessUse) -> Iterator[Series]:
    yield d.BUILD_INFO, 1, (__version__, platform.python_version())
    yield d.READY, reading.ready, ()
    for task in reading.tasks:
        yield d.TASK_UP, task.running, (task.name,)
        yield d.TASK_RESTARTS, task.restarts, (task.name,)
    yield d.GENERATION, reading.snapshot.generation, ()
    yield d.MAILBOX_DEPTH, reading.mailbox_depth, ()
    yield d.MAILBOX_DROPPED, reading.mailbox_dropped, ()
    yield d.MEMORY, process.resident_bytes, ()
    yield d.CPU, process.cpu_seconds, ()
    yield d.THREADS, process.threads, ()
    yield d.FILES, process.open_fds, ()
    yield d.STARTED, process.start_time, ()
