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
    "A GPU that was seen since the agent started, lost ones included; "
    "numa_node is empty where the machine names none.",
)
GPU_HEALTHY = _gauge("gpu_healthy", _GPU, "1 if the GPU can be offered, 0 if not.")
GPU_UTILIZATION = _gauge(
    "gpu_utilization_ratio", _GPU, "Share of the driver's last sample period in which a kernel ran."
)
GPU_MEMORY_UTILIZATION = _gauge(
    "gpu_memory_utilization_ratio", _GPU, "Share of that period in which device memory was read or written."
)
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", _GPU, "Device memory in use, by all processes.")
GPU_MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", _GPU, "Device memory there is.")
GPU_POWER = _gauge("gpu_power_watts", _GPU, "Power drawn by the whole board.")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", _GPU, "Temperature of the GPU chip.")
GPU_UTILIZATION_MEAN = _gauge(
    "gpu_utilization_mean_ratio", _GPU, "Mean of the utilization over sampling.windowSeconds."
)
GPU_UTILIZATION_MOST = _gauge(
    "gpu_utilization_max_ratio", _GPU, "The most utilization read over sampling.windowSeconds."
)
GPU_MEMORY_MOST = _gauge(
    "gpu_memory_used_max_bytes", _GPU, "The most device memory in use over sampling.windowSeconds."
)
GPU_POWER_MEAN = _gauge("gpu_power_mean_watts", _GPU, "Mean power over sampling.windowSeconds.")
GPU_POWER_MOST = _gauge("gpu_power_max_watts", _GPU, "The most power drawn over sampling.windowSeconds.")
GPU_POWER_LIMIT = _gauge("gpu_power_limit_watts", _GPU, "Power limit in force.")
GPU_ENERGY = _counter("gpu_energy_joules", _GPU, "Energy used since the driver was loaded.")
GPU_TEMPERATURE_MOST = _gauge(
    "gpu_temperature_max_celsius", _GPU, "The highest temperature over sampling.windowSeconds."
)
GPU_CLOCK = _gauge("gpu_clock_hertz", (*_GPU, "clock"), "Clock rates: graphics, sm, memory, video.")
GPU_THROTTLED = _gauge(
    "gpu_throttled",
    (*_GPU, "reason"),
    "1 while clocks are held down for a reason: idle, applications_clocks, sw_power_cap, hw_slowdown, "
    "sync_boost, sw_thermal, hw_thermal, hw_power_brake, display_clocks.",
)
GPU_ECC_ERRORS = _counter(
    "gpu_ecc_errors", (*_GPU, "type"), "Memory errors since the driver was loaded: corrected, uncorrected."
)
GPU_NVLINK = _counter(
    "gpu_nvlink_bytes",
    (*_GPU, "direction"),
    "Data over all NVLinks of the GPU since the driver was loaded: sent, received.",
)
GPU_NVLINK_ERRORS = _counter(
    "gpu_nvlink_errors",
    (*_GPU, "type"),
    "Errors of all NVLinks of the GPU: crc_flit, crc_data, replay, recovery.",
)
GPU_PCIE = _gauge(
    "gpu_pcie_bytes_per_second",
    (*_GPU, "direction"),
    "PCIe throughput, sent and received; only with sampling.pcieThroughput.",
)
_ACTIVITY = "only with sampling.activity, of GPUs and drivers that have it."
GPU_ENGINE_ACTIVE = _gauge(
    "gpu_engine_active_ratio",
    _GPU,
    f"Share of the time since the last sample in which work ran; {_ACTIVITY}",
)
GPU_SM_ACTIVE = _gauge("gpu_sm_active_ratio", _GPU, f"Mean share of multiprocessors at work; {_ACTIVITY}")
GPU_TENSOR_ACTIVE = _gauge(
    "gpu_tensor_active_ratio", _GPU, f"Share of the time in which tensor cores worked; {_ACTIVITY}"
)
GPU_MEMORY_BANDWIDTH = _gauge(
    "gpu_memory_bandwidth_ratio", _GPU, f"Used part of the memory's bandwidth; {_ACTIVITY}"
)
GPU_PROCESSES = _gauge("gpu_processes", _GPU, "Processes that use the GPU for computing.")
GPU_UNEXPLAINED = _gauge(
    "gpu_unexplained_processes",
    _GPU,
    "Processes on the GPU of no pod that holds it. Missing where no mode is wanted for the GPU, where the "
    "agent does not see the host's process IDs, and while it does not know who holds what.",
)
GPU_OTHER_MEMORY = _gauge(
    "gpu_other_memory_used_bytes",
    (*_GPU, "owner"),
    "Device memory that is not put down to any container: of processes outside pods (host; an MPS server "
    "among them), and of processes that cannot be attributed (unknown). Missing while the GPU cannot be "
    "read.",
)
GPU_SAMPLE_FAILURES = _counter(
    "gpu_sample_failures", _GPU, "Readings of the moving figures that failed or did not come back in time."
)
GPU_HEALTH_STATE = _gauge(
    "gpu_health_state",
    (*_GPU, "state"),
    "1 for the state that the GPU is in: healthy, suspect (offered and watched), unhealthy, probation.",
)
GPU_TRANSITIONS = _counter(
    "gpu_health_transitions", (*_GPU, "state"), "How often the GPU entered a state of health."
)
GPU_PROBATION_LEFT = _gauge(
    "gpu_probation_left_seconds", _GPU, "Until the GPU is trusted again if nothing more happens; 0 otherwise."
)
GPU_XIDS = _counter("gpu_xids", (*_GPU, "xid"), "Xids of the GPU, harmless ones included.")
GPU_LAST_XID_TIME = _gauge(
    "gpu_last_xid_timestamp_seconds",
    (*_GPU, "xid", "class"),
    "When the GPU's newest Xid of that number came, in seconds since 1970; missing before the first one. "
    "class: application (a program's fault), hardware, informational.",
)
GPU_ECC_EVENTS = _counter("gpu_ecc_uncorrected_events", _GPU, "Events of uncorrectable memory errors.")
GPU_EVENTS_WATCHED = _gauge(
    "gpu_events_watched", _GPU, "1 if NVML sends events of this GPU, 0 if probing alone watches it."
)
GPUS_UNREADABLE = _gauge("gpus_unreadable", (), "GPUs that the driver enumerates but cannot describe.")

