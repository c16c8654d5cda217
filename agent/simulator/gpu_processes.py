"""Processes on the simulated GPUs: what NVML's process lists and utilisation samples answer."""

import time
from collections.abc import Mapping as Figures

from agent.simulator.mapping import Mapping
from agent.simulator.profile import MIB
from agent.simulator.state import PROCESS_SLOTS, ProcessKind, ProcessState


class ProcessTable:
    """Processes of one machine; entries lie without gaps, so that readers stop at the count."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    def start(
        self,
        slot: int,
        pid: int,
        kind: ProcessKind = ProcessKind.COMPUTE,
        memory_mib: int = 0,
        gpu_instance: int = 0,
    ) -> None:
        """A process opens a GPU, or an instance by its number; its memory counts as used.

        Raises RuntimeError when the table is full.
        """
        with self._mapping.editing() as state:
            if state.process_count == PROCESS_SLOTS:
                raise RuntimeError(f"the simulated machine holds at most {PROCESS_SLOTS} processes")
            entry = state.processes[state.process_count]
            entry.slot, entry.pid, entry.kind = slot, pid, kind
            entry.gpu_instance = gpu_instance
            entry.memory_used = memory_mib * MIB
            entry.sm_utilization = entry.memory_utilization = 0
            entry.encoder_utilization = entry.decoder_utilization = 0
            entry.sampled_us = 0
            state.gpus[slot].memory_used += entry.memory_used
            state.process_count += 1

    def stop(self, pid: int) -> None:
        """A process ends on all its GPUs; harmless for an unknown one."""
        with self._mapping.editing() as state:
            position = 0
            while position < state.process_count:
                entry = state.processes[position]
                if entry.pid != pid:
                    position += 1
                    continue
                gpu = state.gpus[entry.slot]
                gpu.memory_used -= min(gpu.memory_used, entry.memory_used)
                state.process_count -= 1
                last = bytes(state.processes[state.process_count])
                state.processes[position] = ProcessState.from_buffer_copy(last)

    def work(self, pid: int, sm: int, memory: int = 0) -> None:
        """A fresh utilisation sample (percent) of a process, on all its GPUs."""
        now = time.time_ns() // 1000
        with self._mapping.editing() as state:
            for position in range(state.process_count):
                entry = state.processes[position]
                if entry.pid == pid:
                    entry.sm_utilization, entry.memory_utilization = sm, memory
                    entry.sampled_us = now

    def take_turns(self, percents: Figures[int, int]) -> None:
        """A fresh sample of processes that share one GPU by time slices; what each did in it, by PID.

        As NVML does (an H200, driver 580), all of it is put down to one of them, here the busiest.
        """
        busiest = max(percents, key=lambda pid: percents[pid], default=0)
        for pid in percents:
            self.work(pid, min(100, sum(percents.values())) if pid == busiest else 0)
