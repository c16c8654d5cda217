"""The configuration of the node agent: every key, its type and its default; see `agent.kit.configuration`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.kit import configuration
from agent.kit.configuration import ConfigurationError, Section
from agent.kit.logs import Logging
from agent.model.modes import OFFERED_MODES, Mode, ModeName
from agent.model.node_inventory import Entry
from agent.settings.faults import impossible

__all__ = ["ConfigurationError", "Section", "Settings", "load", "schema"]

ENVIRONMENT_PREFIX = "GPU_NODE_AGENT_"
# A variable of that prefix which is no configuration key: where the file is.
RESERVED_ENVIRONMENT = frozenset({"CONFIG"})

Port = Annotated[int, Meta(ge=0, le=65535)]
AbsolutePath = Annotated[str, Meta(pattern="^/")]
LayoutName = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9._]{0,61}[a-z0-9])?$")]  # a label value
QuietSeconds = Annotated[float, Meta(ge=0, le=604800)]
ImexChannel = Annotated[int, Meta(ge=0, le=2047)]
MigProfile = Annotated[str, Meta(pattern=r"^[1-9]g\.[1-9][0-9]{0,3}gb([+-][a-z]+(\.[a-z]+)*)*$")]
XidNumber = Annotated[str, Meta(pattern="^[0-9]{1,4}$")]


class HttpSettings(Section, frozen=True):
    """Where /metrics, /healthz and /readyz are served. Port 0 takes any free port."""

    address: str = "0.0.0.0"  # noqa: S104  the kubelet probes the pod's address
    port: Port = 9446


class Https(Section, frozen=True):
    """Where /metrics is served to callers alone whom the API server lets get it, in place of plain HTTP."""

    port: Port | None = None  # null: /metrics is served over plain HTTP, to every caller
    certificate: AbsolutePath = "/etc/gpu-node-agent-tls/tls.crt"
    key: AbsolutePath = "/etc/gpu-node-agent-tls/tls.key"


class Kubelet(Section, frozen=True):
    """Folders of the kubelet, as the agent sees them."""

    root: AbsolutePath = "/var/lib/kubelet"
    # A constant of the kubelet whatever its --root-dir says; null: <root>/device-plugins.
    device_plugins: AbsolutePath | None = None


class ClusterSettings(Section, frozen=True):
    """Access to the Kubernetes API server. Without it the agent serves pods, only with less knowledge."""

    # auto: a pod's service account or the kubeconfig where there is one; required: fail without.
    access: Literal["auto", "required", "off"] = "auto"
    kubeconfig: AbsolutePath | None = None
    # The name of this node's Node object; null: the host's name. In a pod the chart sets it.
    node_name: str | None = None
    # A scheduler extender chooses GPUs: node totals need protect nobody, so lists carry all units.
    extender: bool = False
    # Keep cluster-autoscaler from removing the node while pods hold units that it does not know: vGPU, MPS.
    scale_down_guard: bool = False

    @property
    def own_node(self) -> str:
        """The name of this node's Node object. The kubelet names it by the host's name, in lower case."""
        return self.node_name or os.uname().nodename.strip().lower()


class DriverFiles(Section, frozen=True):
    """Where the NVIDIA driver's files are, as the agent sees them."""

    root: AbsolutePath = "/"
    library: AbsolutePath | None = None  # libnvidia-ml.so.1 by full path; null: searched under root
    # Prefix of the device nodes on the HOST (they are named to the container runtime); null: "/".
    dev_root: AbsolutePath | None = None
    # Let go of the driver while labels of the node say that NVIDIA's GPU operator exchanges it.
    release_for_upgrades: bool = True


class HostSettings(Section, frozen=True):
    """Folders of the node that the agent owns or reads."""

    sysfs: AbsolutePath = "/sys"
    proc: AbsolutePath = "/proc"  # of the host: processes on GPUs are looked up there
    state: AbsolutePath = "/var/lib/gpu-node-agent"
    run: AbsolutePath = "/run/gpu-node-agent"
    cdi: AbsolutePath = "/var/run/cdi"
    # Where MPS daemons get a cgroup of their own, so that they outlive the agent's pod.
    cgroups: AbsolutePath = "/sys/fs/cgroup"


