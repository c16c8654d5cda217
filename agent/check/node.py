"""`gpu-node-agent check node`: what keeps this node from offering its GPUs, with the remedies."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from agent.check import node_files
from agent.isolation.library import obstacle
from agent.model.compat import hooked, vgpu_warning
from agent.model.cuda import MPS_CAPABILITY, MPS_CUDA, told
from agent.model.gpu import Driver, Gpu
from agent.mps.binary import find
from agent.mps.errors import ProgramMissing
from agent.nvml.errors import NvmlError
from agent.nvml.port import NvmlPort
from agent.plugins.inject import NodeSoftware, cdi_problem, toolkit_devices
from agent.settings import Settings

OLDEST_TOOLKIT = (1, 7, 0)
OLDEST_KUBELET = (1, 25)


class Grade(Enum):
    """How a look came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Look:
    """One thing that was looked at; `text` says what was seen, and the remedy."""

    what: str
    grade: Grade
    text: str

    def told(self) -> str:
        """One line."""
        return f"{self.grade.value:8} {self.what:18} {self.text}"


def look(settings: Settings, nvml: NvmlPort, software: NodeSoftware | None) -> Iterator[Look]:
    """Look at everything, one after the other. Blocks."""
    yield from _driver(settings, nvml)
    root = Path(settings.driver.root)
    devices = toolkit_devices((Path(settings.host.cdi), Path("/etc/cdi")))
    yield _toolkit(root)
    yield _runtime(settings, root, devices, software)
    yield _kubelet(software)
    yield _cdi(devices, software)
    yield from _sockets(settings)
    yield _cgroups(settings)
    yield _topology(root)
    yield from _enforcement(settings)


def _driver(settings: Settings, nvml: NvmlPort) -> Iterator[Look]:
    try:
        driver = nvml.open()
    except NvmlError as error:
        yield Look("driver", Grade.FAILED, f"{error}")
        return
    try:
        yield Look("driver", Grade.OK, f"{driver.version}, serves CUDA {told(driver.cuda_version)}")
        gpus = []
        for index in range(nvml.count()):
            try:
                gpus.append(nvml.describe(index))
            except NvmlError as error:
                yield Look("GPUs", Grade.WARNING, f"GPU {index} cannot be described: {error}")
        if not gpus:
            yield Look("GPUs", Grade.FAILED, "the driver knows no GPU; see dmesg and nvidia-smi")
            return
        products = ", ".join(sorted({gpu.product for gpu in gpus}))
        yield Look("GPUs", Grade.OK, f"{len(gpus)} x {products}")
        yield from _modes(settings, driver, gpus)
    finally:
        nvml.close()


def _modes(settings: Settings, driver: Driver, gpus: list[Gpu]) -> Iterator[Look]:
    if mig := [str(gpu.index) for gpu in gpus if gpu.mig_enabled]:
        yield Look(
            "MIG",
            Grade.WARNING,
            f"on for GPU {', '.join(mig)}: not offered; nvidia-smi -i <index> -mig 0 turns it off",
        )
    vgpu_hooked = settings.modes.vgpu and hooked(settings.vgpu.enforcement)
    if vgpu_hooked and (warning := vgpu_warning(driver)):
        yield Look("mode vgpu", Grade.WARNING, warning)
    if not settings.modes.mps:
        return
    if driver.cuda_version < MPS_CUDA:
        text = f"needs a driver for CUDA {told(MPS_CUDA)} or later"
        yield Look("mode mps", Grade.FAILED, f"{text}: get a newer driver, or set modes.mps: false")
    elif old := [str(gpu.index) for gpu in gpus if gpu.compute_capability < MPS_CAPABILITY]:
        text = f"GPU {', '.join(old)} is older than Volta ({told(MPS_CAPABILITY)}): not offered as MPS shares"
        yield Look("mode mps", Grade.WARNING, text)
    try:
        explicit = settings.mps.control_program
        program = find(Path(settings.driver.root), Path(explicit) if explicit else None)
        yield Look("MPS program", Grade.OK, str(program.path))
    except ProgramMissing as error:
        yield Look("MPS program", Grade.FAILED, str(error))


def _toolkit(root: Path) -> Look:
    found = node_files.toolkit_version(root)
    if found is None:
        return Look(
            "toolkit",
            Grade.UNKNOWN,
            f"NVIDIA's container toolkit is not seen below {root}; it is needed on the node (1.7.0 or "
            "later), and is seen from here only where the agent has the host's root (driver.source: host)",
        )
    program, version = found
    if version is None:
        return Look("toolkit", Grade.UNKNOWN, f"{program} is there and does not tell its version")
    text = f"{program} {'.'.join(map(str, version))}"
    if version < OLDEST_TOOLKIT:
        return Look("toolkit", Grade.FAILED, f"{text}: update NVIDIA's container toolkit to 1.7.0 or later")
    return Look("toolkit", Grade.OK, text)


