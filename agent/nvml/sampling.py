"""One reading of a GPU's moving figures, call by call. Each may be missing on its own."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pynvml

from agent.nvml.event_watch import Opaque, call, first_offered, offered
from agent.nvml.port import (
    ACTIVITY,
    GpuProcess,
    NvmlCode,
    NvmlError,
    NvmlGpuLost,
    NvmlNotSupported,
    Sample,
    SampleRequest,
    Traffic,
)

# Activity of a GPU's parts between two readings, by NVML's GPM: Hopper and newer, full GPUs.
#
# NVML works it out from two samples that the caller keeps: those of a GPU are here, the older one first.

METRICS = dict(
    zip(
        ACTIVITY,
        (
            pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
            pynvml.NVML_GPM_METRIC_SM_UTIL,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        ),
        strict=True,
    )
)


class Activity:
    """The samples of all GPUs, by UUID; None: the GPU has no such figures."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Opaque] | None] = {}

    def read(self, uuid: str, handle: Opaque) -> Mapping[str, float] | None:
        """0..1 by part since the reading before; None: there was none, or the GPU has no such figures.

        Raises NvmlGpuLost. Other failures take nothing but these figures.
        """
        try:
            return self._read(uuid, handle)
        except NvmlGpuLost:
            self._forget(uuid)
            raise
        except NvmlError:
            self._forget(uuid)
            return None

    def close(self) -> None:
        """Free all samples, before the library is shut down."""
        for uuid in list(self._samples):
            self._forget(uuid)

    def _read(self, uuid: str, handle: Opaque) -> Mapping[str, float] | None:
        if uuid not in self._samples:
            support = offered("nvmlGpmQueryDeviceSupport", handle)
            self._samples[uuid] = [] if support is not None and support.isSupportedDevice else None
        samples = self._samples[uuid]
        if samples is None:
            return None
        fresh = samples.pop(0) if len(samples) == 2 else call("nvmlGpmSampleAlloc")
        samples.append(fresh)
        call("nvmlGpmSampleGet", handle, fresh)
        return _between(*samples) if len(samples) == 2 else None

    def _forget(self, uuid: str) -> None:
        for sample in self._samples.pop(uuid, None) or ():
            with suppress(NvmlError):
                call("nvmlGpmSampleFree", sample)


def _between(before: Opaque, after: Opaque) -> Mapping[str, float]:
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(METRICS)
    asked.sample1, asked.sample2 = before, after
    for number, metric in enumerate(METRICS.values()):
        asked.metrics[number].metricId = metric
    found = call("nvmlGpmMetricsGet", asked).metrics
    # What is no number, as between two samples at one moment, is in no range.
    return {
        name: found[number].value / 100
        for number, name in enumerate(METRICS)
        if found[number].nvmlReturn == pynvml.NVML_SUCCESS and 0 <= found[number].value <= 100
    }


ALL_LINKS = 0xFFFFFFFF
KIB = 1024
CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
_ENERGY = pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
_SENT = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
_RECEIVED = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_LINK_ERRORS = {
    "crc_flit": pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "crc_data": pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    "replay": pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
}
# The older function is in every driver until CUDA 14 drops it; the newer one is not in older drivers.
_TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
# Called "throttle reasons" before driver 535.
_THROTTLE = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
RECOVERY_ACTION = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_FIELDS = [_ENERGY, (_SENT, ALL_LINKS), (_RECEIVED, ALL_LINKS), *_LINK_ERRORS.values()]
_MEMBER = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
}