class Injection(Section, frozen=True):
    """How a container gets its GPUs."""

    strategy: Literal["auto", "envvar", "cdi"] = "auto"
    device_nodes: bool = False  # also name the nodes to the kubelet, for runtimes that are not NVIDIA's
    volume_mounts: bool = False  # also name them by mounts, for runtimes that accept no variable
    driver_mount: AbsolutePath | None = None  # a folder of the HOST for /usr/local/nvidia (GKE)
    toolkit: AbsolutePath | None = "/usr/libexec/gpu-node-agent"  # nvidia-ctk and the hook; null: none
    driver_root: AbsolutePath | None = None  # the HOST's driver root as the agent sees it; null: driver.root
    host_driver_root: AbsolutePath | None = None  # the same as the host sees it; null: the same path
    # What containers get beside GPUs; a node that lacks one of them offers nothing, with the reason.
    gds: bool = False  # GPUDirect Storage: /dev/nvidia-fs*
    gdrcopy: bool = False  # /dev/gdrdrv
    mofed: bool = False  # RDMA: /dev/infiniband
    imex_channels: tuple[ImexChannel, ...] = ()  # /dev/nvidia-caps-imex-channels


class Simulator(Section, frozen=True):
    """Simulated GPUs in place of NVML's, for nodes without any."""

    profile: str | None = None  # a machine of the simulator (dgx-h200, ...); null: the GPUs are real


class Sampling(Section, frozen=True):
    """How often the moving figures of the GPUs are read."""

    interval_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    # Means and maxima are over so much time: at least the time between two scrapes.
    window_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    pcie_throughput: bool = False  # reading it blocks for 40 ms per GPU
    # Of SMs, tensor cores and memory, by GPM: Hopper and newer.
    activity: bool = False


class MetricsSettings(Section, frozen=True):
    """Metrics beyond the agent's own names."""

    # gpu-manager's four container_* metrics, also served at its path /metric.
    gpu_manager_names: bool = False


class XidOverride(Section, frozen=True):
    """How one Xid is judged here; keys that are left out stay as in the table of `docs/health.md`."""

    class_: Literal["application", "needs_reset", "needs_reboot", "contained", "informational"] | None = (
        msgspec.field(default=None, name="class")
    )
    verdict: Literal["count", "suspect", "unhealthy"] | None = None
    # False: only a reset that was seen, a reboot or `clear-health` brings the GPU back.
    recovers: bool | None = None
    quiet_seconds: QuietSeconds | None = None


class QuietTimes(Section, frozen=True):
    """Seconds without a new event, probes passing, before a GPU is trusted again; by kind of fault."""

    needs_reset: QuietSeconds = 300.0
    needs_reboot: QuietSeconds = 300.0
    contained: QuietSeconds = 300.0
    unknown: QuietSeconds = 300.0  # Xids that are not in the table
    ecc: QuietSeconds = 300.0  # uncorrectable memory errors
    lost: QuietSeconds = 60.0
    probe: QuietSeconds = 30.0  # NVML did not answer, or with an error


class HealthSettings(Section, frozen=True):
    """How GPUs are judged. `xids` is keyed by Xid number."""

    probe_seconds: Annotated[float, Meta(ge=0.2, le=4)] = 2.0  # a lost GPU is to be found within 5 s
    kernel_log: AbsolutePath | None = "/dev/kmsg"  # null: Xids that fall while the agent is away go unseen
    quiet: QuietTimes = QuietTimes()
    xids: dict[XidNumber, XidOverride] = msgspec.field(default_factory=dict)


if TYPE_CHECKING:

    class Modes(Section, frozen=True):
        """As below, as far as a mode is asked for by name."""

        pgpu: bool = True
        vgpu: bool = True
        mps: bool = True
        mig: bool = True

