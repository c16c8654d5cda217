"""Looks at how containers would get their GPUs: own specification, NVIDIA's toolkit, runtime, CDI switch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from agent.check.host import HostFiles, Runtimes, runtimes, toolkit_version
from agent.check.kubelet import CheckedNode
from agent.injection import toolkit as programs
from agent.injection.companions import device_root, lacking, wanted
from agent.injection.inject import cdi_problem, choose, toolkit_devices
from agent.injection.toolkit import (
    FILE,
    MOST_BYTES,
    BadSpecification,
    CdiError,
    Devices,
    Places,
    Toolkit,
    parse,
)
from agent.kit import files
from agent.kit.files import inside
from agent.model.look import Look, Severity
from agent.modes.wing import Machine
from agent.settings import Settings

# The CDI specification of the GPUs that the agent makes: as it stands, or whether one can be made here.

SUBJECT = "GPU specification"


@dataclass(frozen=True, slots=True)
class Own:
    """The devices that containers can get by it."""

    wanted: bool  # whether the agent makes one at all, with this configuration
    devices: Devices = field(default_factory=Devices)
    file: Path | None = None  # None: none is there yet


async def own_specification(settings: Settings, host: HostFiles) -> Own:
    """The file there; without one the output of NVIDIA's program, which is not written."""
    injection = settings.injection
    if injection.strategy == "envvar" or not injection.toolkit or settings.simulator.profile:
        return Own(wanted=False)
    if standing := await anyio.to_thread.run_sync(_standing, settings, host):
        return standing
    folder = Path(injection.toolkit)
    if not await anyio.to_thread.run_sync(programs.present, folder):
        missing = f"{programs.CTK} and {programs.HOOK} are not in {folder}"
        return Own(True, Devices(problem=f"{missing}; use an image that holds them (injection.toolkit)"))
    hook = Path(settings.host.state) / programs.FOLDER
    root = Path(injection.driver_root or settings.driver.root)
    places = Places(folder, root, Path(injection.host_driver_root or root), hook, wanted(injection))
    try:
        made = await Toolkit(places).specification(hook / programs.HOOK)
    except CdiError as error:
        return Own(True, Devices(problem=str(error)))
    return Own(True, Devices(made.names))


def _standing(settings: Settings, host: HostFiles) -> Own | None:
    file = Path(settings.host.cdi) / FILE
    try:
        file = host.folder(settings.host.cdi) / FILE
        text = files.read_text(file, MOST_BYTES)
        return Own(True, Devices(parse(text.encode()).names), file)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, BadSpecification) as error:
        return Own(True, Devices(problem=f"{file}: {str(error)[:200]}"), file)


def look_at_specification(
    settings: Settings, host: HostFiles, own: Own, machine: Machine, *, needed: bool
) -> Iterator[Look]:
    """Whether it names every GPU, and its hook can be run; `needed`: containers get GPUs by it. Blocks."""
    if not own.wanted or machine.driver is None:
        return  # without a driver there is nothing to make one of, and that is said already
    worst = Severity.FAILED if needed else Severity.WARNING
    if own.devices.problem:
        yield Look(SUBJECT, worst, own.devices.problem)
        return
    missing = [gpu.uuid for gpu in machine.gpus if not gpu.mig_enabled and gpu.uuid not in own.devices.names]
    if problem := programs.obstacle(host.folder(Path(settings.host.state) / programs.FOLDER)):
        yield Look(SUBJECT, worst, problem)
    elif missing:
        remedy = "the check and the agent need the device nodes of all GPUs (docs/injection.md)"
        yield Look(SUBJECT, worst, f"it lacks {', '.join(missing)}; {remedy}")
    else:
        how = f"{own.file} names" if own.file else "the agent can make one, with"
        yield Look.ok(SUBJECT, f"{how} {len(own.devices.names)} GPUs")


# Looks at how containers would get their GPUs: NVIDIA's toolkit, the runtime, and its CDI switch.