def _runtime(settings: Settings, root: Path, devices: frozenset[str], software: NodeSoftware | None) -> Look:
    by_cdi = settings.injection.strategy == "cdi" or (
        settings.injection.strategy == "auto" and bool(devices) and cdi_problem(software) is None
    )
    if by_cdi:
        return Look("default runtime", Grade.OK, "not needed: GPUs are injected as CDI devices")
    if settings.injection.device_nodes:
        return Look("default runtime", Grade.OK, "not needed: injection.deviceNodes names the nodes")
    found = node_files.runtimes(root)
    if found is None:
        return Look(
            "default runtime",
            Grade.UNKNOWN,
            "no configuration of containerd, Docker or CRI-O is seen; it must be nvidia (nvidia-ctk runtime "
            "configure --set-as-default), or pods must name a RuntimeClass that leads to it, or GPUs must be "
            "injected by CDI",
        )
    if found.default == "nvidia":
        return Look("default runtime", Grade.OK, f"nvidia, by {found.file}")
    seen = f"{found.default} by {found.file}"
    if "nvidia" in found.names:
        return Look(
            "default runtime",
            Grade.WARNING,
            f"{seen}: pods get their GPUs only if they name a RuntimeClass that leads to the runtime nvidia; "
            "nvidia-ctk runtime configure --set-as-default, or CDI, serves all pods",
        )
    return Look(
        "default runtime",
        Grade.FAILED,
        f"{seen}: pods would start without their GPUs; nvidia-ctk runtime configure --set-as-default and a "
        "restart of the runtime set it, or use injection.strategy: cdi",
    )


def _kubelet(software: NodeSoftware | None) -> Look:
    if software is None:
        return Look(
            "kubelet", Grade.UNKNOWN, "its version is in the Node object, which cannot be read from here"
        )
    digits = software.kubelet.removeprefix("v").split(".")
    version = tuple(int(part) for part in digits[:2] if part.isdigit())
    text = f"{software.kubelet}, {software.runtime}"
    if version < OLDEST_KUBELET:
        return Look("kubelet", Grade.FAILED, f"{text}: Kubernetes 1.25 or later is needed")
    return Look("kubelet", Grade.OK, text)


def _cdi(devices: frozenset[str], software: NodeSoftware | None) -> Look:
    if problem := cdi_problem(software):
        return Look("CDI", Grade.WARNING, f"{problem}: variables and the default runtime are used instead")
    if not devices:
        return Look(
            "CDI",
            Grade.WARNING,
            "kubelet and runtime support it, but there is no specification of the toolkit's: nvidia-ctk cdi "
            "generate --output=/var/run/cdi/nvidia.yaml makes one",
        )
    return Look("CDI", Grade.OK, f"{len(devices)} devices of the toolkit's")


def _sockets(settings: Settings) -> Iterator[Look]:
    kubelet = Path(settings.kubelet.root)
    for path, use in (
        (kubelet / "plugins_registry", "registration"),
        (kubelet / "pod-resources" / "kubelet.sock", "who holds what"),
    ):
        if path.exists():
            yield Look("kubelet's folders", Grade.OK, f"{path} ({use})")
        else:
            text = f"{path} ({use}) is not there; set kubelet.root to the kubelet's --root-dir"
            yield Look("kubelet's folders", Grade.FAILED, text)
    for name, owner in node_files.foreign_plugins(settings.device_plugins_folder).items():
        yield Look(
            "other agents",
            Grade.WARNING,
            f"{name} is {owner}'s: the kubelet keeps one endpoint for each resource; remove the other "
            "agent from this node before it is labelled (docs/migration.md)",
        )


def _cgroups(settings: Settings) -> Look:
    version = node_files.cgroup_version(Path(settings.host.cgroups))
    if version is None:
        return Look("cgroups", Grade.UNKNOWN, f"none at {settings.host.cgroups}; needed with mode mps only")
    return Look("cgroups", Grade.OK, f"version {version}")


def _topology(root: Path) -> Look:
    found = node_files.topology_manager(root)
    if found is None:
        text = "the kubelet's configuration is not seen from here; with its policy none, NUMA is not kept"
        return Look("Topology Manager", Grade.UNKNOWN, text)
    file, policy = found
    if policy == "none":
        return Look(
            "Topology Manager",
            Grade.WARNING,
            f"policy none in {file}: whole GPUs come without regard to NUMA; topologyManagerPolicy: "
            "best-effort keeps CPUs and GPUs together",
        )
    return Look("Topology Manager", Grade.OK, f"policy {policy}")


def _enforcement(settings: Settings) -> Iterator[Look]:
    if settings.vgpu.enforcement not in ("library", "strict") or not settings.modes.vgpu:
        return
    state = Path(settings.host.state)
    if problem := obstacle(state):
        yield Look("vGPU limits", Grade.FAILED, problem)
    else:
        yield Look("vGPU limits", Grade.OK, f"containers can load the enforcement library from below {state}")
