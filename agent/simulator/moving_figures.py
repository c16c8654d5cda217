"""The moving figures of a simulated GPU, with the calls of `agent.nvml.sampling` in the same order."""

from collections.abc import Iterator
from typing import Protocol

from agent.nvml.port import GpuProcess, NvmlCode, NvmlError, Sample, SampleRequest, Traffic
from agent.simulator.mapping import Mapping
from agent.simulator.state import GpuState, ProcessKind, ProcessState

KIB = 1024
CLOCKS = ("graphics", "sm", "memory", "video")
_MPS_SINCE = 7  # compute capability


class Offered(Protocol):
    """Makes an NVML call about a GPU; False where the GPU or the library does not offer it."""

    def __call__(self, call: str, slot: int, *, has: bool = True) -> bool: ...


def read_sample(mapping: Mapping, slot: int, sized: bool, request: SampleRequest, offered: Offered) -> Sample:
    """Everything that moves, after the memory was asked for with the answer `sized`."""
    gpu = mapping.gpu(slot)
    rates = offered("nvmlDeviceGetUtilizationRates", slot, has=not gpu.mig_mode)
    power = offered("nvmlDeviceGetPowerUsage", slot)
    heat = offered("nvmlDeviceGetTemperature", slot) or offered("nvmlDeviceGetTemperature", slot)
    clocks = {
        name: gpu.clocks_mhz[number]
        for number, name in enumerate(CLOCKS)
        if offered("nvmlDeviceGetClockInfo", slot)
    }
    reasons = "nvmlDeviceGetCurrentClocksEventReasons"
    throttle = offered(reasons, slot) or offered(reasons, slot)
    limit = corrected = uncorrected = fields = False
    if request.counters:
        limit = offered("nvmlDeviceGetEnforcedPowerLimit", slot)
        corrected, uncorrected = (
            offered("nvmlDeviceGetTotalEccErrors", slot, has=bool(gpu.ecc_supported)) for _ in range(2)
        )
        fields = offered("nvmlDeviceGetFieldValues", slot)
    processes = read_processes(mapping, slot, offered)
    busy, newest, stamps = _busy(mapping, slot, request, offered)
    return Sample(
        gpu_utilization_ratio=gpu.gpu_utilization / 100 if rates else None,
        memory_utilization_ratio=gpu.memory_utilization / 100 if rates else None,
        memory_used_bytes=gpu.memory_used if sized else 0,
        memory_total_bytes=gpu.memory_total if sized else 0,
        power_watts=gpu.power_mw / 1000 if power else None,
        temperature_celsius=float(gpu.temperature_c) if heat else None,
        power_limit_watts=gpu.power_limit_mw / 1000 if limit else None,
        energy_joules=gpu.energy_mj / 1000 if fields else None,
        clocks_mhz=clocks,
        throttle=gpu.event_reasons if throttle else None,
        ecc_corrected=gpu.ecc_volatile_corrected if corrected else None,
        ecc_uncorrected=gpu.ecc_volatile_uncorrected if uncorrected else None,
        nvlink=_traffic(gpu) if fields and gpu.link_count else None,
        pcie_bytes_per_second=_pcie(gpu, slot, offered) if request.pcie else None,
        processes=processes,
        busy=busy,
        newest_us=newest,
        busy_us=stamps,
    )


def _traffic(gpu: GpuState) -> Traffic:
    links = [gpu.links[number] for number in range(gpu.link_count)]
    errors = {
        "crc_flit": sum(link.crc_flit_errors for link in links),
        "crc_data": sum(link.crc_data_errors for link in links),
        "replay": sum(link.replay_errors for link in links),
        "recovery": sum(link.recovery_errors for link in links),
    }
    return Traffic(sum(link.tx_kib for link in links) * KIB, sum(link.rx_kib for link in links) * KIB, errors)


def _pcie(gpu: GpuState, slot: int, offered: Offered) -> tuple[float, float] | None:
    both = [offered("nvmlDeviceGetPcieThroughput", slot) for _ in range(2)]
    return (float(gpu.pcie_tx_kib_s * KIB), float(gpu.pcie_rx_kib_s * KIB)) if all(both) else None


def _on(mapping: Mapping, slot: int) -> Iterator[ProcessState]:
    state = mapping.state
    return (each for each in state.processes[: state.process_count] if each.slot == slot)


def read_processes(mapping: Mapping, slot: int, offered: Offered) -> tuple[GpuProcess, ...] | None:
    gpu = mapping.gpu(slot)
    plain = offered("nvmlDeviceGetComputeRunningProcesses", slot)
    clients = offered("nvmlDeviceGetMPSComputeRunningProcesses", slot, has=gpu.cc_major >= _MPS_SINCE)
    if not plain and not clients:
        return None
    found: dict[int, GpuProcess] = {}
    for listed, kind in ((plain, ProcessKind.COMPUTE), (clients, ProcessKind.MPS)):
        for each in _on(mapping, slot):
            if listed and each.kind & kind:
                found[each.pid] = GpuProcess(each.pid, each.memory_used, kind is ProcessKind.MPS)
    return tuple(found.values())


def _busy(
    mapping: Mapping, slot: int, request: SampleRequest, offered: Offered
) -> tuple[tuple[tuple[int, float], ...] | None, int, tuple[tuple[int, ...], ...]]:
    try:
        if not offered("nvmlDeviceGetProcessUtilization", slot, has=not mapping.gpu(slot).mig_mode):
            return None, 0, ()
    except NvmlError as error:
        if error.code != NvmlCode.NOT_FOUND:
            raise
        return (), 0, ()
    worked = [
        each
        for each in _on(mapping, slot)
        if request.since_us < each.sampled_us <= request.until_us and _used_anything(each)
    ]
    newest = max((each.sampled_us for each in worked), default=0)
    means = tuple((each.pid, min(each.sm_utilization, 100) / 100) for each in worked)
    return means, newest, tuple((each.sampled_us,) for each in worked)


def _used_anything(process: ProcessState) -> bool:
    return bool(
        process.sm_utilization
        | process.memory_utilization
        | process.encoder_utilization
        | process.decoder_utilization
    )