else:
    Modes = msgspec.defstruct(
        "Modes",
        [(mode.value, bool, True) for mode in OFFERED_MODES],
        bases=(Section,),
        namespace={
            "__doc__": "Modes that this node may be switched to; one that is off is never registered."
        },
        frozen=True,
    )


class Vgpu(Section, frozen=True):
    """How fractions of GPUs are placed."""

    placement: Literal["binpack", "spread", "fragmentation"] = "binpack"
    # How long a GPU is kept for the second half of a pair whose first half was asked for.
    reservation_seconds: Annotated[float, Meta(ge=1, le=120)] = 10.0
    write_choice: bool = True  # as gpu-admission's annotations on the pod; takes the right to patch pods
    # Enforcement of containers' memory: none; a report of those that use more; the enforcement library
    # where it can be shown; no container without it. A namespace's label may say otherwise, unless it is off.
    enforcement: Literal["off", "report", "library", "strict"] = "library"
    # Enforcement of the compute that containers asked for: none; the enforcement library; the library, while
    # unused compute is everybody's.
    compute: Literal["off", "hard", "soft"] = "off"
    # Pods that could get around their limits (privileged, volumes over them): report them, or refuse them.
    avoidable_limits: Literal["report", "refuse"] = "report"
    # Containers that are measured above their cap for long, or keep the agent from the files of their limits:
    # report them, or end them.
    above_cap: Literal["report", "end"] = "report"
    # Resize containers by their pods' annotation: only where an admission policy says who may write it.
    resize: bool = False
    # The enforcement library by full path, as the agent sees it; null: that of the image.
    library: AbsolutePath | None = None


class Mps(Section, frozen=True):
    """MPS control daemons and shares of their GPUs."""

    placement: Literal["binpack", "spread", "fragmentation"] = "binpack"
    reservation_seconds: Annotated[float, Meta(ge=1, le=120)] = 10.0
    # nvidia-cuda-mps-control by full path; null: searched below driver.root, then on PATH.
    control_program: AbsolutePath | None = None
    # Memory of the node that the pods of one GPU may take together by files in /dev/shm, in MiB.
    shared_memory_mebibytes: Annotated[int, Meta(ge=64, le=4_194_304)] = 4096
    # Start the MPS server with the daemon and hold it to be up.
    prestart_server: bool = True
    # Keep GPUs in compute mode EXCLUSIVE_PROCESS while they serve, so that nothing runs beside MPS.
    exclusive_process: bool = True
    probe_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    # How long a dead daemon's server may still serve its clients before it is ended.
    orphan_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    # How long clients may take to leave when a daemon is stopped.
    quit_seconds: Annotated[int, Meta(ge=0, le=600)] = 5
    # Fewer holders per GPU than MPS can serve; null: as many as it can (48, or 60 with newer drivers).
    most_clients: Annotated[int, Meta(ge=1, le=60)] | None = None
    # Pods that may run as root reach the daemon's control socket: report them, or refuse them.
    root_pods: Literal["report", "refuse"] = "report"
    # Without CDI devices in kubelet and runtime a pod's manifest can undo its caps: report it, or offer none.
    advisory_caps: Literal["report", "refuse"] = "report"


class Dra(Section, frozen=True):
    """GPUs as devices of Kubernetes' DRA (1.36.5 and newer): claims choose between whole GPUs and MPS shares.

    Those that the label, defaultMode or a layout gives the mode dra.
    """

    enabled: bool = False
    # How long an MPS daemon runs on after its last claim, unless a claim of a whole GPU comes.
    keep_daemon_seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    # So many GPUs, the last ones, take no MPS shares: whole GPUs find room while shares queue.
    reserve_whole: Annotated[int, Meta(ge=0, le=1024)] = 0
    # Have the kubelet prepare again, by an annotation of the pod, what it would leave for a minute.
    nudge_pods: bool = True