def read_sample(handle: Opaque, used: int, total: int, request: SampleRequest) -> Sample:
    """Everything that moves, for a GPU whose memory was read already. Raises NvmlError."""
    rates = offered("nvmlDeviceGetUtilizationRates", handle)
    power = offered("nvmlDeviceGetPowerUsage", handle)
    heat = first_offered(_TEMPERATURE, handle, pynvml.NVML_TEMPERATURE_GPU)
    clocks = {name: offered("nvmlDeviceGetClockInfo", handle, kind) for name, kind in CLOCKS.items()}
    throttle = first_offered(_THROTTLE, handle)
    limit = corrected = uncorrected = None
    fields: Mapping[int, int] = {}
    if request.counters:
        limit = offered("nvmlDeviceGetEnforcedPowerLimit", handle)
        corrected, uncorrected = (
            offered("nvmlDeviceGetTotalEccErrors", handle, kind, pynvml.NVML_VOLATILE_ECC)
            for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        )
        fields = read_fields(handle, _FIELDS)
    energy = fields.get(_ENERGY)
    processes = read_processes(handle)
    busy, newest, stamps = _busy(handle, request)
    return Sample(
        gpu_utilization_ratio=None if rates is None else rates.gpu / 100,
        memory_utilization_ratio=None if rates is None else rates.memory / 100,
        memory_used_bytes=used,
        memory_total_bytes=total,
        power_watts=None if power is None else power / 1000,
        temperature_celsius=None if heat is None else float(heat),
        power_limit_watts=None if limit is None else limit / 1000,
        energy_joules=None if energy is None else energy / 1000,
        clocks_mhz={name: mhz for name, mhz in clocks.items() if mhz is not None},
        throttle=throttle,
        ecc_corrected=corrected,
        ecc_uncorrected=uncorrected,
        nvlink=_traffic(fields),
        pcie_bytes_per_second=_pcie(handle) if request.pcie else None,
        processes=processes,
        busy=busy,
        newest_us=newest,
        busy_us=stamps,
    )


def read_fields(handle: Opaque, wanted: Sequence[int | tuple[int, int]]) -> Mapping[int, int]:
    """Field values that this GPU has: one call for all, each with a return code of its own.

    `wanted`: numbers of fields, or number and scope. Raises NvmlError.
    """
    values = offered("nvmlDeviceGetFieldValues", handle, list(wanted))
    return {
        one.fieldId: getattr(one.value, _MEMBER[one.valueType])
        for one in values or ()
        if one.nvmlReturn == pynvml.NVML_SUCCESS and one.valueType in _MEMBER
    }


def _traffic(fields: Mapping[int, int]) -> Traffic | None:
    if _SENT not in fields or _RECEIVED not in fields:
        return None
    errors = {name: fields[number] for name, number in _LINK_ERRORS.items() if number in fields}
    return Traffic(fields[_SENT] * KIB, fields[_RECEIVED] * KIB, errors)


def _pcie(handle: Opaque) -> tuple[float, float] | None:
    sent, received = (
        offered("nvmlDeviceGetPcieThroughput", handle, counter)
        for counter in (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    )
    return None if sent is None or received is None else (float(sent * KIB), float(received * KIB))


def read_processes(handle: Opaque) -> tuple[GpuProcess, ...] | None:
    plain = offered("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    # The only call that reports the memory of each client of an MPS server.
    clients = offered("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)
    if plain is None and clients is None:
        return None
    found: dict[int, GpuProcess] = {}
    for listed, mps in ((plain or (), False), (clients or (), True)):
        for each in listed:
            found[each.pid] = GpuProcess(each.pid, each.usedGpuMemory, mps)
    return tuple(found.values())


Busy = tuple[tuple[tuple[int, float], ...] | None, int, tuple[tuple[int, ...], ...]]


def _busy(handle: Opaque, request: SampleRequest) -> Busy:
    try:
        samples = call("nvmlDeviceGetProcessUtilization", handle, request.since_us)
    except NvmlNotSupported:
        return None, 0, ()
    except NvmlError as error:
        # Nobody worked: NVML says "not found", nvidia-ml-py makes an error of an empty success.
        if error.code in (NvmlCode.NOT_FOUND, pynvml.NVML_SUCCESS):
            return (), 0, ()
        raise
    return mean_use(
        [(one.pid, one.timeStamp, one.smUtil) for one in samples], request.since_us, request.until_us
    )


def mean_use(samples: list[tuple[int, int, int]], since_us: int, until_us: int = sys.maxsize) -> Busy:
    """Of (pid, microseconds, percent): each one's mean, 0..1; the newest time stamp (0: none); all of each.

    Entries of the ring that were never filled carry an old time stamp, and some drivers report percentages
    far above 100 for a process that just ended: the former are dropped, the latter clipped.
    """
    sums: dict[int, list[int]] = {}
    stamps: dict[int, set[int]] = {}
    newest = 0
    for pid, stamp, percent in samples:
        if since_us < stamp <= until_us:
            sums.setdefault(pid, []).append(min(percent, 100))
            stamps.setdefault(pid, set()).add(stamp)
            newest = max(newest, stamp)
    means = tuple((pid, sum(values) / len(values) / 100) for pid, values in sums.items())
    return means, newest, tuple(tuple(sorted(found)) for found in stamps.values())
