"""Everything that a scrape shows, read on the event loop at one moment, and as series."""

import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent import __version__
from agent.inventory.actor import Inventory
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, Supervisor, TaskState
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.service import ServiceStats
from agent.kubelet.wire import Reason
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import Sample
from agent.telemetry import definitions as d
from agent.telemetry.container_use import ContainerUse, Uses
from agent.telemetry.containers import Attribution
from agent.telemetry.definitions import Definition
from agent.telemetry.sampler import Sampler, TakenSample

# Everything a scrape shows, read on the event loop at one moment and frozen.
#
# The rendering happens in a thread. Were it to read the live objects there, a dictionary that the loop
# changes meanwhile would fail the scrape, and a scrape would show halves of two states.

Series = tuple[Definition, float, tuple[str, ...]]  # a metric, its value, its labels as in the definition
Collector = Callable[[], Iterable[Series]]  # reads the series of another room, on the event loop


@dataclass(frozen=True, slots=True)
class ResourceReading:
    """One resource: whether the kubelet listens, and the counts of its socket."""

    resource: str
    registered: bool
    stats: ServiceStats


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment of the agent; nothing in it changes any more."""

    snapshot: Snapshot
    samples: Mapping[str, TakenSample]
    sample_failures: Mapping[str, int]
    stuck_calls: int
    resources: tuple[ResourceReading, ...]
    tasks: tuple[TaskState, ...]
    mailbox_depth: int
    mailbox_dropped: int
    ready: bool
    collected: tuple[Series, ...] = ()
    uses: Uses = field(default_factory=Uses)


@dataclass(frozen=True, slots=True)
class Sources:
    """The rooms that a reading is taken from; `endpoints` and `parts` may still grow."""

    inventory: Inventory
    sampler: Sampler
    threads: Sequence[WorkerThread]
    endpoints: Sequence[Endpoint]
    supervisor: Supervisor
    blockers: Callable[[], Sequence[str]]
    collectors: list[Collector] = field(default_factory=list)
    uses: Cell[Uses] | None = None

    def read(self) -> Reading:
        """The present moment; call it on the event loop."""
        return Reading(
            snapshot=self.inventory.snapshot.value,
            samples=self.sampler.fresh(),
            sample_failures=self.sampler.samples.value.failures,
            stuck_calls=sum(thread.stuck for thread in self.threads),
            resources=tuple(
                ResourceReading(endpoint.plugin.resource, endpoint.registered, frozen(endpoint.service.stats))
                for endpoint in self.endpoints
            ),
            tasks=tuple(replace(state) for state in self.supervisor.states.values()),
            mailbox_depth=self.inventory.mailbox.depth,
            mailbox_dropped=self.inventory.mailbox.dropped,
            ready=not self.blockers(),
            collected=tuple(series for collect in self.collectors for series in collect()),
            uses=self.uses.value if self.uses else Uses(),
        )


def frozen(stats: ServiceStats) -> ServiceStats:
    """A copy that later calls do not change."""
    return replace(stats, calls=dict(stats.calls), seconds=dict(stats.seconds))


# The moving figures of one GPU as series.

MHZ = 1e6
# Bits of `nvmlClocksEventReasons` in nvml.h.
THROTTLE_REASONS = (
    (0x001, "idle"),
    (0x002, "applications_clocks"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal"),
    (0x040, "hw_thermal"),
    (0x080, "hw_power_brake"),
    (0x100, "display_clocks"),
)
_ACTIVITY = {
    "engine": d.GPU_ENGINE_ACTIVE,
    "sm": d.GPU_SM_ACTIVE,
    "tensor": d.GPU_TENSOR_ACTIVE,
    "memory": d.GPU_MEMORY_BANDWIDTH,
}


def sample_series(taken: TakenSample, labels: tuple[str, str]) -> Iterator[Series]:
    """The figures that this GPU has; `labels` are its UUID and index."""
    sample = taken.sample
    sized = bool(sample.memory_total_bytes)  # a GPU that hides its memory comes with a total of 0
    figures = (
        (d.GPU_UTILIZATION, sample.gpu_utilization_ratio),
        (d.GPU_MEMORY_UTILIZATION, sample.memory_utilization_ratio),
        (d.GPU_MEMORY_USED, sample.memory_used_bytes if sized else None),
        (d.GPU_MEMORY_TOTAL, sample.memory_total_bytes if sized else None),
        (d.GPU_POWER, sample.power_watts),
        (d.GPU_POWER_LIMIT, sample.power_limit_watts),
        (d.GPU_ENERGY, sample.energy_joules),
        (d.GPU_TEMPERATURE, sample.temperature_celsius),
        (d.GPU_PROCESSES, None if sample.processes is None else len(sample.processes)),
    )
    for definition, value in figures:
        if value is not None:
            yield definition, value, labels
    for name, mean, most in (
        ("utilization", d.GPU_UTILIZATION_MEAN, d.GPU_UTILIZATION_MOST),
        ("memory_used", None, d.GPU_MEMORY_MOST),
        ("power", d.GPU_POWER_MEAN, d.GPU_POWER_MOST),
        ("temperature", None, d.GPU_TEMPERATURE_MOST),
    ):
        span = taken.spans.get(name)
        if span is not None:
            yield most, span.most, labels
            if mean is not None:
                yield mean, span.mean, labels
    yield from _detailed(sample, labels)


def _detailed(sample: Sample, labels: tuple[str, str]) -> Iterator[Series]:
    for clock, mhz in sample.clocks_mhz.items():
        yield d.GPU_CLOCK, mhz * MHZ, (*labels, clock)
    if sample.throttle is not None:
        for bit, reason in THROTTLE_REASONS:
            yield d.GPU_THROTTLED, bool(sample.throttle & bit), (*labels, reason)
    for kind, count in (("corrected", sample.ecc_corrected), ("uncorrected", sample.ecc_uncorrected)):
        if count is not None:
            yield d.GPU_ECC_ERRORS, count, (*labels, kind)
    if sample.nvlink is not None:
        yield d.GPU_NVLINK, sample.nvlink.sent_bytes, (*labels, "sent")
        yield d.GPU_NVLINK, sample.nvlink.received_bytes, (*labels, "received")
        for kind, count in sample.nvlink.errors.items():
            yield d.GPU_NVLINK_ERRORS, count, (*labels, kind)
    for part, active in (sample.activity or {}).items():
        yield _ACTIVITY[part], active, labels
    if sample.pcie_bytes_per_second is not None:
        sent, received = sample.pcie_bytes_per_second
        yield d.GPU_PCIE, sent, (*labels, "sent")
        yield d.GPU_PCIE, received, (*labels, "received")


# The series of containers: the agent's own, and those under gpu-manager's names.


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


# The agent's own use, from /proc: a few figures in base units.

PROC_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    resident_bytes: int
    cpu_seconds: float
    threads: int
    open_fds: int
    start_time: float  # seconds since 1970


def read_process_use(proc: Path = PROC_SELF) -> ProcessUse:
    """Read the figures of this process, see proc(5). Blocks a little: call it off the loop."""
    stat = (proc / "stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the program's name in brackets and may hold blanks: count from behind it.
    fields = stat.rpartition(")")[2].split()
    threads, started_ticks, resident_pages = int(fields[17]), int(fields[19]), int(fields[21])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return ProcessUse(
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        threads=threads,
        open_fds=sum(1 for _ in (proc / "fd").iterdir()),
        start_time=time.time() - age,
    )


# A reading of the agent as series.

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
