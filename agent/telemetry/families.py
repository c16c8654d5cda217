"""A reading of the agent as Prometheus metric families."""

import platform
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent import __version__
from agent.inventory.snapshot import GpuState
from agent.kubelet.plugin_types import Reason
from agent.telemetry import definitions as d
from agent.telemetry.container_page import CONTAINERS
from agent.telemetry.gpus import sample_series
from agent.telemetry.process import ProcessUse
from agent.telemetry.reading import Reading

# Series that exist from the start, so that the first failure shows as an increase and not as a birth.
_KNOWN_CALLS = tuple(
    (call, outcome)
    for call in ("Allocate", "GetPreferredAllocation")
    for outcome in ("ok", *(reason.value for reason in Reason))
)

Labels = tuple[str, ...]


class AgentCollector(Collector):
    """Renders one reading; made again for each scrape, so that concurrent scrapes share nothing."""

    def __init__(self, reading: Reading, process: ProcessUse) -> None:
        self._reading = reading
        self._process = process
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        """Every family of `definitions` but containers', in that order, those without a series included."""
        self._families = {
            definition.name: Metric(definition.name, definition.help, definition.kind, definition.unit)
            for definition in d.ALL
            if definition not in CONTAINERS
        }
        self._gpus()
        self._driver()
        self._kubelet()
        self._agent()
        for series in self._reading.collected:
            self._add(*series)
        yield from self._families.values()

    def _add(self, definition: d.Definition, value: float, labels: Labels = ()) -> None:
        named = dict(zip(definition.labels, labels, strict=True))
        self._families[definition.name].add_sample(definition.series, named, value)

    def _gpus(self) -> None:
        for state in self._reading.snapshot.gpus:
            labels = (state.uuid, str(state.gpu.index))
            gpu = state.gpu
            major, minor = gpu.compute_capability
            numa = "" if gpu.numa_node is None else str(gpu.numa_node)
            self._add(d.GPU_INFO, 1, (*labels, gpu.product, gpu.pci_bus_id, f"{major}.{minor}", numa))
            self._add(d.GPU_HEALTHY, state.healthy, labels)
            self._add(d.GPU_SAMPLE_FAILURES, self._reading.sample_failures.get(state.uuid, 0), labels)
            self._sample(state, labels)
        self._add(d.GPUS_UNREADABLE, len(self._reading.snapshot.unreadable))

    def _sample(self, state: GpuState, labels: tuple[str, str]) -> None:
        taken = self._reading.samples.get(state.uuid)
        if taken is not None:
            for series in sample_series(taken, labels):
                self._add(*series)
        other = self._reading.uses.other.get(state.uuid)
        if other is not None:
            self._add(d.GPU_OTHER_MEMORY, other[0], (*labels, "host"))
            self._add(d.GPU_OTHER_MEMORY, other[1], (*labels, "unknown"))

    def _driver(self) -> None:
        snapshot = self._reading.snapshot
        if snapshot.driver is not None and snapshot.problem is None:
            driver = snapshot.driver
            major, minor = driver.cuda_version
            self._add(d.DRIVER_INFO, 1, (driver.version, driver.nvml_version, f"{major}.{minor}"))
        self._add(d.NVML_UP, snapshot.problem is None)
        self._add(d.NVML_STUCK_CALLS, self._reading.stuck_calls)

    def _kubelet(self) -> None:
        for reading in self._reading.resources:
            resource, stats = reading.resource, reading.stats
            self._add(d.RESOURCE_REGISTERED, reading.registered, (resource,))
            self._add(d.REGISTRATIONS, stats.registrations, (resource, "ok"))
            self._add(d.REGISTRATIONS, stats.registration_failures, (resource, "refused"))
            self._add(d.STREAMS, stats.streams_opened, (resource,))
            self._add(d.LISTS, stats.lists_sent, (resource,))
            self._add(d.LIST_BYTES, stats.bytes_sent, (resource,))
            self._add(d.LIST_SIZE, stats.last_list_bytes, (resource,))
            counts = {**dict.fromkeys(_KNOWN_CALLS, 0), **stats.calls}
            for (call, outcome), count in sorted(counts.items()):
                self._add(d.CALLS, count, (resource, call, outcome.lower()))
            for call in sorted({call for call, _ in counts}):
                self._add(d.CALL_SECONDS, stats.seconds.get(call, 0.0), (resource, call))

    def _agent(self) -> None:
        reading, process = self._reading, self._process
        self._add(d.BUILD_INFO, 1, (__version__, platform.python_version()))
        self._add(d.READY, reading.ready)
        for task in reading.tasks:
            self._add(d.TASK_UP, task.running, (task.name,))
            self._add(d.TASK_RESTARTS, task.restarts, (task.name,))
        self._add(d.GENERATION, reading.snapshot.generation)
        self._add(d.MAILBOX_DEPTH, reading.mailbox_depth)
        self._add(d.MAILBOX_DROPPED, reading.mailbox_dropped)
        self._add(d.MEMORY, process.resident_bytes)
        self._add(d.CPU, process.cpu_seconds)
        self._add(d.THREADS, process.threads)
        self._add(d.FILES, process.open_fds)
        self._add(d.STARTED, process.start_time)
