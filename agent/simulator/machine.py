"""The simulated machine: GPUs of a profile in shared memory, changed by tests and the demo.

GPUs are named by slot (their position in the profile, which stays) or by UUID, never by NVML's
enumeration index, which moves when GPUs come and go. All changes come from Python code of one
process at a time; the only word that readers write is the compute mode.
"""

from collections.abc import Mapping as ReadOnlyMapping
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from agent.model.health import RecoveryAction
from agent.nvml.port import NvmlCode
from agent.simulator import events, mig
from agent.simulator.events import RawEvent
from agent.simulator.faults import Fault, FaultTable
from agent.simulator.fill import fill_gpu
from agent.simulator.gpu_processes import ProcessTable
from agent.simulator.mapping import Mapping
from agent.simulator.profile import MIB, Profile
from agent.simulator.profiles import profile_named
from agent.simulator.state import MAX_GPUS, NO_RECOVERY_ACTION, WHOLE_GPU, FaultKind, GpuState, Presence
from agent.simulator.sysfs import write_sysfs

GpuRef = int | str


class SimulatedMachine:
    """One machine; several objects (and C libraries) may look at the same file."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.faults = FaultTable(mapping)
        self.processes = ProcessTable(mapping)

    @classmethod
    def create(
        cls, profile: Profile | str, path: Path | None = None, hidden: Sequence[int] = (), node: str = ""
    ) -> Self:
        """A healthy, idle machine; with `path` in a file that other processes and the C library open.

        `hidden` slots are known but not plugged in yet (see `add`). Machines of several `node`s differ in
        their GPUs' UUIDs.
        """
        shape = profile_named(profile) if isinstance(profile, str) else profile
        mapping = Mapping.create(path)
        state = mapping.state
        state.profile = shape.name.encode()
        state.driver_version = shape.driver_version.encode()
        state.nvml_version = shape.nvml_version.encode()
        state.cuda_version = shape.cuda_version[0] * 1000 + shape.cuda_version[1] * 10
        for slot in range(len(shape.places)):
            fill_gpu(state.gpus[slot], shape, slot)
            state.gpus[slot].uuid = shape.uuid_of(slot, node).encode()
        machine = cls(mapping)
        machine._enumerate([slot for slot in range(len(shape.places)) if slot not in set(hidden)])
        if path is not None:
            Mapping.reveal(path)
        return machine

    @classmethod
    def attach(cls, path: Path) -> Self:
        """The machine in a file. Raises MappingError, FileNotFoundError."""
        return cls(Mapping.attach(path))

    # -- who is there -----------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        """The profile that the machine was made from."""
        return profile_named(self.mapping.state.profile.decode())

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots in enumeration order."""
        return self.mapping.consistent(lambda state: tuple(state.order[: state.gpu_count]))

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs in enumeration order."""
        return tuple(self.uuid(slot) for slot in self.slots)

    def uuid(self, slot: int) -> str:
        """UUID of the GPU in a slot."""
        return self.mapping.gpu(slot).uuid.decode()

    def slot(self, gpu: GpuRef) -> int:
        """Slot of a GPU. Raises ValueError for one that the machine never had."""
        state = self.mapping.state
        for slot in range(MAX_GPUS):
            if state.gpus[slot].used and gpu in (slot, state.gpus[slot].uuid.decode()):
                return slot
        raise ValueError(f"the machine has no GPU {gpu!r}")

    def gpu(self, gpu: GpuRef) -> GpuState:
        """The live state of a GPU: single fields may be set directly."""
        return self.mapping.gpu(self.slot(gpu))

    # -- figures ----------------------------------------------------------------------------------

    def load(
        self,
        gpu: GpuRef,
        *,
        utilization: int | None = None,
        memory_utilization: int | None = None,
        memory_used_mib: int | None = None,
        power_w: float | None = None,
        temperature_c: int | None = None,
    ) -> None:
        """Set moving figures: percent, MiB, watts, degrees Celsius; what is not named stays."""
        one = self.gpu(gpu)
        with self.mapping.editing():
            if utilization is not None:
                one.gpu_utilization = utilization
            if memory_utilization is not None:
                one.memory_utilization = memory_utilization
            if memory_used_mib is not None:
                one.memory_used = min(memory_used_mib * MIB, one.memory_total - one.memory_reserved)
            if power_w is not None:
                one.power_mw = round(power_w * 1000)
            if temperature_c is not None:
                one.temperature_c = temperature_c

    def set_mig(self, gpu: GpuRef, *, enabled: bool) -> None:
        """Switch MIG mode; instances go with it. Raises ValueError for a GPU without it."""
        one = self.gpu(gpu)
        if not one.mig_capable:
            raise ValueError(f"{one.name.decode()} has no MIG mode")
        with self.mapping.editing():
            mig.switch(one, enabled=enabled)

    def make_instance(self, gpu: GpuRef, profile: str) -> str:
        """An instance of a GPU in MIG mode; its UUID. Raises ValueError: no room, or no such profile."""
        with self.mapping.editing():
            return mig.make(self.gpu(gpu), profile).uuid.decode()

    def destroy_instance(self, gpu: GpuRef, instance: str) -> None:
        """Somebody destroys an instance, held or not. Raises ValueError."""
        with self.mapping.editing():
            mig.destroy(self.gpu(gpu), instance)

    def reboot(self) -> None:
        """Instances do not survive it, nor a reset of their GPU; MIG mode is as it was last asked for."""
        with self.mapping.editing() as state:
            for one in state.gpus:
                mig.switch(one, enabled=bool(one.mig_pending))

    # -- events and sickness ----------------------------------------------------------------------

    def event(self, gpu: GpuRef, kind: int, data: int = 0) -> None:
        """Send an NVML event (`events.XID` and others) to the sets that registered for it."""
        events.publish(self.mapping, RawEvent(self.slot(gpu), kind, data))

    def xid(self, gpu: GpuRef, number: int, instance: str = "") -> None:
        """The driver reports an Xid of a GPU, or of one of its instances alone."""
        parts = [each for each in self.gpu(gpu).instances if instance and each.uuid.decode() == instance]
        numbers = [(each.gpu_instance, each.compute_instance) for each in parts] or [(WHOLE_GPU, WHOLE_GPU)]
        events.publish(self.mapping, RawEvent(self.slot(gpu), events.XID, number, numbers[0]))

    def lose(self, gpu: GpuRef) -> None:
        """The GPU answers no more, and nobody says so."""
        self.gpu(gpu).presence = Presence.LOST

    def fall_off_bus(self, gpu: GpuRef, *, xid: bool = True) -> None:
        """The GPU is gone from the bus; the driver reports Xid 79, if it gets to it."""
        self.gpu(gpu).presence = Presence.FALLEN
        if xid:
            self.xid(gpu, 79)

    def restore(self, gpu: GpuRef) -> None:
        """The GPU is as after a reset: there, counters at zero, nothing pending."""
        one = self.gpu(gpu)
        with self.mapping.editing():
            one.presence = Presence.PRESENT
            one.ecc_volatile_corrected = one.ecc_volatile_uncorrected = 0
            one.remap_pending = one.remap_failed = one.retirement_pending = 0
            if one.recovery_action != NO_RECOVERY_ACTION:
                one.recovery_action = RecoveryAction.NONE

    def ecc_double(self, gpu: GpuRef, count: int = 1, *, event: bool = True) -> None:
        """Uncorrectable memory errors: counted, and reported as an event of their kind."""
        one = self.gpu(gpu)
        with self.mapping.editing():
            one.ecc_volatile_uncorrected += count
            one.ecc_aggregate_uncorrected += count
        if event:
            self.event(gpu, events.ECC_DOUBLE)

    def ecc_single(self, gpu: GpuRef, count: int = 1, *, event: bool = True) -> None:
        """Corrected memory errors."""
        one = self.gpu(gpu)
        with self.mapping.editing():
            one.ecc_volatile_corrected += count
            one.ecc_aggregate_corrected += count
        if event:
            self.event(gpu, events.ECC_SINGLE)

    def remap_pending(self, gpu: GpuRef, *, failed: bool = False) -> None:
        """A row (before Ampere: a page) waits for a reset to be taken out of use; or that failed."""
        one = self.gpu(gpu)
        with self.mapping.editing():
            if one.remap_supported:
                one.remap_uncorrectable += 1
                one.remap_pending, one.remap_failed = 1, int(failed)
            else:
                one.retired_double += 1
                one.retirement_pending = 1

    def recovery_action(self, gpu: GpuRef, action: RecoveryAction | None) -> None:
        """The recovery action that the driver asks for; None: an older driver, which has none."""
        self.gpu(gpu).recovery_action = NO_RECOVERY_ACTION if action is None else action

    # -- calls that misbehave ---------------------------------------------------------------------

    def slow(self, call: str | None, milliseconds: int, gpu: GpuRef | None = None) -> Fault:
        """Calls of an NVML function (None: of all) take longer."""
        return self.faults.add(FaultKind.SLOW, call, self._maybe(gpu), milliseconds=milliseconds)

    def hang(self, call: str | None, gpu: GpuRef | None = None) -> Fault:
        """Calls of an NVML function never return, until the fault is released."""
        return self.faults.add(FaultKind.HANG, call, self._maybe(gpu))

    def fail(
        self, call: str | None, code: NvmlCode | int, gpu: GpuRef | None = None, times: int | None = None
    ) -> Fault:
        """Calls of an NVML function answer an error, `times` times or for ever."""
        return self.faults.add(FaultKind.FAIL, call, self._maybe(gpu), code=int(code), times=times)

    def clear_faults(self) -> None:
        """Release all faults of calls; sick GPUs stay sick (see `restore`)."""
        self.faults.remove()

    # -- the driver -------------------------------------------------------------------------------

    def driver_mismatch(self, *, present: bool = True) -> None:
        """The user-space library does not fit the kernel module: initialisation fails."""
        self.mapping.state.driver_mismatch = int(present)

    def library_missing(self, *, missing: bool = True) -> None:
        """There is no libnvidia-ml.so.1 (Python face only: the C library is a file to move)."""
        self.mapping.state.library_missing = int(missing)

    def lost_breaks_uuid_lookup(self, *, broken: bool = True) -> None:
        """One lost GPU makes looking up any GPU by UUID fail, as nvml.h allows the driver to."""
        self.mapping.state.lost_breaks_uuid_lookup = int(broken)

    def enumerates_at_open(self, *, frozen: bool = True) -> None:
        """NVML learns of plugged GPUs only when it is opened again, instead of at every count."""
        self.mapping.state.enumerates_at_open = int(frozen)

    # -- plugging ---------------------------------------------------------------------------------

    def hide(self, gpu: GpuRef) -> None:
        """Take a GPU out of the machine: the ones behind it move up in the enumeration."""
        gone = self.slot(gpu)
        self._enumerate([slot for slot in self.slots if slot != gone])

    def add(self, gpu: GpuRef) -> None:
        """Plug a hidden GPU in: enumeration follows the PCI addresses, as NVML's does."""
        one = self.slot(gpu)
        self.restore(one)
        self._enumerate(sorted({*self.slots, one}, key=self._address))

    def renumber(self, order: Sequence[GpuRef], minors: ReadOnlyMapping[GpuRef, int] | None = None) -> None:
        """Another enumeration order, and other minor numbers, of the same GPUs."""
        for gpu, minor in (minors or {}).items():
            self.gpu(gpu).minor = minor
        self._enumerate([self.slot(gpu) for gpu in order])

    def write_sysfs(self, directory: Path) -> Path:
        """Write what the agent reads of /sys for these GPUs under `directory`; answers it."""
        write_sysfs(self.mapping.state, directory)
        return directory

    # -- inner ------------------------------------------------------------------------------------

    def _maybe(self, gpu: GpuRef | None) -> int | None:
        return None if gpu is None else self.slot(gpu)

    def _address(self, slot: int) -> tuple[int, int, int]:
        one = self.mapping.gpu(slot)
        return (one.domain, one.bus, one.device)

    def _enumerate(self, slots: Sequence[int]) -> None:
        with self.mapping.editing() as state:
            for index, slot in enumerate(slots):
                state.order[index] = slot
            state.gpu_count = len(slots)
