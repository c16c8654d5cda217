"""The real NVML, through nvidia-ml-py (module `pynvml`)."""

import ctypes
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pynvml

from agent.kit.files import inside
from agent.model.gpu import Driver, Gpu, normalise_bus_id
from agent.model.health import RecoveryAction
from agent.nvml import partitioning
from agent.nvml.event_watch import Opaque
from agent.nvml.event_watch import call as _call
from agent.nvml.event_watch import offered as _offered
from agent.nvml.partitioning import instances_of
from agent.nvml.port import (
    ComputeMode,
    EventKind,
    GpuInstance,
    GpuProcess,
    LinkPeer,
    MigProfile,
    NvLink,
    NvmlCode,
    NvmlDriverMismatch,
    NvmlError,
    NvmlEvent,
    NvmlGpuLost,
    NvmlLibraryMissing,
    NvmlNotSupported,
    Partition,
    PcieLevel,
    Probe,
    Sample,
    SampleRequest,
    error_for,
)
from agent.nvml.sampling import RECOVERY_ACTION, Activity, read_fields, read_processes, read_sample

# Finding and loading libnvidia-ml.so.1, before the binding asks the system loader for it.
#
# nvidia-ml-py opens the bare soname and takes no path. A library that is loaded already answers for its
# soname, so loading it here by full path serves driver roots (driver containers mount the driver under a
# directory of their own) and test doubles alike.

SONAME = "libnvidia-ml.so.1"

# Where distributions, driver containers and WSL put it, below the root of the driver.
_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
)


def find(roots: Iterable[Path]) -> Path | None:
    """The library under the first driver root that has it."""
    for root in roots:
        for folder in _FOLDERS:
            with suppress(OSError):  # a loop of links
                path = inside(root, f"{folder}/{SONAME}")
                if path.is_file():
                    return path
    return None


