"""Builds the socket of `gpu-node-agent status`, `top`, `cordon`, `clear-health` and `release`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.app.mode_parts import ModeParts
from agent.app.parts import Core, Tasks
from agent.injection.inject import Injector
from agent.inventory.gpu_monitor import GpuMonitor
from agent.model.modes import Mode
from agent.modes.cordon_book import CordonBook
from agent.modes.unexplained import Unexplained
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
    modes: Mapping[Mode, ModeParts],
    cordons: CordonBook,
    unexplained: Unexplained,
    sources: Sources,
) -> None:
    switch, readiness = core.readiness.switch, core.readiness
    limits = next((parts.limits for parts in modes.values() if parts.limits), None)

    def injection() -> tuple[str, str]:
        return "cdi" if injector.choice.cdi else "envvar", injector.choice.reason

    def daemon(uuid: str) -> dict[str, Any] | None:
        return next((found for parts in modes.values() if (found := parts.daemon(uuid))), None)

    def enforced(mode: Mode) -> str | None:
        return modes[mode].enforced() if mode in modes else None  # off is not in the table

    last = LastHolders(core.holdings.cell)
    tasks.start("last holders", last.run)
    control = ControlServer(Path(core.settings.host.run) / CONTROL_SOCKET)
    status = StatusSources(
        core.inventory,
        monitor,
        core.holdings,
        lambda: switch.value,
        injection,
        readiness.blockers,
        daemon,
        # Probes have no part of the second: it names pods by their UIDs.
        lambda: [*readiness.remarks(), *unexplained.sentences()],
        cordons,
        enforced,
        {mode: parts.limits.document for mode, parts in modes.items() if parts.limits},
        last,
    )
    Commands(status).add_to(control)
    top.add_to(
        control,
        sources,
        lambda: {one.uuid: one.active.mode.value for one in switch.value.gpus},
        limits.allotted if limits else dict,
    )
    tasks.start("control socket", control.serve)
