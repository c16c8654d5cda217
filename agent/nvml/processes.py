"""The processes on GPUs, asked for at this moment rather than taken from the newest sampling round."""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from agent.nvml.nvml_errors import NvmlError, NvmlHung
from agent.nvml.port import NvmlPort, Sample, SampleRequest
from agent.nvml.sweep import Sweep
from agent.nvml.worker_thread import WorkerThread


class ProcessSweep:
    """Reads GPU by GPU in NVML's thread."""

    def __init__(self, nvml: NvmlPort, calls: WorkerThread) -> None:
        self._nvml = nvml
        self._sweep = Sweep[str, Sample](calls, self._read)

    async def pids(self, uuids: Collection[str]) -> Mapping[str, Collection[int]]:
        """The processes of each GPU; a GPU that cannot be read is left out."""
        found: dict[str, Collection[int]] = {}

        def note(uuid: str, outcome: Sample | NvmlError) -> bool:
            if isinstance(outcome, Sample) and outcome.processes is not None:
                found[uuid] = [each.pid for each in outcome.processes]
            return True

        with suppress(NvmlHung):
            await self._sweep.over(tuple(uuids), note)
        return found

    def _read(self, uuid: str) -> Sample:
        return self._nvml.sample(uuid, SampleRequest(time.time_ns() // 1000, counters=False))
