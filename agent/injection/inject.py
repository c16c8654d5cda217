"""How a container gets its GPUs: CDI devices, of our own specification or of the toolkit's, or a variable.

What works on which cluster, and what is refused where: docs/injection.md.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog
import yaml

from agent.cluster.node import NodeInfo, OwnNode
from agent.injection.companions import device_root, lacking, nodes, wanted
from agent.injection.toolkit import KIND, Devices
from agent.kit.files import inside
from agent.kit.tasks import Cell, describe
from agent.kubelet.wire import Allocation, DeviceNode, Mount
from agent.model.gpu import Driver, Gpu, Instance
from agent.model.resource_claim import SHARE_KIND, visible
from agent.settings import Settings

log = structlog.get_logger()

TOOLKIT_KIND = "nvidia.com/gpu"  # the CDI kind of NVIDIA's container toolkit
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
# Where NVIDIA's runtime looks for names of devices, if configured so; where Google's nodes have the driver.
DEVICE_MOUNTS = "/var/run/nvidia-container-devices"
DRIVER_MOUNT = "/usr/local/nvidia"
# Nodes that every CUDA program opens, and those that exist only on some nodes.
COMMON_NODES = ("nvidiactl", "nvidia-uvm")
OPTIONAL_NODES = ("nvidia-uvm-tools", "nvidia-modeset")
COMPANION_SECONDS = 60.0
# Versions from which CDI devices named by a plugin reach the container: kubelet 1.29 (KEP-4009, on by
# default from beta), containerd 2.0 (1.7 needs a switch), CRI-O 1.23.
KUBELET_WITH_CDI = (1, 29)
RUNTIMES_WITH_CDI = {"containerd": (2, 0), "cri-o": (1, 23)}


@dataclass(frozen=True, slots=True)
class InjectionChoice:
    cdi: bool
    reason: str


def choose(
    settings: Settings,
    software: NodeInfo | None,
    toolkit_devices: frozenset[str],
    own: Devices = Devices(),  # noqa: B008  frozen
) -> InjectionChoice:
    """The way that configuration and node allow; `auto` takes CDI only where all sides do it."""
    strategy = settings.injection.strategy
    if settings.simulator.profile:
        # Whatever specifications lie about: no runtime can give a container a GPU that is not there.
        return InjectionChoice(False, "the GPUs are simulated")
    if strategy != "auto":
        return InjectionChoice(strategy == "cdi", f"injection.strategy is {strategy}")
    if not own.names:
        if not toolkit_devices:
            why = f"; our own is not there: {own.problem}" if own.problem else ""
            return InjectionChoice(False, f"no CDI specification of kind {TOOLKIT_KIND} was found{why}")
        if not any(name.startswith("GPU-") for name in toolkit_devices):
            # Older toolkits name by index unless configured otherwise, and an index is no name for life.
            remedy = "generate it with nvidia-ctk cdi generate --device-name-strategy=uuid"
            why = f"the CDI specification of kind {TOOLKIT_KIND} names no GPU by its UUID; {remedy}"
            return InjectionChoice(False, why)
    if problem := cdi_problem(software):
        return InjectionChoice(False, problem)
    whose = f"our own specification of kind {KIND}" if own.names else "the toolkit's specification"
    return InjectionChoice(True, f"kubelet, container runtime and {whose} support CDI")


def cdi_problem(software: NodeInfo | None) -> str | None:
    """Why CDI devices that a plugin names would not reach a container; None: they do."""
    if software is None:
        return "the versions of kubelet and container runtime are not known"
    if _version(software.kubelet_version) < KUBELET_WITH_CDI:
        return f"kubelet {software.kubelet_version} ignores CDI devices"
    name, _, version = software.container_runtime_version.partition("://")
    if _version(version) < RUNTIMES_WITH_CDI.get(name, (999, 0)):
        return f"{software.container_runtime_version} is not known to inject CDI devices"
    return None


def toolkit_devices(folders: Sequence[Path]) -> frozenset[str]:
    """Names of the toolkit's CDI devices in all specification folders. Blocks; bad files are skipped."""
    found: set[str] = set()
    for folder in folders:
        try:
            files = sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            log.warning("cdi_folder_unreadable", folder=str(folder), problem=error.strerror)
            continue
        for file in files:
            # Opening a pipe would wait for its writer.
            if file.suffix in (".json", ".yaml", ".yml") and file.is_file():
                found |= _devices_of(file)
    return frozenset(found)


