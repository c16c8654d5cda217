"""Builds what keeps our own CDI specification of the GPUs, where NVIDIA's programs are at hand."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import structlog

from agent.app.degradations import specification
from agent.app.parts import Core, Tasks
from agent.injection import hook as programs
from agent.injection.inject import Injector
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series

if TYPE_CHECKING:
    from agent.injection.keeper import SpecificationKeeper

log = structlog.get_logger()

FIRST_SECONDS = 5.0


async def build_cdi(core: Core) -> "tuple[Injector, SpecificationKeeper | None]":
    """The injector, and what keeps the specification; None: nothing can, or it is not wanted."""
    settings = core.settings
    configured = settings.injection
    folder = Path(configured.toolkit) if configured.toolkit else None
    if configured.strategy == "envvar" or folder is None or settings.simulator.profile:
        return Injector(settings), None
    if not await anyio.to_thread.run_sync(programs.present, folder):
        log.info("no_cdi_generator", folder=str(folder), reason="nvidia-ctk or nvidia-cdi-hook is missing")
        return Injector(settings), None
    # Half a MiB that agents without the programs need not hold.
    from agent.injection import toolkit  # noqa: PLC0415
    from agent.injection.keeper import SpecificationKeeper  # noqa: PLC0415

    root = configured.driver_root or settings.driver.root
    places = toolkit.Places(
        folder,
        Path(root),
        Path(configured.host_driver_root or root),
        Path(settings.host.state) / programs.FOLDER,
    )
    keeper = SpecificationKeeper(
        Path(settings.host.cdi),
        toolkit.Toolkit(places),
        core.inventory.snapshot,
        core.holdings.cell,
    )
    await keeper.take_up()
    return Injector(settings, keeper.devices), keeper


async def start_cdi(core: Core, tasks: Tasks, keeper: "SpecificationKeeper", injector: Injector) -> None:
    """Make the specification before the first list is sent, if it does not take too long, and keep it."""
    core.collectors.append(partial(_collector, keeper))
    core.readiness.degradations.append(lambda: specification(keeper.devices.value))
    with anyio.move_on_after(FIRST_SECONDS):
        await keeper.keep()
    await anyio.to_thread.run_sync(injector.look, injector.software)

    async def look_again() -> None:
        async for _ in keeper.devices.values():
            await anyio.to_thread.run_sync(injector.look, injector.software)
            injector.looked.publish(injector.software)

    tasks.start("gpu specification", keeper.run)
    tasks.start("gpu specification users", look_again)


def _collector(keeper: "SpecificationKeeper") -> Iterator[Series]:
    yield d.CDI_DEVICES, len(keeper.devices.value.names), ()
    yield d.CDI_GENERATIONS, keeper.generations, ("ok",)
    yield d.CDI_GENERATIONS, keeper.failures, ("failed",)
