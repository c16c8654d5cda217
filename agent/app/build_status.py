"""Builds the socket of `gpu-node-agent status`, `top`, `cordon`, `clear-health` and `release`."""

from collections.abc import Mapping
from pathlib import Path

from agent.app.parts import Core, Tasks
from agent.injection.inject import Injector
from agent.inventory.gpu_monitor import GpuMonitor
from agent.model.modes import Mode
from agent.modes.cordon_book import CordonBook
from agent.modes.unexplained import Unexplained
from agent.modes.wing import Wing
from agent.status import top
from agent.status.commands import Commands
from agent.status.last_holders import LastHolders
from agent.status.report import StatusSources
from agent.telemetry.reading import Sources
from agent.web.control import NAME as CONTROL_SOCKET
from agent.web.control import ControlServer


def start_commands(
    core: Core,
    tasks: Tasks,
    monitor: GpuMonitor,
    injector: Injector,
    wings: Mapping[Mode, Wing],
    cordons: CordonBook,
    unexplained: Unexplained,
    sources: Sources,
) -> None:
    last = LastHolders(core.holdings.cell)
    tasks.start("last holders", last.run)
    control = ControlServer(Path(core.settings.host.run) / CONTROL_SOCKET)
    readiness = core.readiness
    status = StatusSources(
        core.inventory,
        monitor,
        core.holdings,
        readiness.switch,
        injector,
        readiness.blockers,
        # Probes have no part of the second: it names pods by their UIDs.
        lambda: [*readiness.remarks(), *unexplained.sentences()],
        cordons,
        wings,
        last,
    )
    Commands(status).add_to(control)
    top.add_to(control, sources, readiness.switch, wings)
    tasks.start("control socket", control.serve)