def _devices_of(file: Path) -> set[str]:
    try:
        with file.open(encoding="utf-8") as text:
            spec = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are safe loaders
        if spec["kind"] != TOOLKIT_KIND:
            return set()
        names = [device["name"] for device in spec["devices"]]
        # Whatever else it is may be a nest of aliases, which would take for ever to write out.
        return {str(name) for name in names if isinstance(name, str | int)}
    # ValueError: bytes that are no text, and dates that are none; RecursionError: nested beyond reason.
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError) as error:
        problem = " ".join(describe(error).split())[:200]
        log.warning("cdi_specification_unreadable", file=str(file), problem=problem)
        return set()


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"v?([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def capabilities(proc: Path) -> dict[str, str]:
    """Numbers of the device nodes by which instances are used, by the driver's names for these. Blocks.

    It has a line `gpu0/gi1/ci0/access 13` for each that could ever be made; without MIG there is no file.
    """
    try:
        lines = (proc / "driver/nvidia-caps/mig-minors").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split() for line in lines if len(line.split()) == 2)


LEAST_CUDA = (11, 4)  # driver 470: the first whose instances have UUIDs of their own
CONFIG_NODE = "/proc/driver/nvidia/capabilities/mig/config"


def makes_no_instance(driver: Driver | None, root: Path | None) -> str:
    """Say why no instance can be made or offered on a node; empty: nothing is known. Blocks.

    `root`: the node's own; None: not seen from here.
    """
    if driver and driver.cuda_version < LEAST_CUDA:
        return f"driver {driver.version} gives instances no UUID: take 470 or later, or set mig.manage: false"
    if root is None:
        return ""
    try:
        number = capabilities(inside(root, "/proc")).get("config", "1")
        found = inside(root, node := f"/dev/nvidia-caps/nvidia-cap{number}").exists()
    except OSError as error:
        return f"the driver's device nodes cannot be looked for: {error}"
    if found:
        return ""
    return f"{node} is missing, and instances are made by it: nvidia-modprobe -f {CONFIG_NODE} makes it"


def _nodes_of(minors: Mapping[str, str], instances: Sequence[tuple[Gpu, Instance]]) -> list[str]:
    """Device nodes of instances, below /dev."""
    wanted = [
        f"gpu{gpu.minor}/{part}/access"
        for gpu, each in instances
        for part in (f"gi{each.gpu_instance}", f"gi{each.gpu_instance}/ci{each.compute_instance}")
    ]
    return [f"nvidia-caps/nvidia-cap{minors[name]}" for name in dict.fromkeys(wanted) if name in minors]


