"""The simulated machine's Python face: the NVML port without any library.

Every method makes the same NVML calls, in the same order, as the real binding does, so that an
injected fault strikes both faces alike.
"""

import time
from dataclasses import replace
from pathlib import Path

from agent.model.gpu import Driver, Gpu
from agent.model.health import RecoveryAction
from agent.nvml.port import (
    ACTIVITY,
    FIRST_WITH_MEMORY_LIMITS,
    ComputeMode,
    EventKind,
    GpuProcess,
    LinkPeer,
    NvLink,
    NvmlCode,
    NvmlError,
    NvmlEvent,
    NvmlGpuLost,
    NvmlNotSupported,
    PcieLevel,
    Probe,
    Sample,
    SampleRequest,
    error_for,
)
from agent.simulator import events, moving_figures
from agent.simulator.events import EventReader
from agent.simulator.fill import sysfs_bus_id
from agent.simulator.machine import SimulatedMachine
from agent.simulator.mig_calls import MigCalls
from agent.simulator.nvml_functions import ANY, number_of
from agent.simulator.state import NO_RECOVERY_ACTION, WHOLE_GPU, GpuState, Presence

_KINDS = {
    EventKind.XID: events.XID,
    EventKind.ECC_SINGLE: events.ECC_SINGLE,
    EventKind.ECC_DOUBLE: events.ECC_DOUBLE,
}
_PEERS = {0: LinkPeer.GPU, 2: LinkPeer.SWITCH}


