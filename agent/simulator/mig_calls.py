"""The simulated machine's Python face, as far as it is about MIG; see `agent.simulator.nvml`."""

from abc import ABC, abstractmethod
from contextlib import suppress

from agent.model.gpu import Instance
from agent.nvml.partitioning import PASSED_OVER
from agent.nvml.port import (
    GpuInstance,
    MigProfile,
    NvmlCode,
    NvmlError,
    NvmlLeftOver,
    NvmlNotSupported,
    Partition,
    error_for,
)
from agent.simulator import mig
from agent.simulator.machine import SimulatedMachine
from agent.simulator.mapping import Mapping
from agent.simulator.state import GpuState, InstanceState, MigProfileState, ProcessKind

_INSTANCE_KINDS, _COMPUTE_KINDS = 18, 9  # of the newest NVML
_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}  # of the kinds of compute instances that there are
_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses", ProcessKind.COMPUTE),
    ("nvmlDeviceGetMPSComputeRunningProcesses", ProcessKind.MPS),
    ("nvmlDeviceGetGraphicsRunningProcesses", ProcessKind.GRAPHICS),
)


class MigCalls(ABC):
    """Instances: seen, made and destroyed."""

    _machine: SimulatedMachine
    _mapping: Mapping

    @property
    @abstractmethod
    def _slots(self) -> tuple[int, ...]: ...

    @abstractmethod
    def _call(self, call: str) -> None: ...

    @abstractmethod
    def _device(self, call: str, slot: int) -> None: ...

    @abstractmethod
    def _offered(self, call: str, slot: int, *, has: bool = True) -> bool: ...

    @abstractmethod
    def _handle(self, uuid: str) -> int: ...

    def _instances(self, slot: int) -> tuple[Instance, ...]:
        if not self._offered("nvmlDeviceGetMaxMigDeviceCount", slot):
            return ()
        found = []
        for each in self._mapping.gpu(slot).instances:
            calls = ("Attributes", "Name", "UUID", "GpuInstanceId", "ComputeInstanceId") if each.used else ()
            try:
                for call in ("MigDeviceHandleByIndex", *calls):
                    self._device(f"nvmlDeviceGet{call}", slot)
            except NvmlError as error:
                if error.code not in PASSED_OVER:
                    raise
                continue
            if not each.used:
                continue
            numbers = (each.gpu_instance, each.compute_instance)
            size, profile = each.memory_total, each.profile.decode()
            shape, media = (each.multiprocessors, each.slices, each.slices), (0, 0, 0, each.media, each.media)
            found.append(Instance(each.uuid.decode(), *numbers, profile, size, *shape, media))
        return tuple(found)

    def instance_memory(self, instance: str) -> int:
        """See the port."""
        call = "nvmlDeviceGetHandleByUUID"
        for slot in self._slots:
            for each in self._mapping.gpu(slot).instances:
                if each.used and each.uuid.decode() == instance:
                    self._device(call, slot)
                    self._offered("nvmlDeviceGetMemoryInfo", slot)
                    return int(each.memory_used)
        self._call(call)
        raise error_for(NvmlCode.NOT_FOUND, call)

    def partition(self, uuid: str) -> Partition:
        """See the port."""
        slot = self._handle(uuid)
        gpu = self._mapping.gpu(slot)
        if not (self._offered("nvmlDeviceGetMigMode", slot, has=bool(gpu.mig_capable)) and gpu.mig_mode):
            text = "the GPU is not in MIG mode"
            raise NvmlNotSupported(NvmlCode.NOT_SUPPORTED, "nvmlDeviceGetMigMode", text)
        for _ in range(_INSTANCE_KINDS):
            self._kind("nvmlDeviceGetGpuInstanceProfileInfo", slot)
        found = [each for profile in mig.profiles_of(gpu).values() for each in self._made(slot, gpu, profile)]
        profiles = []
        for profile in mig.profiles_of(gpu).values():
            for _ in range(2):
                self._device("nvmlDeviceGetGpuInstancePossiblePlacements", slot)
            profiles.append(self._profile(profile))
        in_order = sorted(profiles, key=lambda each: self._kind_of(gpu, each.number))
        ranks = {each.number: at for at, each in enumerate(in_order)}
        instances = tuple(sorted(found, key=lambda each: ranks[each.profile]))
        return Partition(tuple(in_order), instances, self._instances(slot))

    def _kind(self, call: str, slot: int) -> None:
        try:
            self._device(call, slot)
        except NvmlError as error:
            if error.code not in (NvmlCode.NOT_SUPPORTED, NvmlCode.INVALID_ARGUMENT):
                raise

    @staticmethod
    def _kind_of(gpu: GpuState, number: int) -> int:
        return next(int(each.kind) for each in gpu.mig_profiles if each.slices and each.number == number)

    @staticmethod
    def _profile(state: MigProfileState) -> MigProfile:
        starts = tuple(start for start in range(8) if state.starts >> start & 1)
        return MigProfile(state.number, state.name.decode(), state.slices, state.eighths, starts, state.most)

    def _made(self, slot: int, gpu: GpuState, profile: MigProfileState) -> list[GpuInstance]:
        self._device("nvmlDeviceGetGpuInstances", slot)
        found = []
        for each in mig.there(gpu):
            if each.profile_number != profile.number:
                continue
            self._device("nvmlGpuInstanceGetInfo", slot)
            self._computes(slot, each)
            numbers = (each.compute_instance,) if each.used else ()
            if each.used:
                self._device("nvmlComputeInstanceGetInfo", slot)
            place = (each.start, each.eighths)
            found.append(
                GpuInstance(each.gpu_instance, each.profile_number, *place, numbers, bool(each.used))
            )
        return found

    def _computes(self, slot: int, instance: InstanceState) -> None:
        for kind in range(_COMPUTE_KINDS):
            self._kind("nvmlGpuInstanceGetComputeInstanceProfileInfo", slot)
            if _SLICES.get(kind, 8) <= instance.slices:
                self._device("nvmlGpuInstanceGetComputeInstances", slot)

    def make_instance(self, uuid: str, profile: MigProfile, start: int) -> int:
        """See the port."""
        slot = self._handle(uuid)
        gpu, call = self._mapping.gpu(slot), "nvmlDeviceCreateGpuInstanceWithPlacement"
        self._device(call, slot)
        state = next((each for each in gpu.mig_profiles if each.number == profile.number), None)
        if not gpu.mig_mode or state is None:
            raise error_for(NvmlCode.NOT_SUPPORTED, call)
        with self._mapping.editing():
            try:
                made = mig.begin(gpu, state, start)
            except mig.Refusal as error:
                raise error_for(error.code, call) from error
        try:
            self._device("nvmlGpuInstanceGetInfo", slot)
            self._kind("nvmlGpuInstanceGetComputeInstanceProfileInfo", slot)
            self._device("nvmlGpuInstanceCreateComputeInstance", slot)
        except NvmlError as error:
            try:
                self._device("nvmlGpuInstanceDestroy", slot)
            except NvmlError as again:
                text = f"{error}; and what was made of it cannot be destroyed: {again}"
                raise NvmlLeftOver(error.code, error.call, text) from error
            with self._mapping.editing():
                made.bare = 0
            raise
        with self._mapping.editing():
            made.used, made.bare = 1, 0
        return int(made.gpu_instance)

    def destroy_instance(self, uuid: str, expected: GpuInstance, device: str) -> None:
        """See the port."""
        slot, number = self._handle(uuid), expected.number
        gpu, call = self._mapping.gpu(slot), "nvmlDeviceGetGpuInstanceById"
        self._device(call, slot)
        found = next((each for each in mig.there(gpu) if each.gpu_instance == number), None)
        if found is None:
            raise error_for(NvmlCode.NOT_FOUND, call)
        self._device("nvmlGpuInstanceGetInfo", slot)
        self._computes(slot, found)
        if found.used:
            self._device("nvmlComputeInstanceGetInfo", slot)
        there = (found.profile_number, found.start, (found.compute_instance,) if found.used else ())
        other = found.used and device not in ("", found.uuid.decode())
        if other or there != (expected.profile, expected.start, expected.computes):
            raise error_for(NvmlCode.NOT_FOUND, call, f"GPU instance {number} is another one by now")
        if found.used:
            self._refuse_busy(slot, number)
            self._device("nvmlComputeInstanceDestroy", slot)
            with self._mapping.editing():
                found.used, found.bare = 0, 1
        self._device("nvmlGpuInstanceDestroy", slot)
        with self._mapping.editing():
            found.bare = 0

    def _refuse_busy(self, slot: int, number: int) -> None:
        for call, kind in _LISTS:
            self._offered(call, slot)
            state = self._mapping.state
            pids = [
                str(each.pid)
                for each in state.processes[: state.process_count]
                if (each.slot, each.gpu_instance) == (slot, number) and each.kind & kind
            ]
            if pids:
                raise error_for(NvmlCode.IN_USE, call, f"processes are on it: {', '.join(pids[:5])}")

    def _way_of_switching(self, slot: int) -> str:
        known = self._offered("nvmlDeviceGetFieldValues", slot)
        return "live" if known and not self._mapping.gpu(slot).mig_needs_reset else "reset"

    def set_mig_mode(self, uuid: str, enabled: bool) -> None:
        """See the port."""
        slot = self._handle(uuid)
        gpu, call = self._mapping.gpu(slot), "nvmlDeviceSetMigMode"
        self._device(call, slot)
        if not gpu.mig_capable:
            raise error_for(NvmlCode.NOT_SUPPORTED, call)
        state = self._mapping.state
        if mig.there(gpu) or any(each.slot == slot for each in state.processes[: state.process_count]):
            # As the binding does: it would be pending.
            gpu.mig_pending = int(enabled)
            with suppress(NvmlError):
                self._device(call, slot)
                gpu.mig_pending = int(not enabled)
            raise error_for(NvmlCode.IN_USE, call)
        with self._mapping.editing():
            mig.switch(gpu, enabled=enabled)