class Injector:
    """Builds what a container needs to see a set of whole GPUs."""

    def __init__(self, settings: Settings, own: Cell[Devices] | None = None) -> None:
        """`own`: the devices of our own specification, kept by `agent.injection`."""
        self._settings = settings
        self._own: Cell[Devices] = own or Cell(Devices())
        self.software: NodeInfo | None = None
        self.looked: Cell[NodeInfo | None] = Cell(None)
        self._capabilities: Mapping[str, str] = {}
        self._toolkits: frozenset[str] = frozenset()
        self.choice = choose(settings, None, frozenset())
        self.companions = () if settings.simulator.profile else wanted(settings.injection)
        self._root = Path(settings.injection.driver_root or settings.driver.root)
        self._seen: Sequence[str] = ()  # nodes of companions
        self._lacking = ""
        self.lacks: Cell[str] = Cell("")  # why containers would miss a companion; empty: they would not

    def look(self, software: NodeInfo | None) -> None:
        """Find out which way the node supports. Blocks on files: call it from a thread."""
        self.software = software
        self._capabilities = capabilities(Path(self._settings.host.proc))
        folders = (Path(self._settings.host.cdi), Path("/etc/cdi"))
        self._toolkits = toolkit_devices(folders)
        choice = choose(self._settings, software, self._toolkits, self._own.value)
        if choice != self.choice:
            log.info("injection_chosen", cdi=choice.cdi, reason=choice.reason)
        self.choice = choice
        root = device_root(self._root)
        self._seen = nodes(root, self.companions)
        self._lacking = self._look_beside(root)

    def _look_beside(self, root: Path) -> str:
        if self.companions and self.choice.cdi and not self._own.value.names:
            keys = ", ".join(f"injection.{each.key}" for each in self.companions)
            return (
                f"{keys}: containers would get these by the agent's own CDI specification, which is not there"
            )
        return lacking(root, self.companions)

    async def update(self, software: NodeInfo | None) -> None:
        """Look in a thread, and let those who follow `looked` and `lacks` know."""
        await anyio.to_thread.run_sync(self.look, software)
        self.looked.publish(software)
        self._tell()

    async def follow_node(self, node: OwnNode) -> None:
        """Take up the versions of kubelet and runtime whenever the Node object shows new ones, for ever."""
        async for _ in node.changes.values():
            if node.value:
                software = node.value.status.node_info
                if software != self.software:
                    await self.update(software)

    async def follow_specification(self) -> None:
        """Look again whenever the devices of our own specification are others, for ever."""
        async for _ in self._own.values():
            await self.update(self.software)

    async def watch_companions(self) -> None:
        """Look again for what may come and go without a word, until cancelled."""
        while True:
            await anyio.sleep(COMPANION_SECONDS)
            await anyio.to_thread.run_sync(self.look, self.software)
            self._tell()

    def _tell(self) -> None:
        if self._lacking != self.lacks.value:
            self.lacks.publish(self._lacking)

    @property
    def named(self) -> Cell[Devices]:
        """The devices of our own specification."""
        return self._own

    def lacks_device(self, instance: str) -> str:
        """Why containers cannot get an instance yet, in words; empty: they can.

        Instances come and go while the agent runs, and a specification that names one is made a moment later.
        """
        if not self.choice.cdi or instance in self._own.value.names | self._toolkits:
            return ""
        return self._own.value.problem or "no CDI specification names it yet"

    @property
    def own_cdi(self) -> bool:
        """Whether devices of the agent's own specification reach containers, however GPUs are injected."""
        auto = self._settings.injection.strategy == "auto"
        return self.choice.cdi or (auto and cdi_problem(self.software) is None)

    def limits_memory(self, uuid: str) -> bool:
        """Whether containers get a GPU by a device of ours whose start has the driver limit their memory."""
        own = self._own.value
        return self.choice.cdi and uuid in own.names & own.limiting

    @property
    def caps_problem(self) -> str | None:
        """Why caps reach containers as variables, which a pod's own win over; None: as CDI edits."""
        if self.own_cdi:
            return None
        return (
            self.choice.reason if self._settings.injection.strategy != "auto" else cdi_problem(self.software)
        )

    def claim_device(self, uuid: str) -> str:
        """The qualified name of a GPU's CDI device, by which alone claims bring GPUs; empty: it has none."""
        if self._settings.simulator.profile:
            return f"{SHARE_KIND}={visible(uuid)}"
        if not self.choice.cdi:
            return ""
        return f"{KIND if uuid in self._own.value.names else TOOLKIT_KIND}={uuid}"

    @property
    def claim_problem(self) -> str:
        """Why claims cannot bring GPUs, in words; empty: they can."""
        if self.claim_device(""):
            return ""
        return f"GPUs have no CDI devices, by which alone claims bring them: {self.choice.reason}"

    def allocation(self, gpus: Sequence[Gpu]) -> Allocation:
        """Environment, mounts, device nodes or CDI names for `gpus`, in the order given."""
        return self._allocation([gpu.uuid for gpu in gpus], gpus, ())

    def instances(self, found: Sequence[tuple[Gpu, Instance]]) -> Allocation:
        """The same for instances, each with its GPU."""
        gpus = list(dict.fromkeys(gpu for gpu, _ in found))
        return self._allocation([each.uuid for _, each in found], gpus, found)

    def _allocation(
        self, uuids: Sequence[str], gpus: Sequence[Gpu], instances: Sequence[tuple[Gpu, Instance]]
    ) -> Allocation:
        variable = {VISIBLE_DEVICES: ",".join(uuids)}
        for companion in self.companions:
            variable |= companion.variables
        if self.choice.cdi:
            if self._own.value.names.issuperset(uuids):
                # The specification sets the variable to void, and wins: it is for runtimes that ignore CDI.
                return Allocation(environment=variable, cdi_devices=tuple(f"{KIND}={uuid}" for uuid in uuids))
            return Allocation(cdi_devices=tuple(f"{TOOLKIT_KIND}={uuid}" for uuid in uuids))
        configured = self._settings.injection
        mounts = [Mount(f"{DEVICE_MOUNTS}/{uuid}", os.devnull) for uuid in uuids if configured.volume_mounts]
        if configured.driver_mount:
            mounts.append(Mount(DRIVER_MOUNT, configured.driver_mount))
        return Allocation(
            environment=variable,
            mounts=tuple(mounts),
            device_nodes=self._nodes(gpus, instances) if configured.device_nodes else (),
        )

    def _nodes(
        self, gpus: Sequence[Gpu], instances: Sequence[tuple[Gpu, Instance]]
    ) -> tuple[DeviceNode, ...]:
        root = (self._settings.driver.dev_root or "").rstrip("/")
        names = [f"nvidia{gpu.minor}" for gpu in gpus] + list(COMMON_NODES)
        names += _nodes_of(self._capabilities, instances)
        # A stat of a device node never blocks: devtmpfs is memory.
        names += [name for name in OPTIONAL_NODES if os.path.exists(f"{root}/dev/{name}")]  # noqa: PTH110
        names += [name.removeprefix("dev/") for name in self._seen]
        return tuple(DeviceNode(f"/dev/{name}", f"{root}/dev/{name}") for name in names)