OLDEST_TOOLKIT = (1, 7, 0)
NOT_SEEN = "cannot be seen from here (--host-root names where the node's root is mounted)"
SWITCH_ON = "set enable_cdi = true there and restart containerd"


@dataclass(frozen=True, slots=True)
class Way:
    settings: Settings
    host: HostFiles
    facts: CheckedNode | None
    own: Devices  # of the agent's own specification
    runtime: Runtimes | None
    toolkit: frozenset[str]  # devices of the toolkit's specification

    @property
    def by_cdi(self) -> bool:
        """Whether the agent would answer CDI devices, and the runtime injects them."""
        software = self.facts.software if self.facts else None
        chosen = choose(self.settings, software, self.toolkit, self.own).cdi
        return chosen and not (self.runtime and self.runtime.cdi is False)

    @property
    def by_own_alone(self) -> bool:
        """Whether nothing would serve instead of the agent's specification: no other one, no variable."""
        if self.toolkit:
            return False
        by_nodes = self.settings.injection.device_nodes
        return self.by_cdi or not (by_nodes or _runtime(self).grade is not Severity.FAILED)

    @property
    def worst(self) -> Severity:
        """Of NVIDIA's runtime where it would not serve: CDI may, where nobody says that it does not."""
        undecided = self.facts is None and self.settings.injection.strategy == "auto"
        return Severity.UNKNOWN if undecided else Severity.FAILED


def way_of(settings: Settings, host: HostFiles, facts: CheckedNode | None, own: Own, *, driver: bool) -> Way:
    """Read the node's files. Blocks."""
    folders = (host.folder(settings.host.cdi), host.folder("/etc/cdi"))
    # The missing driver alone is to be named as missing, not its consequences.
    devices = own.devices if driver or not own.wanted else Devices(frozenset({"GPU-"}))
    version = facts.software.container_runtime_version if facts else ""
    return Way(settings, host, facts, devices, runtimes(host, version), toolkit_devices(folders))


def look_at_injection(way: Way) -> Iterator[Look]:
    """Toolkit, default runtime, CDI. Blocks."""
    if way.settings.simulator.profile:
        text = "any will do: the GPUs are simulated, and containers get no device"
        yield Look.ok("container runtime", text)
        return
    unneeded = None
    if way.by_cdi:
        unneeded = "not needed: GPUs are injected as CDI devices"
    elif way.settings.injection.device_nodes:
        unneeded = "not needed: injection.deviceNodes names the nodes"
    yield _toolkit(way, unneeded)
    yield Look.ok("default runtime", unneeded) if unneeded else _runtime(way)
    yield _cdi(way)
    yield from _companions(way.settings)


def _companions(settings: Settings) -> Iterator[Look]:
    found = wanted(settings.injection)
    if not found:
        return
    root = device_root(Path(settings.injection.driver_root or settings.driver.root))
    subject = "devices beside GPUs"
    if text := lacking(root, found):
        yield Look.failed(subject, text)
    else:
        yield Look.ok(subject, f"those of {', '.join(f'injection.{each.key}' for each in found)} are there")


def _toolkit(way: Way, unneeded: str | None) -> Look:
    found = toolkit_version(way.host)
    if found is None:
        if unneeded:
            return Look.ok("toolkit", unneeded)
        if way.host.root is None:
            return Look.unknown("toolkit", f"NVIDIA's container toolkit is needed, and {NOT_SEEN}")
        return Look(
            "toolkit",
            way.worst,
            "NVIDIA's container toolkit is not on the node, and without it nothing but CDI gives containers "
            "the driver: install 1.7.0 or later, or see what keeps CDI from it (below)",
        )
    program, version = found
    if version is None:
        text = f"{program} is there and does not print its version"
        if unneeded:
            return Look.ok("toolkit", f"{text}; {unneeded}")
        return Look.unknown("toolkit", f"{text}: run {program} --version there, 1.7.0 is needed")
    text = f"{program} {'.'.join(map(str, version))}"
    if version < OLDEST_TOOLKIT and not unneeded:
        return Look.failed("toolkit", f"{text}: update NVIDIA's container toolkit to 1.7.0 or later")
    return Look.ok("toolkit", text)


