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
    "Each GPU seen since the agent started, lost ones included.",
)
GPU_HEALTHY = _gauge("gpu_healthy", _GPU, "1 if the GPU can be offered, 0 if not.")
GPU_UTILIZATION = _gauge(
    "gpu_utilization_ratio", _GPU, "Part of the last sample period in which a kernel ran."
)
GPU_MEMORY_UTILIZATION = _gauge(
    "gpu_memory_utilization_ratio", _GPU, "Part of that period in which its memory was read or written."
)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", _GPU, "Memory in use.")
GPU_MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", _GPU, "Memory there is.")
GPU_POWER = _gauge("gpu_power_watts", _GPU, "Power of the whole board.")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", _GPU, "Of the chip.")
GPU_UTILIZATION_MEAN = _gauge("gpu_utilization_mean_ratio", _GPU, "Mean over sampling.windowSeconds.")
GPU_UTILIZATION_MOST = _gauge("gpu_utilization_max_ratio", _GPU, "Maximum over sampling.windowSeconds.")
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
    "gpu_ecc_errors", (*_GPU, "type"), "Since the driver was loaded: corrected, uncorrected."
)
GPU_NVLINK = _counter("gpu_nvlink_bytes", (*_GPU, "direction"), "Over all NVLinks: sent, received.")
GPU_NVLINK_ERRORS = _counter(
    "gpu_nvlink_errors", (*_GPU, "type"), "Of all NVLinks: crc_flit, crc_data, replay, recovery."
)
GPU_PCIE = _gauge(
    "gpu_pcie_bytes_per_second", (*_GPU, "direction"), "Sent and received; with sampling.pcieThroughput."
)
_ACTIVITY = "with sampling.activity."
GPU_ENGINE_ACTIVE = _gauge("gpu_engine_active_ratio", _GPU, f"Time in which work ran; {_ACTIVITY}")
GPU_SM_ACTIVE = _gauge("gpu_sm_active_ratio", _GPU, f"Multiprocessors at work; {_ACTIVITY}")
GPU_TENSOR_ACTIVE = _gauge("gpu_tensor_active_ratio", _GPU, f"Time in which tensor cores worked; {_ACTIVITY}")
GPU_MEMORY_BANDWIDTH = _gauge("gpu_memory_bandwidth_ratio", _GPU, f"Memory bandwidth in use; {_ACTIVITY}")
GPU_PROCESSES = _gauge("gpu_processes", _GPU, "Processes that compute on it.")
GPU_UNEXPLAINED = _gauge(
    "gpu_unexplained_processes",
    _GPU,
    "Processes of no pod that holds the GPU; missing without the host's process IDs.",
)
GPU_OTHER_MEMORY = _gauge(
    "gpu_other_memory_used_bytes",
    (*_GPU, "owner"),
    "Memory of no container: of processes outside pods (host; also an MPS server), or unknown.",
)
GPU_SAMPLE_FAILURES = _counter("gpu_sample_failures", _GPU, "Readings that failed or came too late.")
GPU_HEALTH_STATE = _gauge(
    "gpu_health_state", (*_GPU, "state"), "1 for its state: healthy, suspect, unhealthy, probation."
)
GPU_TRANSITIONS = _counter("gpu_health_transitions", (*_GPU, "state"), "How often it entered a state.")
GPU_PROBATION_LEFT = _gauge("gpu_probation_left_seconds", _GPU, "Until it is trusted again; else 0.")
GPU_XIDS = _counter("gpu_xids", (*_GPU, "xid"), "Xids, harmless ones included.")
GPU_LAST_XID_TIME = _gauge(
    "gpu_last_xid_timestamp_seconds",
    (*_GPU, "xid", "class"),
    "Newest Xid of that number; class: application, hardware, informational.",
)
GPU_ECC_EVENTS = _counter("gpu_ecc_uncorrected_events", _GPU, "Uncorrectable memory errors.")
GPU_EVENTS_WATCHED = _gauge("gpu_events_watched", _GPU, "0 if probing alone watches it.")
GPUS_UNREADABLE = _gauge("gpus_unreadable", (), "GPUs that the driver cannot describe.")

