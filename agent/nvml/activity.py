"""Activity of a GPU's parts between two readings, by NVML's GPM: Hopper and newer, full GPUs.

NVML works it out from two samples that the caller keeps: those of a GPU are here, the older one first.
"""

from collections.abc import Mapping
from contextlib import suppress

import pynvml

from agent.nvml.nvml_errors import NvmlError, NvmlGpuLost
from agent.nvml.port import ACTIVITY
from agent.nvml.worker_thread import Opaque, call, offered

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