def preload(path: Path) -> ctypes.CDLL:
    """Load the library by path. Raises NvmlLibraryMissing when that cannot be."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        hint = "install the NVIDIA driver, or correct the driver root"
        raise NvmlLibraryMissing(
            NvmlCode.LIBRARY_NOT_FOUND, "dlopen", f"cannot load NVML from {path}: {error}; {hint}"
        ) from error


_KINDS = {
    EventKind.XID: pynvml.nvmlEventTypeXidCriticalError,
    EventKind.ECC_SINGLE: pynvml.nvmlEventTypeSingleBitEccError,
    EventKind.ECC_DOUBLE: pynvml.nvmlEventTypeDoubleBitEccError,
}
_KIND_OF = {bit: kind for kind, bit in _KINDS.items()}
_PEERS = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: LinkPeer.GPU,
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: LinkPeer.SWITCH,
}
_MOST_SHUTDOWNS = 16
_WHOLE_GPU = 0xFFFFFFFF  # as the number of an instance in an event
_NO_LIMIT = (1 << 64) - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX


class NvmlBinding:
    """`NvmlPort` over libnvidia-ml.so.1.

    `path` names the library; without it, the driver roots in `roots` are searched, then the system
    loader is asked. `sysfs` is where the NUMA nodes of PCI devices are read.
    """

    def __init__(
        self, path: Path | None = None, roots: tuple[Path, ...] = (), sysfs: Path = Path("/sys")
    ) -> None:
        self._path = path
        self._roots = roots
        self._sysfs = sysfs
        self._open = False
        self._memory_v2 = True
        self._bus_ids: dict[str, str] = {}  # as NVML spells them
        self._activity = Activity()
        self._event_set: Opaque = None
        self._watched: dict[int | None, str] = {}  # device handle -> UUID

    def open(self) -> Driver:
        path = self._path or find(self._roots)
        loaded = preload(path) if path is not None else None
        try:
            _call("nvmlInit")
        except NvmlLibraryMissing as error:
            where = ", ".join(map(str, self._roots)) or "no driver root"
            raise NvmlLibraryMissing(
                error.code,
                error.call,
                f"{SONAME} is neither below {where} nor known to the system loader: "
                "install the NVIDIA driver, mount its root, or have NVIDIA's container runtime start this "
                "container",
            ) from error
        self._open = True
        try:
            self._refuse_another_library(loaded, path)
            return self._driver()
        except NvmlError:
            self.close()
            raise

    @staticmethod
    def _refuse_another_library(loaded: ctypes.CDLL | None, path: Path | None) -> None:
        """nvidia-ml-py keeps the first library for the life of the process, whatever is on disk now."""
        if loaded is not None and pynvml.nvmlLib._handle != loaded._handle:  # noqa: SLF001 (no public name)
            raise NvmlDriverMismatch(
                NvmlCode.LIB_RM_VERSION_MISMATCH,
                "dlopen",
                f"{path} is not the NVML library that this process runs on (the driver was replaced): "
                "restart the process",
            )

    @staticmethod
    def _driver() -> Driver:
        version = _call("nvmlSystemGetDriverVersion")
        nvml_version = _call("nvmlSystemGetNVMLVersion")
        cuda = _call("nvmlSystemGetCudaDriverVersion_v2")
        return Driver(version, nvml_version, (cuda // 1000, cuda % 1000 // 10))

    def close(self) -> None:
        if not self._open:
            return
        try:
            self._activity.close()
            self.unwatch_all()
        finally:
            # Initialisations are counted, and the library holds the device files until the last is gone.
            for _ in range(_MOST_SHUTDOWNS):
                try:
                    _call("nvmlShutdown")
                except NvmlError as error:
                    if error.code != NvmlCode.UNINITIALIZED:
                        raise
                    break
            self._open = False

    def count(self) -> int:
        return int(_call("nvmlDeviceGetCount"))

    def describe(self, index: int) -> Gpu:
        """See the port. What the GPU does not offer is left out or guessed: it is never hidden for that."""
        handle = _call("nvmlDeviceGetHandleByIndex", index)
        uuid = _call("nvmlDeviceGetUUID", handle)
        minor = _offered("nvmlDeviceGetMinorNumber", handle)
        pci = _offered("nvmlDeviceGetPciInfo", handle)
        bus_id = ""
        if pci is not None:
            self._bus_ids[uuid] = _text(pci.busId)
            bus_id = normalise_bus_id(self._bus_ids[uuid])
        product = _offered("nvmlDeviceGetName", handle)
        _, total = self._memory(handle)
        capability = _offered("nvmlDeviceGetCudaComputeCapability", handle)
        mig = _offered("nvmlDeviceGetMigMode", handle)
        partitioned = mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        return Gpu(
            uuid=uuid,
            index=index,
            minor=index if minor is None else minor,
            pci_bus_id=bus_id,
            product=product or "unknown NVIDIA GPU",
            memory_bytes=total,
            compute_capability=(0, 0) if capability is None else (capability[0], capability[1]),
            mig_enabled=partitioned,
            numa_node=self._numa_node(bus_id) if bus_id else None,
            instances=instances_of(handle) if partitioned else (),
            mig_switch="" if mig is None else partitioning.way_of_switching(handle),
        )

    def probe(self, uuid: str) -> Probe:
        handle = self._handle(uuid)
        used, _ = self._memory(handle)
        ecc = _offered(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        rows = _offered("nvmlDeviceGetRemappedRows", handle)  # corrected, uncorrected, pending, failed
        pages = _offered("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        action = read_fields(handle, [RECOVERY_ACTION]).get(RECOVERY_ACTION)
        return Probe(
            memory_used_bytes=used,
            ecc_uncorrected=ecc,
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            retirement_pending=None if pages is None else pages == pynvml.NVML_FEATURE_ENABLED,
            action=None if action is None else RecoveryAction.of(action),
        )

    def sample(self, uuid: str, request: SampleRequest | None = None) -> Sample:
        handle = self._handle(uuid)
        used, total = self._memory(handle)
        request = request or SampleRequest(time.time_ns() // 1000 - 1_000_000)
        sample = read_sample(handle, used, total, request)
        return replace(sample, activity=self._activity.read(uuid, handle)) if request.activity else sample

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        return read_processes(self._handle(uuid))

    def ancestor(self, uuid_a: str, uuid_b: str) -> PcieLevel:
        one, other = self._handle(uuid_a), self._handle(uuid_b)
        return PcieLevel(_call("nvmlDeviceGetTopologyCommonAncestor", one, other))

    def links(self, uuid: str) -> tuple[NvLink, ...]:
        handle = self._handle(uuid)
        found = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = _call("nvmlDeviceGetNvLinkState", handle, link)
            except NvmlError as error:
                # How NVML says that there are no more links, or none at all.
                if error.code == NvmlCode.INVALID_ARGUMENT or isinstance(error, NvmlNotSupported):
                    break
                raise
            if active != pynvml.NVML_FEATURE_ENABLED:
                continue
            peer = _offered("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            pci = _offered("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            remote = "" if pci is None else normalise_bus_id(_text(pci.busId))
            found.append(NvLink(_PEERS.get(peer, LinkPeer.OTHER), remote))
        return tuple(found)

    def watch(self, uuid: str) -> frozenset[EventKind]:
        handle = self._handle(uuid)
        supported = _call("nvmlDeviceGetSupportedEventTypes", handle)
        kinds = frozenset(kind for kind, bit in _KINDS.items() if supported & bit)
        if not kinds:
            raise NvmlNotSupported(NvmlCode.NOT_SUPPORTED, "nvmlDeviceGetSupportedEventTypes")
        if self._event_set is None:
            self._event_set = _call("nvmlEventSetCreate")
        _call("nvmlDeviceRegisterEvents", handle, sum(_KINDS[kind] for kind in kinds), self._event_set)
        # A lost GPU cannot be asked for its UUID, and its last event is the one that matters most.
        self._watched[_address(handle)] = uuid
        return kinds

    def unwatch_all(self) -> None:
        if self._event_set is not None:
            doomed, self._event_set = self._event_set, None
            self._watched.clear()
            _call("nvmlEventSetFree", doomed)

    def wait(self, timeout_ms: int) -> NvmlEvent | None:
        if self._event_set is None:
            raise error_for(NvmlCode.UNINITIALIZED, "nvmlEventSetWait", "no GPU is registered for events")
        try:
            data = _call("nvmlEventSetWait", self._event_set, timeout_ms)
        except NvmlError as error:
            if error.code == NvmlCode.TIMEOUT:
                return None
            raise
        kind = _KIND_OF.get(data.eventType)
        if kind is None:
            return None
        uuid = self._watched.get(_address(data.device)) or _call("nvmlDeviceGetUUID", data.device)
        numbers = (data.gpuInstanceId, data.computeInstanceId)
        instance = None if _WHOLE_GPU in numbers else numbers
        return NvmlEvent(uuid, kind, int(data.eventData) if kind is EventKind.XID else 0, instance)

    def compute_mode(self, uuid: str) -> ComputeMode:
        return ComputeMode(_call("nvmlDeviceGetComputeMode", self._handle(uuid)))

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        _call("nvmlDeviceSetComputeMode", self._handle(uuid), int(mode))

    def instance_memory(self, instance: str) -> int:
        used, _ = self._memory(_call("nvmlDeviceGetHandleByUUID", instance))
        return used

    def partition(self, uuid: str) -> Partition:
        return partitioning.partition_of(self._handle(uuid))

    def make_instance(self, uuid: str, profile: MigProfile, start: int) -> int:
        return partitioning.make(self._handle(uuid), profile, start)

    def destroy_instance(self, uuid: str, expected: GpuInstance, device: str) -> None:
        partitioning.destroy(self._handle(uuid), expected, device)

    def set_mig_mode(self, uuid: str, enabled: bool) -> None:
        partitioning.switch(self._handle(uuid), enabled)

    def memory_limit(self, uuid: str, cgroup: Path) -> int | None:
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=bytes(cgroup))
        handle = self._handle(uuid)
        try:
            _call("nvmlDeviceGetMemoryLimits_v1", handle, limits)
        except NvmlError as error:
            if error.code == NvmlCode.NOT_FOUND:
                return None
            raise
        return None if limits.hardLimit == _NO_LIMIT else int(limits.hardLimit)

    def set_memory_limit(self, uuid: str, cgroup: Path, limit_bytes: int) -> None:
        # The soft limit reserves memory, and leaks into the cgroups above when this one goes.
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t(
            nameSpace=bytes(cgroup), softLimit=0, hardLimit=limit_bytes
        )
        _call("nvmlDeviceSetMemoryLimits_v1", self._handle(uuid), limits)

    def _handle(self, uuid: str) -> Opaque:
        """A fresh handle: a kept one goes on answering for a GPU that was reset under it."""
        try:
            return _call("nvmlDeviceGetHandleByUUID", uuid)
        except NvmlGpuLost as error:
            # The search by UUID asks every GPU, so nvml.h lets it fail when any other one is lost.
            bus_id = self._bus_ids.get(uuid)
            if error.code != NvmlCode.GPU_IS_LOST or bus_id is None:
                raise
        handle = _call("nvmlDeviceGetHandleByPciBusId", bus_id.encode())
        if (found := _call("nvmlDeviceGetUUID", handle)) != uuid:
            raise NvmlGpuLost(NvmlCode.NOT_FOUND, "nvmlDeviceGetUUID", f"{bus_id} is {found} now, not {uuid}")
        return handle

    def _memory(self, handle: Opaque) -> tuple[int, int]:
        """Bytes used and in total. Version 2 leaves out of `used` what the driver keeps for itself."""
        if self._memory_v2:
            try:
                info = _call("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
                return info.used, info.total
            except NvmlNotSupported as error:
                # One version for all calls: the two mean different things by "used".
                self._memory_v2 = error.code != NvmlCode.FUNCTION_NOT_FOUND
        info = _offered("nvmlDeviceGetMemoryInfo", handle)
        return (0, 0) if info is None else (info.used, info.total)

    def _numa_node(self, bus_id: str) -> int | None:
        try:
            node = int((self._sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None


def _address(handle: Opaque) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
