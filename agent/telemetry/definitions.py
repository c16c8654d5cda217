"""Every metric of the agent by name, kind, labels and meaning.

The exposition and `docs/metrics.md` both follow this file. Names carry the prefix `gpu_agent_` and base
units (bytes, seconds, ratio 0..1, watts, celsius), as Prometheus' naming rules ask. A counter's name
stands here without `_total`, an info's without `_info`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

PREFIX = "gpu_agent_"
_UNITS = ("bytes", "seconds", "ratio", "watts", "celsius", "joules", "hertz")


@dataclass(frozen=True, slots=True)
class Definition:
    name: str
    kind: Literal["gauge", "counter", "info"]
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """The unit that the name ends in, as OpenMetrics declares it; empty where it has none."""
        return next((unit for unit in _UNITS if self.name.endswith(f"_{unit}")), "")

    @property
    def series(self) -> str:
        """The name as a query writes it."""
        return self.name + {"gauge": "", "counter": "_total", "info": "_info"}[self.kind]


ALL: list[Definition] = []


def _define(
    kind: Literal["gauge", "counter", "info"], name: str, labels: tuple[str, ...], text: str
) -> Definition:
    definition = Definition(PREFIX + name, kind, labels, text)
    ALL.append(definition)
    return definition


_gauge, _counter, _info = partial(_define, "gauge"), partial(_define, "counter"), partial(_define, "info")
_GPU = ("gpu", "index")  # the UUID, and NVML's index, which may change

# Each GPU. Moving figures are missing while a GPU cannot be read, rather than stale.
GPU_INFO = _info(
    "gpu",
    (*_GPU, "product", "pci_bus_id", "compute_capability", "numa_node"),
    "A GPU seen since the agent started, lost ones included; numa_node: empty where there is none.",
)
GPU_HEALTHY = _gauge("gpu_healthy", _GPU, "1 if the GPU can be offered, 0 if not.")
GPU_UTILIZATION = _gauge(
    "gpu_utilization_ratio", _GPU, "Part of the driver's last sample period in which a kernel ran."
)
GPU_MEMORY_UTILIZATION = _gauge(
    "gpu_memory_utilization_ratio", _GPU, "Part of that period in which its memory was read or written."
)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", _GPU, "Memory in use, by all processes.")
GPU_MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", _GPU, "Memory there is.")
GPU_POWER = _gauge("gpu_power_watts", _GPU, "Power drawn by the whole board.")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", _GPU, "Temperature of the chip.")
GPU_UTILIZATION_MEAN = _gauge("gpu_utilization_mean_ratio", _GPU, "Its mean over sampling.windowSeconds.")
GPU_UTILIZATION_MOST = _gauge("gpu_utilization_max_ratio", _GPU, "Its maximum over sampling.windowSeconds.")
GPU_MEMORY_MOST = _gauge("gpu_memory_used_max_bytes", _GPU, "Maximum over sampling.windowSeconds.")
GPU_POWER_MEAN = _gauge("gpu_power_mean_watts", _GPU, "Mean over sampling.windowSeconds.")
GPU_POWER_MOST = _gauge("gpu_power_max_watts", _GPU, "Maximum over sampling.windowSeconds.")
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", _GPU, "Power limit.")
GPU_ENERGY = _counter("gpu_energy_joules", _GPU, "Energy used since the driver was loaded.")
GPU_TEMPERATURE_MOST = _gauge("gpu_temperature_max_celsius", _GPU, "Maximum over sampling.windowSeconds.")
GPU_CLOCK = _gauge("gpu_clock_hertz", (*_GPU, "clock"), "Clock rates: graphics, sm, memory, video.")
GPU_THROTTLED = _gauge(
    "gpu_throttled",
    (*_GPU, "reason"),
    "1 while clocks are held down: idle, applications_clocks, sw_power_cap, hw_slowdown, "
    "sync_boost, sw_thermal, hw_thermal, hw_power_brake, display_clocks.",
)
GPU_ECC_ERRORS = _counter(
    "gpu_ecc_errors", (*_GPU, "type"), "Memory errors since the driver was loaded: corrected, uncorrected."
)
GPU_NVLINK = _counter(
    "gpu_nvlink_bytes",
    (*_GPU, "direction"),
    "Over all NVLinks since the driver was loaded: sent, received.",
)
GPU_NVLINK_ERRORS = _counter(
    "gpu_nvlink_errors",
    (*_GPU, "type"),
    "Of all NVLinks: crc_flit, crc_data, replay, recovery.",
)
GPU_PCIE = _gauge(
    "gpu_pcie_bytes_per_second",
    (*_GPU, "direction"),
    "Sent and received; with sampling.pcieThroughput.",
)
_ACTIVITY = "with sampling.activity."
GPU_ENGINE_ACTIVE = _gauge(
    "gpu_engine_active_ratio",
    _GPU,
    f"Part of the time in which work ran; {_ACTIVITY}",
)
GPU_SM_ACTIVE = _gauge("gpu_sm_active_ratio", _GPU, f"Mean part of multiprocessors at work; {_ACTIVITY}")
GPU_TENSOR_ACTIVE = _gauge(
    "gpu_tensor_active_ratio", _GPU, f"Part of the time in which tensor cores worked; {_ACTIVITY}"
)
GPU_MEMORY_BANDWIDTH = _gauge(
    "gpu_memory_bandwidth_ratio", _GPU, f"Used part of the memory's bandwidth; {_ACTIVITY}"
)
GPU_PROCESSES = _gauge("gpu_processes", _GPU, "Processes that use the GPU for computing.")
GPU_UNEXPLAINED = _gauge(
    "gpu_unexplained_processes",
    _GPU,
    "Processes of no pod that holds the GPU. Missing without a mode, without the host's process IDs, and "
    "while holders are not known.",
)
GPU_OTHER_MEMORY = _gauge(
    "gpu_other_memory_used_bytes",
    (*_GPU, "owner"),
    "Memory of no container: of processes outside pods (host; an MPS server among them), or that cannot be "
    "attributed (unknown). Missing while the GPU cannot be read.",
)
GPU_SAMPLE_FAILURES = _counter(
    "gpu_sample_failures", _GPU, "Readings that failed or did not come back in time."
)
GPU_HEALTH_STATE = _gauge(
    "gpu_health_state",
    (*_GPU, "state"),
    "1 for the state it is in: healthy, suspect (offered and watched), unhealthy, probation.",
)
GPU_TRANSITIONS = _counter("gpu_health_transitions", (*_GPU, "state"), "How often it entered a state.")
GPU_PROBATION_LEFT = _gauge(
    "gpu_probation_left_seconds", _GPU, "Until it is trusted again if nothing more happens; else 0."
)
GPU_XIDS = _counter("gpu_xids", (*_GPU, "xid"), "Xids, harmless ones included.")
GPU_LAST_XID_TIME = _gauge(
    "gpu_last_xid_timestamp_seconds",
    (*_GPU, "xid", "class"),
    "Time of the newest Xid of that number; missing before the first. "
    "class: application (a program's fault), hardware, informational.",
)
GPU_ECC_EVENTS = _counter("gpu_ecc_uncorrected_events", _GPU, "Uncorrectable memory errors.")
GPU_EVENTS_WATCHED = _gauge(
    "gpu_events_watched", _GPU, "1 if NVML sends events, 0 if probing alone watches it."
)
GPUS_UNREADABLE = _gauge("gpus_unreadable", (), "GPUs that the driver enumerates but cannot describe.")

# Each container and each GPU that it holds a share of, from the moment that the kubelet records it.
_SHARE = ("namespace", "pod", "container", *_GPU, "mode")
_GRADED = (*_SHARE, "attribution")
_GRADES = (
    "attribution: measured (by process) or estimated (the rest of the GPU's, shared out by limits). "
    "Missing while the GPU cannot be read."
)
_WEAKEST = "with the grade of its weakest reading."
CONTAINER_MEMORY_USED = _gauge("container_memory_used_bytes", _GRADED, f"Memory in use; {_GRADES}")
CONTAINER_MEMORY_MOST = _gauge(
    "container_memory_used_max_bytes", _GRADED, f"Maximum over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_MEMORY_LIMIT = _gauge(
    "container_memory_limit_bytes", _SHARE, "Memory that the container was given."
)
CONTAINER_UTILIZATION = _gauge(
    "container_utilization_ratio",
    _GRADED,
    "Part of the GPU's time in which its kernels ran; attribution as for memory.",
)
CONTAINER_UTILIZATION_MEAN = _gauge(
    "container_utilization_mean_ratio", _GRADED, f"Mean over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_UTILIZATION_MOST = _gauge(
    "container_utilization_max_ratio", _GRADED, f"Maximum over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_GPU_SECONDS = _counter(
    "container_gpu_seconds",
    _SHARE,
    "GPU time used, in seconds of a whole GPU, as measured; missing where use is estimated. For bills: "
    "`increase()` misses nothing between scrapes.",
)
CONTAINER_CORE_LIMIT = _gauge(
    "container_core_limit_ratio",
    _SHARE,
    "Part of the compute that it was given; missing where only memory was.",
)
CONTAINER_HELD = _gauge(
    "container_held_ratio",
    _SHARE,
    "Part of the GPU that it holds, as bills count it: the larger of its parts of compute and memory, growth "
    "included, or of the time slices.",
)
CONTAINER_PROCESSES = _gauge(
    "container_processes", _SHARE, "Its processes on the GPU, as far as they can be attributed."
)

# The driver.
DRIVER_INFO = _info(
    "driver",
    ("driver_version", "nvml_version", "cuda_version"),
    "The NVIDIA driver; missing while NVML is not open.",
)
NVML_UP = _gauge("nvml_up", (), "1 while NVML answers for the node, 0 if not.")
EVENT_WAIT_FAILURES = _counter("nvml_event_wait_failures", (), "Waits for NVML's events that failed.")
NVML_RELEASED = _gauge(
    "nvml_released",
    (),
    "1 while NVML is closed: by gpu-node-agent release, or for an exchange of the driver.",
)
NVML_STUCK_CALLS = _gauge("nvml_stuck_calls", (), "NVML calls that never returned and hold a thread each.")

# Modes.
GPU_MODE = _info(
    "gpu_mode", (*_GPU, "mode", "desired"), "The mode in which it is offered, and the one that is wanted."
)
GPU_SELLING = _gauge("gpu_selling", _GPU, "1 while units are offered, 0 while it drains or is off.")
# What the node could still give, by mode, of healthy GPUs. Missing until it is known who holds what.
FREE_GPUS = _gauge("free_gpus", ("mode",), "Offered GPUs of which nobody holds anything.")
FREE_COMPUTE = _gauge("free_compute_gpus", ("mode",), "Free compute of offered GPUs, in GPUs.")
LARGEST_FREE = _gauge(
    "largest_free_ratio", ("mode",), "The largest part of one GPU that is free, with memory in proportion."
)
UNUSABLE_COMPUTE = _gauge(
    "unusable_compute_gpus",
    ("mode",),
    "Free compute, in GPUs, that the next pod of the usual mix cannot use: too little is left on each GPU, "
    "of compute or of memory.",
)
MODE_STATE = _gauge("mode_state", ("state",), "1 for the state of the node's mode.")
MODE_SWITCHES = _counter("gpu_mode_switches", (), "How often a GPU came into another mode.")
NODE_PATCHES = _counter(
    "node_patches",
    ("part", "result"),
    "Patches of the Node: status (capacity, allocatable), taint (around a switch), report (label, "
    "annotation, condition); ok or failed.",
)

# Calls of the kubelet and lists for it, by resource.
RESOURCE_REGISTERED = _gauge("resource_registered", ("resource",), "1 while the kubelet listens to the list.")
REGISTRATIONS = _counter("registrations", ("resource", "result"), "With the kubelet; ok or refused.")
STREAMS = _counter("list_streams", ("resource",), "Streams that the kubelet opened.")
LISTS = _counter("lists_sent", ("resource",), "Device lists sent to the kubelet.")
LIST_BYTES = _counter("list_sent_bytes", ("resource",), "Bytes of device lists sent to the kubelet.")
LIST_SIZE = _gauge("list_size_bytes", ("resource",), "Size of the last device list sent.")
CALLS = _counter(
    "kubelet_calls",
    ("resource", "call", "result"),
    "Allocate, GetPreferredAllocation or PreStartContainer; ok or the gRPC status (invalid_argument: the "
    "request was refused).",
)
CALL_SECONDS = _counter(
    "kubelet_call_seconds",
    ("resource", "call"),
    "Time in those calls; each holds up every pod of the node.",
)

# Instances of GPUs in mode mig.
_INSTANCE = (*_GPU, "instance", "profile")
INSTANCE_HEALTHY = _gauge("instance_healthy", _INSTANCE, "1 if it can be offered, 0 if not.")
INSTANCE_MEMORY_USED = _gauge("instance_memory_used_bytes", _INSTANCE, "Memory in use.")
INSTANCE_MEMORY_TOTAL = _gauge("instance_memory_total_bytes", _INSTANCE, "Memory there is.")
INSTANCE_STEPS = _gauge("instance_steps", _GPU, "Steps left to the layout; 0: it is reached.")
INSTANCE_CHANGES = _counter(
    "instance_changes", ("action", "result"), "Instances made and destroyed for layouts; done or failed."
)

# Our own CDI specification; only where NVIDIA's generator is at hand.
CDI_DEVICES = _gauge("cdi_devices", (), "GPUs in the agent's own CDI specification.")
CDI_GENERATIONS = _counter("cdi_generations", ("result",), "How often it was made again; ok or failed.")

# Pairs of core and memory (vGPU, MPS).
PAIRS = _counter(
    "pairs",
    ("mode", "result"),
    "Pairs of core and memory: granted, refused, or expired (the second half was never asked for).",
)
RESERVATIONS = _gauge("reservations", ("mode",), "Pairs that wait for their second half.")
ENFORCED = _gauge(
    "limits_enforced",
    ("mode", "fence"),
    "1 if shares that start now get this fence; without any, a share is a promise.",
)
LIMITED_CONTAINERS = _gauge(
    "limited_containers", ("fence",), "vGPU containers that it was seen to keep to their memory."
)
GROWN_MEMORY = _gauge(
    "grown_memory_bytes",
    _GPU,
    "Memory that vGPU containers were resized to beyond their requests.",
)
NAMESPACE_GROWN_MEMORY = _gauge(
    "namespace_grown_memory_bytes",
    ("namespace",),
    "That memory by namespace, where there is any. Quotas do not count it.",
)
CONTAINERS_ABOVE_CAP = _gauge("containers_above_cap", (), "vGPU containers measured above their memory cap.")
CONTAINERS_WITHOUT_LIBRARY = _gauge(
    "containers_without_library",
    (),
    "vGPU containers of which a process uses the GPU without the enforcement library.",
)
CONTAINERS_REFUSING = _gauge(
    "containers_refusing_access",
    (),
    "vGPU containers that keep the agent from the files of their limits.",
)
CONTAINERS_ENDED = _counter(
    "containers_above_cap_ended",
    ("result",),
    "vGPU containers ended by option (above their cap, or refusing access), or that could not be (failed).",
)
CONTAINERS_AVOIDING = _gauge(
    "containers_with_avoidable_limits",
    (),
    "vGPU containers that could get around their limits: privileged, hostPID, volumes.",
)

_COMPUTE = ("namespace", "pod", "container", "gpu")
CONTAINER_REFUSED = _counter(
    "container_allocations_refused",
    _COMPUTE,
    "Allocations that the enforcement library refused; by its own word.",
)
CONTAINER_PEAK = _gauge(
    "container_memory_charged_peak_bytes",
    _COMPUTE,
    "The most memory charged at once; by its own word.",
)
CONTAINER_REPAIRED = _counter(
    "container_charges_repaired",
    _COMPUTE,
    "Times that charges were added up again, since a process died with their lock; by its own word.",
)
CONTAINER_NEWER = _counter(
    "container_newer_entry_points",
    _COMPUTE,
    "Entry points of the driver newer than the enforcement library, which does not count them, and "
    "refuses them where strict; by its own word.",
)
CONTAINER_UNMEASURED = _counter(
    "container_unmeasured_processes",
    _COMPUTE,
    "Processes that could not measure their launches: those of unknown cost are not held to the share of "
    "compute; by its own word.",
)
CONTAINER_DIFFERENCE = _gauge(
    "container_memory_charge_error_bytes",
    _COMPUTE,
    "Charged beyond what the driver measures, below zero if too little; 0 unless they differ by 10 % and "
    "64 MiB for a minute.",
)
CONTAINER_THROTTLED = _counter(
    "container_throttled_seconds",
    _COMPUTE,
    "How long launches waited for the share of compute, by threads; by its own word.",
)
CONTAINER_ALLOTTED = _gauge(
    "container_compute_allotted_ratio",
    _COMPUTE,
    "Part of the compute that it is held to now: its request, and free compute that it gets.",
)

# MPS, by GPU; only of GPUs that are set up for it.
MPS_DAEMON = _gauge(
    "mps_daemon_state",
    ("gpu", "state"),
    "1 for the state of the control daemon.",
)
MPS_RESTARTS = _counter("mps_daemon_restarts", ("gpu",), "How often it was started again.")
MPS_FAULTS = _counter("mps_faults", ("gpu",), "Fatal errors of a client, which end all clients' work.")
MPS_CUT = _counter("mps_connections_cut", ("gpu",), "Silent connections to the daemon that were cut off.")
DRA_OPEN = _gauge(
    "dra_open",
    (),
    "1 if the kubelet has the DRA driver and ResourceSlices are as wanted.",
)
DRA_CLAIMS = _gauge("dra_claims", (), "Claims that have devices of this node ready.")
DRA_PREPARES = _counter("dra_prepares", ("outcome",), "Claims: prepared or refused.")
DRA_PREPARE_SECONDS = _counter("dra_prepare_seconds", (), "Time of these calls, waiting included.")
DRA_SLICE_WRITES = _counter("dra_slice_writes", ("result",), "Writes of ResourceSlices; ok or failed.")
DRA_NUDGES = _counter("dra_nudges", (), "Pods annotated so that the kubelet prepares their claims again.")
MPS_CLIENTS = _gauge("mps_clients", ("gpu",), "Processes that are clients of the MPS server.")
MPS_CLIENT_CEILING = _gauge("mps_client_ceiling", ("gpu",), "Containers that may hold shares at once.")
MPS_SILENT_PODS = _gauge(
    "mps_pods_without_client", ("gpu",), "Pods with shares and without a client for two minutes."
)

# The agent itself.
BUILD_INFO = _info("build", ("version", "python_version"), "The agent that runs.")
READY = _gauge("ready", (), "1 if /readyz answers 200, 0 if something stands in the way.")
TASK_UP = _gauge("task_up", ("task",), "1 while the task runs, 0 while it waits or is dead.")
TASK_RESTARTS = _counter("task_restarts", ("task",), "How often it failed and was started again.")
GENERATION = _gauge("inventory_generation", (), "Number of the inventory; grows with each change.")
MAILBOX_DEPTH = _gauge("inventory_mailbox_messages", (), "Messages that wait for the inventory actor.")
MAILBOX_DROPPED = _counter("inventory_mailbox_dropped", (), "Messages dropped because it was full.")
MEMORY = _gauge("process_resident_memory_bytes", (), "Resident memory of the agent.")
CPU = _counter("process_cpu_seconds", (), "User and system processor time of the agent.")
THREADS = _gauge("process_threads", (), "Threads of the agent.")
FILES = _gauge("process_open_fds", (), "Open file descriptors of the agent.")
STARTED = _gauge("process_start_time_seconds", (), "When the agent started.")