# Each container and each GPU that it holds a share of, from the moment that the kubelet records it.
_SHARE = ("namespace", "pod", "container", *_GPU, "mode")
_GRADED = (*_SHARE, "attribution")
_GRADES = (
    "attribution is its grade: measured (by process) or estimated (the rest of the GPU's figure, "
    "shared out by limits). Missing while the GPU cannot be read."
)
_WEAKEST = "of the readings that there were, with the grade of the weakest."
CONTAINER_MEMORY_USED = _gauge(
    "container_memory_used_bytes", _GRADED, f"Device memory in use by the container; {_GRADES}"
)
CONTAINER_MEMORY_MOST = _gauge(
    "container_memory_used_max_bytes", _GRADED, f"The most of it over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_MEMORY_LIMIT = _gauge(
    "container_memory_limit_bytes", _SHARE, "Device memory that the container was given."
)
CONTAINER_UTILIZATION = _gauge(
    "container_utilization_ratio",
    _GRADED,
    "Share of the GPU's time in which kernels of the container ran; attribution as for memory.",
)
CONTAINER_UTILIZATION_MEAN = _gauge(
    "container_utilization_mean_ratio", _GRADED, f"Mean of it over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_UTILIZATION_MOST = _gauge(
    "container_utilization_max_ratio", _GRADED, f"The most of it over sampling.windowSeconds; {_WEAKEST}"
)
CONTAINER_GPU_SECONDS = _counter(
    "container_gpu_seconds",
    _SHARE,
    "GPU time that the container used, in seconds of a whole GPU; only what was measured counts, and it is "
    "missing where use is estimated. For bills: `increase()` misses nothing between two scrapes.",
)
CONTAINER_CORE_LIMIT = _gauge(
    "container_core_limit_ratio",
    _SHARE,
    "Share of the GPU's computing power that the container was given; missing where only memory was.",
)
CONTAINER_HELD = _gauge(
    "container_held_ratio",
    _SHARE,
    "Part of the GPU that the container holds, as bills count it: the larger of its parts of compute and "
    "memory, growth included, or its part of the GPU's time slices.",
)
CONTAINER_PROCESSES = _gauge(
    "container_processes", _SHARE, "Processes of the container on the GPU, as far as they can be attributed."
)