# Each container and each GPU that it holds a share of, from the moment that the kubelet records it.
_SHARE = ("namespace", "pod", "container", *_GPU, "mode")
_GRADED = (*_SHARE, "attribution")
_GRADES = "measured by process, or estimated: the rest, shared out by limits."
_WEAKEST = "graded by its weakest reading."
CONTAINER_MEMORY_USED = _gauge("container_memory_used_bytes", _GRADED, f"Memory in use; {_GRADES}")
CONTAINER_MEMORY_MOST = _gauge(
    "container_memory_used_max_bytes", _GRADED, f"Maximum over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_MEMORY_LIMIT = _gauge("container_memory_limit_bytes", _SHARE, "Memory it was given.")
CONTAINER_UTILIZATION = _gauge(
    "container_utilization_ratio", _GRADED, "Part of the time in which its kernels ran."
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
    "Measured time of a whole GPU, for bills; missing where use is estimated.",
)
CONTAINER_CORE_LIMIT = _gauge(
    "container_core_limit_ratio", _SHARE, "Part of the compute it was given, if any."
)
CONTAINER_HELD = _gauge(
    "container_held_ratio",
    _SHARE,
    "Part of the GPU, as bills count it: the larger of compute and memory, growth included, or slices.",
)
CONTAINER_PROCESSES = _gauge("container_processes", _SHARE, "Its processes, as far as known.")

# The driver.
DRIVER_INFO = _info(
    "driver", ("driver_version", "nvml_version", "cuda_version"), "Missing while NVML is not open."
)
NVML_UP = _gauge("nvml_up", (), "1 while NVML answers.")
EVENT_WAIT_FAILURES = _counter("nvml_event_wait_failures", (), "Waits for NVML's events that failed.")
NVML_RELEASED = _gauge("nvml_released", (), "1 while NVML is closed, by `release` or for another driver.")
NVML_STUCK_CALLS = _gauge("nvml_stuck_calls", (), "NVML calls that never returned.")

# Modes.
GPU_MODE = _info("gpu_mode", (*_GPU, "mode", "desired"), "The mode in force, and the one wanted.")
GPU_SELLING = _gauge("gpu_selling", _GPU, "0 while it drains or is off.")
# What the node could still give, by mode, of healthy GPUs. Missing until it is known who holds what.
FREE_GPUS = _gauge("free_gpus", ("mode",), "Offered GPUs that nobody holds.")
FREE_COMPUTE = _gauge("free_compute_gpus", ("mode",), "Free compute of offered GPUs, in GPUs.")
LARGEST_FREE = _gauge(
    "largest_free_ratio", ("mode",), "The largest free part of one GPU, memory in proportion."
)
UNUSABLE_COMPUTE = _gauge(
    "unusable_compute_gpus", ("mode",), "Free compute that the next pod of the usual mix cannot use."
)
MODE_STATE = _gauge("mode_state", ("state",), "1 for the state of the node's mode.")
MODE_SWITCHES = _counter("gpu_mode_switches", (), "How often a GPU came into another mode.")
NODE_PATCHES = _counter(
    "node_patches",
    ("part", "result"),
    "Patches of the Node: status, taint, report (label, annotation, condition).",
)

# Calls of the kubelet and lists for it, by resource.
RESOURCE_REGISTERED = _gauge("resource_registered", ("resource",), "1 while the kubelet listens.")
REGISTRATIONS = _counter("registrations", ("resource", "result"), "ok or refused.")
STREAMS = _counter("list_streams", ("resource",), "Opened by the kubelet.")
LISTS = _counter("lists_sent", ("resource",), "Device lists sent.")
LIST_BYTES = _counter("list_sent_bytes", ("resource",), "Bytes of device lists sent.")
LIST_SIZE = _gauge("list_size_bytes", ("resource",), "Size of the last one.")
CALLS = _counter(
    "kubelet_calls",
    ("resource", "call", "result"),
    "By method; ok or the gRPC status (invalid_argument: refused).",
)
CALL_SECONDS = _counter("kubelet_call_seconds", ("resource", "call"), "Time in those calls.")

# Instances of GPUs in mode mig.
_INSTANCE = (*_GPU, "instance", "profile")
INSTANCE_HEALTHY = _gauge("instance_healthy", _INSTANCE, "1 if it can be offered, 0 if not.")
INSTANCE_MEMORY_USED = _gauge("instance_memory_used_bytes", _INSTANCE, "Memory in use.")
INSTANCE_MEMORY_TOTAL = _gauge("instance_memory_total_bytes", _INSTANCE, "Memory there is.")
INSTANCE_STEPS = _gauge("instance_steps", _GPU, "Steps left to the layout; 0: it is reached.")
INSTANCE_CHANGES = _counter("instance_changes", ("action", "result"), "Made and destroyed for layouts.")

# Our own CDI specification; only where NVIDIA's generator is at hand.
CDI_DEVICES = _gauge("cdi_devices", (), "GPUs in the agent's specification.")
CDI_GENERATIONS = _counter("cdi_generations", ("result",), "How often it was made again.")

# Pairs of core and memory (vGPU, MPS).
PAIRS = _counter("pairs", ("mode", "result"), "granted, refused, or expired (no second half came).")
RESERVATIONS = _gauge("reservations", ("mode",), "Pairs that wait for their second half.")
ENFORCED = _gauge("limits_enforced", ("mode", "fence"), "1 if shares that start now get this fence.")
LIMITED_CONTAINERS = _gauge(
    "limited_containers", ("fence",), "vGPU containers that it keeps to their memory."
)
GROWN_MEMORY = _gauge("grown_memory_bytes", _GPU, "Memory given by `resize`.")
NAMESPACE_GROWN_MEMORY = _gauge(
    "namespace_grown_memory_bytes", ("namespace",), "Memory given by `resize`; quotas do not count it."
)
CONTAINERS_ABOVE_CAP = _gauge("containers_above_cap", (), "vGPU containers measured above their memory cap.")
CONTAINERS_WITHOUT_LIBRARY = _gauge(
    "containers_without_library", (), "vGPU containers with a process without the library."
)
CONTAINERS_REFUSING = _gauge(
    "containers_refusing_access", (), "vGPU containers that close their limits' files."
)
CONTAINERS_ENDED = _counter(
    "containers_above_cap_ended", ("result",), "vGPU containers ended by option, or failed to."
)
CONTAINERS_AVOIDING = _gauge(
    "containers_with_avoidable_limits", (), "vGPU containers that could get around their limits."
)

_COMPUTE = ("namespace", "pod", "container", "gpu")
CONTAINER_REFUSED = _counter(
    "container_allocations_refused", _COMPUTE, "Allocations that the library refused."
)
CONTAINER_PEAK = _gauge("container_memory_charged_peak_bytes", _COMPUTE, "The most memory charged at once.")
CONTAINER_REPAIRED = _counter(
    "container_charges_repaired", _COMPUTE, "Charges added up again after a process died."
)
CONTAINER_NEWER = _counter(
    "container_newer_entry_points",
    _COMPUTE,
    "Entry points newer than the library: not counted; refused where strict.",
)
CONTAINER_UNMEASURED = _counter(
    "container_unmeasured_processes",
    _COMPUTE,
    "Processes whose launches cannot be measured, so are not held back.",
)
CONTAINER_DIFFERENCE = _gauge(
    "container_memory_charge_error_bytes",
    _COMPUTE,
    "Charged beyond what the driver measures; 0 within 10 % and 64 MiB.",
)
CONTAINER_THROTTLED = _counter(
    "container_throttled_seconds", _COMPUTE, "How long launches waited, by threads."
)
CONTAINER_ALLOTTED = _gauge(
    "container_compute_allotted_ratio", _COMPUTE, "Part of the compute that it is held to now."
)

# MPS, by GPU; only of GPUs that are set up for it.
MPS_DAEMON = _gauge("mps_daemon_state", ("gpu", "state"), "1 for the daemon's state.")
MPS_RESTARTS = _counter("mps_daemon_restarts", ("gpu",), "Restarts.")
MPS_FAULTS = _counter("mps_faults", ("gpu",), "Fatal errors, which end all clients' work.")
MPS_CUT = _counter("mps_connections_cut", ("gpu",), "Silent connections that were cut off.")
DRA_OPEN = _gauge("dra_open", (), "1 if driver and ResourceSlices are as wanted.")
DRA_CLAIMS = _gauge("dra_claims", (), "Claims with devices ready.")
DRA_PREPARES = _counter("dra_prepares", ("outcome",), "prepared or refused.")
DRA_PREPARE_SECONDS = _counter("dra_prepare_seconds", (), "Their time, waiting included.")
DRA_SLICE_WRITES = _counter("dra_slice_writes", ("result",), "Writes of ResourceSlices.")
DRA_NUDGES = _counter("dra_nudges", (), "Pods annotated so that claims are prepared again.")
MPS_CLIENTS = _gauge("mps_clients", ("gpu",), "Processes that are clients.")
MPS_CLIENT_CEILING = _gauge("mps_client_ceiling", ("gpu",), "Containers that may hold shares at once.")
MPS_SILENT_PODS = _gauge("mps_pods_without_client", ("gpu",), "Pods without a client for two minutes.")

# The agent itself.
BUILD_INFO = _info("build", ("version", "python_version"), "The agent that runs.")
READY = _gauge("ready", (), "1 if /readyz answers 200.")
TASK_UP = _gauge("task_up", ("task",), "1 while the task runs.")
TASK_RESTARTS = _counter("task_restarts", ("task",), "Restarts after failures.")
GENERATION = _gauge("inventory_generation", (), "Grows with each change.")
MAILBOX_DEPTH = _gauge("inventory_mailbox_messages", (), "Messages that wait.")
MAILBOX_DROPPED = _counter("inventory_mailbox_dropped", (), "Messages dropped since full.")
MEMORY = _gauge("process_resident_memory_bytes", (), "Resident memory.")
CPU = _counter("process_cpu_seconds", (), "User and system time.")
THREADS = _gauge("process_threads", (), "Threads.")
FILES = _gauge("process_open_fds", (), "Open files.")
STARTED = _gauge("process_start_time_seconds", (), "When the agent started.")