class SimulatedNvml(MigCalls):
    """`NvmlPort` over a simulated machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._mapping = machine.mapping
        self._open = False
        self._events: EventReader | None = None
        self._at_open: tuple[int, ...] = ()
        self._described: set[int] = set()
        self._limits: dict[tuple[str, Path], int] = {}
        self._active: dict[int, bool] = {}  # slots that were asked for GPM, and whether they have it

    def open(self) -> Driver:
        """See the port."""
        state = self._mapping.state
        if state.library_missing:
            raise error_for(NvmlCode.LIBRARY_NOT_FOUND, "load", "the simulated node has no libnvidia-ml.so.1")
        self._strike("nvmlInit")
        if state.driver_mismatch:
            raise error_for(NvmlCode.LIB_RM_VERSION_MISMATCH, "nvmlInit")
        self._open = True
        self._at_open = self._machine.slots
        try:
            return self._driver()
        except NvmlError:
            self._open = False
            raise

    def _driver(self) -> Driver:
        state = self._mapping.state
        self._call("nvmlSystemGetDriverVersion")
        self._call("nvmlSystemGetNVMLVersion")
        self._call("nvmlSystemGetCudaDriverVersion")
        return Driver(
            version=state.driver_version.decode(),
            nvml_version=state.nvml_version.decode(),
            cuda_version=(state.cuda_version // 1000, state.cuda_version % 1000 // 10),
        )

    def close(self) -> None:
        """See the port."""
        if not self._open:
            return
        try:
            self.unwatch_all()
        finally:
            self._call("nvmlShutdown")
            self._active.clear()
            self._open = False

    def count(self) -> int:
        """See the port."""
        self._call("nvmlDeviceGetCount")
        return len(self._slots)

    def describe(self, index: int) -> Gpu:
        """See the port."""
        call = "nvmlDeviceGetHandleByIndex"
        slots = self._slots
        if not 0 <= index < len(slots):
            self._call(call)
            raise error_for(NvmlCode.INVALID_ARGUMENT, call)
        slot = slots[index]
        self._device(call, slot)
        self._device("nvmlDeviceGetUUID", slot)
        gpu = self._mapping.gpu(slot)
        minor = gpu.minor if self._offered("nvmlDeviceGetMinorNumber", slot) else index
        bus_id = self._bus_id(gpu) if self._offered("nvmlDeviceGetPciInfo", slot) else ""
        if bus_id:
            self._described.add(slot)
        named = self._offered("nvmlDeviceGetName", slot)
        sized = self._offered("nvmlDeviceGetMemoryInfo", slot)
        graded = self._offered("nvmlDeviceGetCudaComputeCapability", slot)
        capable = self._offered("nvmlDeviceGetMigMode", slot, has=bool(gpu.mig_capable))
        partitioned = bool(capable and gpu.mig_mode)
        return Gpu(
            uuid=gpu.uuid.decode(),
            index=index,
            minor=minor,
            pci_bus_id=bus_id,
            product=gpu.name.decode() if named else "unknown NVIDIA GPU",
            memory_bytes=gpu.memory_total if sized else 0,
            compute_capability=(gpu.cc_major, gpu.cc_minor) if graded else (0, 0),
            mig_enabled=partitioned,
            numa_node=gpu.numa_node if bus_id and gpu.numa_node >= 0 else None,
            instances=self._instances(slot) if partitioned else (),
            mig_switch=self._way_of_switching(slot) if capable else "",
        )

    def probe(self, uuid: str) -> Probe:
        """See the port."""
        slot = self._handle(uuid)
        gpu = self._mapping.gpu(slot)
        sized = self._offered("nvmlDeviceGetMemoryInfo", slot)
        ecc = self._offered("nvmlDeviceGetTotalEccErrors", slot, has=bool(gpu.ecc_supported))
        rows = self._offered("nvmlDeviceGetRemappedRows", slot, has=bool(gpu.remap_supported))
        pages = self._offered(
            "nvmlDeviceGetRetiredPagesPendingStatus", slot, has=bool(gpu.retirement_supported)
        )
        readable = self._offered("nvmlDeviceGetFieldValues", slot)
        readable = readable and gpu.recovery_action != NO_RECOVERY_ACTION
        return Probe(
            memory_used_bytes=gpu.memory_used if sized else 0,
            ecc_uncorrected=gpu.ecc_volatile_uncorrected if ecc else None,
            remap_pending=bool(gpu.remap_pending) if rows else None,
            remap_failed=bool(gpu.remap_failed) if rows else None,
            retirement_pending=bool(gpu.retirement_pending) if pages else None,
            action=RecoveryAction.of(gpu.recovery_action) if readable else None,
        )

    def sample(self, uuid: str, request: SampleRequest | None = None) -> Sample:
        """See the port."""
        slot = self._handle(uuid)
        sized = self._offered("nvmlDeviceGetMemoryInfo", slot)
        request = request or SampleRequest(time.time_ns() // 1000 - 1_000_000)
        sample = moving_figures.read_sample(self._mapping, slot, sized, request, self._offered)
        return replace(sample, activity=self._activity(slot)) if request.activity else sample

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """See the port."""
        return moving_figures.read_processes(self._mapping, self._handle(uuid), self._offered)

    def _activity(self, slot: int) -> dict[str, float] | None:
        """As `agent.nvml.sampling` asks: nothing of the first sample, nor after a failure."""
        gpu, before = self._mapping.gpu(slot), slot in self._active
        try:
            if not before:
                known = self._offered("nvmlGpmQueryDeviceSupport", slot)
                self._active[slot] = known and bool(gpu.gpm_supported)
            if not self._active[slot]:
                return None
            self._device("nvmlGpmSampleGet", slot)
        except NvmlError as error:
            self._active.pop(slot, None)
            if isinstance(error, NvmlGpuLost):
                raise
            return None
        return {name: gpu.activity[at] / 100 for at, name in enumerate(ACTIVITY)} if before else None

    def ancestor(self, uuid_a: str, uuid_b: str) -> PcieLevel:
        """See the port."""
        one, other = self._handle(uuid_a), self._handle(uuid_b)
        call = "nvmlDeviceGetTopologyCommonAncestor"
        self._device(call, one)
        self._present(call, other)
        return PcieLevel(self._mapping.gpu(one).ancestor[other])

    def links(self, uuid: str) -> tuple[NvLink, ...]:
        """See the port."""
        slot = self._handle(uuid)
        gpu = self._mapping.gpu(slot)
        found = []
        for number in range(gpu.link_count + 1):
            try:
                self._device("nvmlDeviceGetNvLinkState", slot)
            except NvmlError as error:
                if error.code == NvmlCode.INVALID_ARGUMENT or isinstance(error, NvmlNotSupported):
                    break
                raise
            if number == gpu.link_count:
                break
            link = gpu.links[number]
            if not link.active:
                continue
            typed = self._offered("nvmlDeviceGetNvLinkRemoteDeviceType", slot)
            named = self._offered("nvmlDeviceGetNvLinkRemotePciInfo", slot)
            peer = _PEERS.get(link.peer_type, LinkPeer.OTHER) if typed else LinkPeer.OTHER
            found.append(NvLink(peer, sysfs_bus_id(link.domain, link.bus, link.device) if named else ""))
        return tuple(found)

    def watch(self, uuid: str) -> frozenset[EventKind]:
        """See the port."""
        slot = self._handle(uuid)
        self._device("nvmlDeviceGetSupportedEventTypes", slot)
        supported = self._mapping.gpu(slot).supported_events
        kinds = frozenset(kind for kind, bit in _KINDS.items() if supported & bit)
        if not kinds:
            raise NvmlNotSupported(NvmlCode.NOT_SUPPORTED, "nvmlDeviceGetSupportedEventTypes")
        if self._events is None:
            self._call("nvmlEventSetCreate")
            self._events = EventReader(self._mapping)
        self._device("nvmlDeviceRegisterEvents", slot)
        self._events.register(slot, sum(_KINDS[kind] for kind in kinds))
        return kinds

    def unwatch_all(self) -> None:
        """See the port."""
        if self._events is not None:
            self._events = None
            self._call("nvmlEventSetFree")

    def wait(self, timeout_ms: int) -> NvmlEvent | None:
        """See the port."""
        if self._events is None:
            raise error_for(NvmlCode.UNINITIALIZED, "nvmlEventSetWait", "no GPU is registered for events")
        self._call("nvmlEventSetWait")
        event = self._events.wait(timeout_ms / 1000)
        if event is None:
            return None
        kind = next(kind for kind, bit in _KINDS.items() if bit == event.kind)
        data = event.data if kind is EventKind.XID else 0
        instance = None if WHOLE_GPU in event.instance else event.instance
        return NvmlEvent(self._machine.uuid(event.slot), kind, data, instance)

    def compute_mode(self, uuid: str) -> ComputeMode:
        """See the port."""
        slot = self._handle(uuid)
        self._device("nvmlDeviceGetComputeMode", slot)
        return ComputeMode(self._mapping.gpu(slot).compute_mode)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """See the port."""
        call = "nvmlDeviceSetComputeMode"
        slot = self._handle(uuid)
        self._device(call, slot)
        if mode is ComputeMode.EXCLUSIVE_THREAD or self._mapping.gpu(slot).mig_mode:
            raise error_for(NvmlCode.NOT_SUPPORTED, call)
        self._mapping.gpu(slot).compute_mode = int(mode)

    # -- what every NVML call does ------------------------------------------------------------------

    @property
    def _slots(self) -> tuple[int, ...]:
        """Slots in the order in which NVML enumerates them."""
        return self._at_open if self._mapping.state.enumerates_at_open else self._machine.slots

    def _strike(self, call: str, slot: int = ANY) -> None:
        if code := self._machine.faults.strike(number_of(call), slot):
            raise error_for(code, call)

    def memory_limit(self, uuid: str, cgroup: Path) -> int | None:
        """See the port."""
        self._limited("nvmlDeviceGetMemoryLimits", uuid)
        return self._limits.get((uuid, cgroup))

    def set_memory_limit(self, uuid: str, cgroup: Path, limit_bytes: int) -> None:
        """See the port. Nothing is kept to it."""
        self._limited("nvmlDeviceSetMemoryLimits", uuid)
        self._limits[uuid, cgroup] = limit_bytes

    def _limited(self, call: str, uuid: str) -> None:
        slot = self._handle(uuid)
        self._device(call, slot)
        driver = int(self._mapping.state.driver_version.split(b".")[0])
        if driver < FIRST_WITH_MEMORY_LIMITS or self._mapping.gpu(slot).mig_mode:
            raise error_for(NvmlCode.NOT_SUPPORTED, call)

    def _call(self, call: str) -> None:
        if not self._open:
            raise error_for(NvmlCode.UNINITIALIZED, call)
        self._strike(call)

    def _device(self, call: str, slot: int) -> None:
        if not self._open:
            raise error_for(NvmlCode.UNINITIALIZED, call)
        self._strike(call, slot)
        self._present(call, slot)

    def _present(self, call: str, slot: int) -> None:
        if self._mapping.gpu(slot).presence != Presence.PRESENT or slot not in self._machine.slots:
            raise error_for(NvmlCode.GPU_IS_LOST, call)

    def _offered(self, call: str, slot: int, *, has: bool = True) -> bool:
        """Make a call about a GPU; False where the GPU or the library does not offer it."""
        try:
            self._device(call, slot)
        except NvmlNotSupported:
            return False
        return has

    def _handle(self, uuid: str) -> int:
        try:
            return self._handle_by_uuid(uuid)
        except NvmlGpuLost as error:
            slot = next((slot for slot in self._described if self._machine.uuid(slot) == uuid), None)
            if error.code != NvmlCode.GPU_IS_LOST or slot is None:
                raise
        call = "nvmlDeviceGetHandleByPciBusId"
        if slot not in self._slots:
            self._call(call)
            raise error_for(NvmlCode.NOT_FOUND, call)
        self._device(call, slot)
        self._device("nvmlDeviceGetUUID", slot)
        return slot

    def _handle_by_uuid(self, uuid: str) -> int:
        call = "nvmlDeviceGetHandleByUUID"
        slot = next((slot for slot in self._slots if self._machine.uuid(slot) == uuid), None)
        if slot is None:
            self._call(call)
        else:
            self._device(call, slot)
        if self._mapping.state.lost_breaks_uuid_lookup:
            for other in self._slots:
                self._present(call, other)
        if slot is None:
            raise error_for(NvmlCode.NOT_FOUND, call)
        return slot

    @staticmethod
    def _bus_id(gpu: GpuState) -> str:
        return sysfs_bus_id(gpu.domain, gpu.bus, gpu.device)