# The driver.
DRIVER_INFO = _info(
    "driver",
    ("driver_version", "nvml_version", "cuda_version"),
    "The NVIDIA driver; missing while NVML is not open.",
)
NVML_UP = _gauge("nvml_up", (), "1 while NVML answers for the node as a whole, 0 if not.")
EVENT_WAIT_FAILURES = _counter("nvml_event_wait_failures", (), "Waits for NVML's events that failed.")
NVML_RELEASED = _gauge(
    "nvml_released",
    (),
    "1 while NVML is closed for maintenance: by gpu-node-agent release, or for an exchange of the driver.",
)
NVML_STUCK_CALLS = _gauge("nvml_stuck_calls", (), "NVML calls that never returned and hold a thread each.")

# Modes.
GPU_MODE = _info(
    "gpu_mode", (*_GPU, "mode", "desired"), "The mode that a GPU is offered in, and the one that is wanted."
)
GPU_SELLING = _gauge(
    "gpu_selling", _GPU, "1 while units of the GPU are offered, 0 while it drains or is off."
)
# What the node could still give, by mode, of healthy GPUs. Missing until it is known who holds what.
FREE_GPUS = _gauge("free_gpus", ("mode",), "GPUs that are offered and of which nobody holds anything.")
FREE_COMPUTE = _gauge("free_compute_gpus", ("mode",), "Compute that is free on offered GPUs, in GPUs.")
LARGEST_FREE = _gauge(
    "largest_free_ratio", ("mode",), "The largest part of one GPU that is free, with memory in proportion."
)
UNUSABLE_COMPUTE = _gauge(
    "unusable_compute_gpus",
    ("mode",),
    "The part of the free compute, in GPUs, that the next pod of the usual mix of sizes is expected not to "
    "be able to use: too little is left on each GPU, of compute or of memory.",
)
MODE_STATE = _gauge("mode_state", ("state",), "1 for the state that the node's mode is in, 0 for the others.")
MODE_SWITCHES = _counter("gpu_mode_switches", (), "How often a GPU came into another mode.")
NODE_PATCHES = _counter(
    "node_patches",
    ("part", "result"),
    "Patches of the own Node object: status (capacity and allocatable, ahead of the kubelet's tick), taint "
    "(set and removed around a switch), report (label, annotation, condition); ok or failed.",
)

# Calls of the kubelet and lists for it, by resource.
RESOURCE_REGISTERED = _gauge(
    "resource_registered", ("resource",), "1 while the kubelet listens to this resource's list, 0 if not."
)
REGISTRATIONS = _counter(
    "registrations", ("resource", "result"), "Registrations with the kubelet; result is ok or refused."
)
STREAMS = _counter("list_streams", ("resource",), "ListAndWatch streams that the kubelet opened.")
LISTS = _counter("lists_sent", ("resource",), "Device lists sent to the kubelet.")
LIST_BYTES = _counter("list_sent_bytes", ("resource",), "Bytes of device lists sent to the kubelet.")
LIST_SIZE = _gauge("list_size_bytes", ("resource",), "Size of the last device list sent.")
CALLS = _counter(
    "kubelet_calls",
    ("resource", "call", "result"),
    "Calls by the kubelet; call is Allocate, GetPreferredAllocation or PreStartContainer, "
    "result is ok or the gRPC status in lower case (invalid_argument: the request was refused).",
)
CALL_SECONDS = _counter(
    "kubelet_call_seconds",
    ("resource", "call"),
    "Time spent in those calls; each holds up every pod of the node.",
)