class Mig(Section, frozen=True):
    """Instances of GPUs in MIG mode."""

    # mixed: a resource for each profile, nvidia.com/mig-1g.18gb; single: all as nvidia.com/gpu, where they
    # are alike and no whole GPU is offered (modes.pgpu: false).
    strategy: Literal["mixed", "single"] = "mixed"
    # Make and destroy instances as layouts say (their key mig): takes privilege, see the chart's mig.manage.
    manage: bool = False
    # Instances that others made may be destroyed, too, while nobody holds them.
    adopt_foreign: bool = False
    # MIG mode of a free GPU may be switched where that takes a reset of the GPU.
    allow_reset: bool = False


class LayoutEntry(Section, frozen=True):
    """Some GPUs of a layout and their mode."""

    # Index ranges (0-3, 5), UUIDs, product patterns (NVIDIA H200, *T4*), or rest.
    gpus: list[str | int]
    mode: ModeName
    replicas: Annotated[int, Meta(ge=1, le=100)] = 1  # pgpu only: time slices of each GPU
    # mig only: profiles of the instances that each GPU shall have; none: as they are.
    mig: Annotated[tuple[MigProfile, ...], Meta(max_length=8)] = ()

    def resolved(self) -> Entry:
        return Entry(tuple(map(str, self.gpus)), Mode(self.mode), self.replicas, self.mig)


class TimeSlicing(Section, frozen=True):
    """How time-sliced GPUs are offered."""

    rename: bool = False  # as nvidia.com/gpu.shared instead of nvidia.com/gpu
    refuse_more_than_one: bool = False  # more slices for one container give it no more of a GPU


class Settings(Section, frozen=True):
    """The whole configuration of the node agent."""

    version: Literal[1] = 1
    # Without a label: none, pgpu, vgpu, mps, mig, dra, or the name of a layout.
    default_mode: str = "none"
    mode_file: AbsolutePath | None = None  # a file with one word, in place of the node label
    when_busy: Literal["drain", "refuse"] = "drain"
    # Processes on a GPU of no pod that holds it: report them, or offer none of it until they have ended.
    unexplained_processes: Literal["report", "strict"] = "report"
    modes: Modes = Modes()
    layouts: dict[LayoutName, list[LayoutEntry]] = msgspec.field(default_factory=dict)
    time_slicing: TimeSlicing = TimeSlicing()
    vgpu: Vgpu = Vgpu()
    mps: Mps = Mps()
    mig: Mig = Mig()
    dra: Dra = Dra()
    node_labels: bool = True  # describe driver and GPUs in labels of the node
    logging: Logging = Logging()
    http: HttpSettings = HttpSettings()
    https: Https = Https()
    kubelet: Kubelet = Kubelet()
    cluster: ClusterSettings = ClusterSettings()
    driver: DriverFiles = DriverFiles()
    host: HostSettings = HostSettings()
    injection: Injection = Injection()
    simulator: Simulator = Simulator()
    sampling: Sampling = Sampling()
    metrics: MetricsSettings = MetricsSettings()
    health: HealthSettings = HealthSettings()

    @property
    def device_plugins_folder(self) -> Path:
        """Folder of kubelet.sock and of the kubelet's checkpoint."""
        return Path(self.kubelet.device_plugins or f"{self.kubelet.root}/device-plugins")


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> Settings:
    """Settings from a YAML file, `GPU_NODE_AGENT_*` variables and `key.path=value` flags.

    Blocks on the file; call it from a thread once the loop runs. Raises ConfigurationError.
    """
    given = os.environ if environment is None else environment
    reserved = {ENVIRONMENT_PREFIX + name for name in RESERVED_ENVIRONMENT}
    variables = {name: value for name, value in given.items() if name not in reserved}
    settings = configuration.load(Settings, file, variables, flags, prefix=ENVIRONMENT_PREFIX)
    if faults := impossible(settings):
        lines = configuration.lines_of(file) if file else {}
        raise ConfigurationError([_located(file, lines, path, sentence) for path, sentence in faults])
    return settings


def schema() -> dict[str, Any]:
    """JSON schema of the configuration file, as published in `config/schema.json`."""
    return configuration.schema(Settings)


def _located(file: Path | None, lines: Mapping[str, int], path: str, sentence: str) -> str:
    where = f"{file} line {lines[path]}: " if path in lines else ""
    return f"{where}{path} {sentence}"
