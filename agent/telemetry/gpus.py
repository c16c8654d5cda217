"""The moving figures of one GPU as series."""

from collections.abc import Iterator

from agent.nvml.port import Sample
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series
from agent.telemetry.sampler import TakenSample

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