# Instances of GPUs in mode mig.
_INSTANCE = (*_GPU, "instance", "profile")
INSTANCE_HEALTHY = _gauge("instance_healthy", _INSTANCE, "1 if the instance can be offered, 0 if not.")
INSTANCE_MEMORY_USED = _gauge("instance_memory_used_bytes", _INSTANCE, "Memory in use of the instance.")
INSTANCE_MEMORY_TOTAL = _gauge("instance_memory_total_bytes", _INSTANCE, "Memory of the instance.")
INSTANCE_STEPS = _gauge(
    "instance_steps", _GPU, "Steps left from the instances to the layout; 0: it is reached."
)
INSTANCE_CHANGES = _counter(
    "instance_changes",
    ("action", "result"),
    "Instances made and destroyed for layouts: make or destroy, done or failed.",
)

# Our own CDI specification; only where NVIDIA's generator is at hand.
CDI_DEVICES = _gauge("cdi_devices", (), "GPUs that containers can get by the agent's own CDI specification.")
CDI_GENERATIONS = _counter(
    "cdi_generations", ("result",), "How often that specification was made again; ok or failed."
)

# Pairs of core and memory (vGPU, MPS).
PAIRS = _counter(
    "pairs",
    ("mode", "result"),
    "Pairs of core and memory: granted; refused; expired, when the second half was never asked for.",
)
RESERVATIONS = _gauge(
    "reservations", ("mode",), "Pairs that were promised a GPU and still wait for their second half."
)
ENFORCED = _gauge(
    "limits_enforced",
    ("mode", "fence"),
    "1 if shares that start now get this fence, 0 if not; with no fence a share is a promise.",
)
LIMITED_CONTAINERS = _gauge(
    "limited_containers", ("fence",), "vGPU containers that this fence was seen to keep to their memory."
)
GROWN_MEMORY = _gauge(
    "grown_memory_bytes",
    _GPU,
    "Memory that vGPU containers were resized to beyond the requests of their pods.",
)
NAMESPACE_GROWN_MEMORY = _gauge(
    "namespace_grown_memory_bytes",
    ("namespace",),
    "The same by namespace; namespaces that nothing has grown in are left out. Quotas do not count it.",
)
CONTAINERS_ABOVE_CAP = _gauge(
    "containers_above_cap", (), "vGPU containers that are measured above their memory cap."
)
CONTAINERS_WITHOUT_LIBRARY = _gauge(
    "containers_without_library",
    (),
    "vGPU containers with the enforcement library of which a process uses the GPU without it.",
)
CONTAINERS_REFUSING = _gauge(
    "containers_refusing_access",
    (),
    "vGPU containers that keep the agent from the files of their limits, as by a lease.",
)
CONTAINERS_ENDED = _counter(
    "containers_above_cap_ended",
    ("result",),
    "vGPU containers that stayed above their memory cap, or kept the agent from the files of their limits, "
    "and were ended by option, or could not be (failed).",
)
CONTAINERS_AVOIDING = _gauge(
    "containers_with_avoidable_limits",
    (),
    "vGPU containers whose pods could get around their limits: privileged, hostPID, volumes over them.",
)

_COMPUTE = ("namespace", "pod", "container", "gpu")
CONTAINER_REFUSED = _counter(
    "container_allocations_refused",
    _COMPUTE,
    "Allocations of a vGPU container that the enforcement library refused; by its own word.",
)
CONTAINER_PEAK = _gauge(
    "container_memory_charged_peak_bytes",
    _COMPUTE,
    "The most GPU memory that a vGPU container was ever charged at once; by its own word.",
)
CONTAINER_REPAIRED = _counter(
    "container_charges_repaired",
    _COMPUTE,
    "Times that the charges of a vGPU container were added up again, since a process had died while it held "
    "their lock; by its own word.",
)
CONTAINER_NEWER = _counter(
    "container_newer_entry_points",
    _COMPUTE,
    "Entry points of the driver that a vGPU container asked for and that are newer than the enforcement "
    "library, which counts nothing of them and refuses them where strict; by its own word.",
)
CONTAINER_UNMEASURED = _counter(
    "container_unmeasured_processes",
    _COMPUTE,
    "Processes of a vGPU container that could not measure their launches, so that those of unknown cost are "
    "not held to its share of compute; by its own word.",
)
CONTAINER_DIFFERENCE = _gauge(
    "container_memory_charge_error_bytes",
    _COMPUTE,
    "What a vGPU container is charged beyond what the driver measures, below zero where it is too little; 0 "
    "unless they have differed by 10 % and 64 MiB for a minute.",
)
CONTAINER_THROTTLED = _counter(
    "container_throttled_seconds",
    _COMPUTE,
    "How long launches of a vGPU container waited for its share of compute, by threads; by its own word.",
)
CONTAINER_ALLOTTED = _gauge(
    "container_compute_allotted_ratio",
    _COMPUTE,
    "Share of the GPU's compute that a vGPU container is held to now, 0..1: its request, and free compute "
    "that it gets.",
)