def _runtime(way: Way) -> Look:
    subject = "default runtime"
    found = way.runtime
    if found is None and way.host.root is None:
        remedy = "it must be nvidia, or pods must name a RuntimeClass that leads to it"
        return Look.unknown(subject, f"the runtime's configuration {NOT_SEEN}: {remedy}")
    if found is None:
        found = Runtimes("its defaults, without a configuration file", "runc")
    if found.unread:
        return Look.unknown(subject, _unread(found))
    if found.default.startswith("nvidia"):  # AKS calls it nvidia-container-runtime
        return Look.ok(subject, f"{found.default}, by {found.file}")
    seen = f"{found.default} by {found.file}"
    if any(name.startswith("nvidia") for name in found.names):
        return Look.warning(
            subject,
            f"{seen}: pods get their GPUs only if they name a RuntimeClass that leads to the runtime nvidia; "
            "nvidia-ctk runtime configure --set-as-default, or CDI, serves all pods",
        )
    return Look(
        subject,
        way.worst,
        f"{seen}: pods would start without their GPUs; nvidia-ctk runtime configure --set-as-default and a "
        "restart of the runtime set it, or use CDI (below)",
    )


def _cdi(way: Way) -> Look:
    strategy = way.settings.injection.strategy
    if strategy == "envvar":
        return Look.ok("CDI", "not used: injection.strategy is envvar")
    if way.facts is None:
        return Look.unknown("CDI", "needs kubelet 1.29 and containerd 2.0 or CRI-O 1.23; see kubelet")
    found = way.runtime
    if found is None and way.host.root is None:
        return Look.unknown("CDI", f"the runtime's configuration {NOT_SEEN}, which may switch CDI off")
    if found and found.cdi is False:
        text = f"{found.file} switches it off, and pods that get CDI devices start without them or not at all"
        return Look.failed("CDI", f"{text}: {SWITCH_ON}, or set injection.strategy: envvar")
    if found and found.unread:
        return Look.unknown("CDI", f"{_unread(found)}, which may switch CDI off")
    if problem := cdi_problem(way.facts.software):
        return _by_version(way, problem)
    folders = found.cdi_folders if found else None
    if found and folders is not None and not _reads(way, folders):
        text = f"{found.file} has specifications read from {', '.join(folders)} alone"
        return Look.failed("CDI", f"{text}: add {way.settings.host.cdi} to its cdi_spec_dirs")
    if way.own.names:
        return Look.ok("CDI", "kubelet and runtime take the devices of the agent's own specification")
    if way.toolkit:
        return Look.ok("CDI", f"kubelet and runtime take {len(way.toolkit)} devices of the toolkit's")
    grade = Severity.FAILED if strategy == "cdi" else Severity.WARNING
    return Look("CDI", grade, "kubelet and runtime support it, but there is no specification of the GPUs")


def _unread(found: Runtimes) -> str:
    return f"the runtime's configuration cannot be read: {', '.join(found.unread)}"


def _by_version(way: Way, problem: str) -> Look:
    switched = way.runtime is not None and way.runtime.cdi is True
    if way.settings.injection.strategy == "cdi":
        if switched:
            return Look.ok("CDI", "switched on in the runtime's configuration")
        text = f"{problem}, and injection.strategy is cdi: {SWITCH_ON}, or use injection.strategy: auto"
        return Look.failed("CDI", text)
    more = "; it is switched on there, so injection.strategy: cdi would use it" if switched else ""
    return Look.warning("CDI", f"{problem}: NVIDIA's runtime and its variable are used instead{more}")


def _reads(way: Way, folders: tuple[str, ...]) -> bool:
    """Whether the runtime looks where the agent writes; /var/run is a link to /run on most nodes."""
    root = way.host.root or Path("/")
    try:
        wanted = inside(root, way.settings.host.cdi)
        there = [inside(root, folder) for folder in folders]
        return wanted in there or any(each.exists() and wanted.samefile(each) for each in there)
    except OSError:
        return False
