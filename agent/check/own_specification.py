"""The CDI specification of the GPUs that the agent makes: as it stands, or whether one can be made here."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from agent.check.host import HostFiles
from agent.injection import hook as programs
from agent.injection.companions import wanted
from agent.injection.specification import FILE, BadSpecification, CdiError, Devices, parse
from agent.injection.toolkit import MOST_BYTES, Places, Toolkit
from agent.kit import files
from agent.model.look import Look, Severity
from agent.modes.wing import Machine
from agent.settings import Settings

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