# MPS, by GPU; only of GPUs that are set up for it.
MPS_DAEMON = _gauge(
    "mps_daemon_state",
    ("gpu", "state"),
    "1 for the state that the GPU's MPS control daemon is in, 0 for others.",
)
MPS_RESTARTS = _counter("mps_daemon_restarts", ("gpu",), "How often the daemon was started again.")
MPS_FAULTS = _counter("mps_faults", ("gpu",), "Fatal errors of a client, which end the work of all clients.")
MPS_CUT = _counter(
    "mps_connections_cut", ("gpu",), "Connections to the control daemon that said nothing and were cut off."
)
DRA_OPEN = _gauge(
    "dra_open",
    (),
    "1 if the kubelet has the DRA driver and its ResourceSlices are as wanted, else 0.",
)
DRA_CLAIMS = _gauge("dra_claims", (), "ResourceClaims that have devices of this node ready.")
DRA_PREPARES = _counter(
    "dra_prepares", ("outcome",), "Claims that the kubelet asked for; prepared or refused."
)
DRA_PREPARE_SECONDS = _counter(
    "dra_prepare_seconds", (), "Time that calls took in which claims were prepared, waiting included."
)
DRA_SLICE_WRITES = _counter("dra_slice_writes", ("result",), "Writes of ResourceSlices; ok or failed.")
DRA_NUDGES = _counter(
    "dra_nudges", (), "Pods that were annotated so that the kubelet tries again to prepare their claims."
)
MPS_CLIENTS = _gauge("mps_clients", ("gpu",), "Processes that are clients of the GPU's MPS server.")
MPS_CLIENT_CEILING = _gauge(
    "mps_client_ceiling", ("gpu",), "Containers that may hold shares of the GPU at once."
)
MPS_SILENT_PODS = _gauge(
    "mps_pods_without_client", ("gpu",), "Pods that hold shares and have had no client for two minutes."
)

# The agent itself.
BUILD_INFO = _info("build", ("version", "python_version"), "The agent that runs.")
READY = _gauge("ready", (), "1 if /readyz answers 200, 0 if something stands in the way.")
TASK_UP = _gauge("task_up", ("task",), "1 while the task runs, 0 while it waits for its next try or is dead.")
TASK_RESTARTS = _counter("task_restarts", ("task",), "How often the task failed and was started again.")
GENERATION = _gauge(
    "inventory_generation", (), "Number of the inventory in force; it grows with each change."
)
MAILBOX_DEPTH = _gauge("inventory_mailbox_messages", (), "Messages that wait for the inventory actor.")
MAILBOX_DROPPED = _counter("inventory_mailbox_dropped", (), "Messages dropped because that mailbox was full.")
MEMORY = _gauge("process_resident_memory_bytes", (), "Resident memory of the agent.")
CPU = _counter("process_cpu_seconds", (), "User and system processor time of the agent.")
THREADS = _gauge("process_threads", (), "Threads of the agent.")
FILES = _gauge("process_open_fds", (), "Open file descriptors of the agent.")
STARTED = _gauge("process_start_time_seconds", (), "When the agent started, in seconds since 1970.")
