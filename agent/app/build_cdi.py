"""Builds what keeps our own CDI specification of the GPUs, where NVIDIA's programs are at hand."""

from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import structlog

from agent.app.parts import Core, Tasks
from agent.injection import companions, toolkit
from agent.injection import hook as programs
from agent.injection.inject import Injector
from agent.injection.keeper import SpecificationKeeper
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series

log = structlog.get_logger()

FIRST_SECONDS = 5.0


async def build_cdi(core: Core) -> tuple[Injector, SpecificationKeeper | None]:
    """The injector, and what keeps the specification; None: nothing can, or it is not wanted."""
    settings = core.settings
    configured = settings.injection
    folder = Path(configured.toolkit) if configured.toolkit else None
    if configured.strategy == "envvar" or folder is None or settings.simulator.profile:
        return Injector(settings), None
    if not await anyio.to_thread.run_sync(programs.present, folder):
        log.info("no_cdi_generator", folder=str(folder), reason="nvidia-ctk or nvidia-cdi-hook is missing")
        return Injector(settings), None
    root = configured.driver_root or settings.driver.root
    places = toolkit.Places(
        folder,
        Path(root),
        Path(configured.host_driver_root or root),
        Path(settings.host.state) / programs.FOLDER,
        companions.wanted(configured),
    )
    keeper = SpecificationKeeper(
        Path(settings.host.cdi),
        toolkit.Toolkit(places),
        core.inventory.snapshot,
        core.holdings.cell,
    )
    await keeper.take_up()
    return Injector(settings, keeper.devices), keeper


async def keep_true(keeper: SpecificationKeeper, injector: Injector, tasks: Tasks) -> None:
    """Make the specification before the first list is sent, if it does not take too long, and keep it."""
    with anyio.move_on_after(FIRST_SECONDS):
        await keeper.keep()
    await injector.update(injector.software)

    async def look_again() -> None:
        async for _ in keeper.devices.values():
            await injector.update(injector.software)

    tasks.start("gpu specification", keeper.run)
    tasks.start("gpu specification users", look_again)


def metrics(keeper: SpecificationKeeper) -> Iterator[Series]:
    yield d.CDI_DEVICES, len(keeper.devices.value.names), ()
    yield d.CDI_GENERATIONS, keeper.generations, ("ok",)
    yield d.CDI_GENERATIONS, keeper.failures, ("failed",)
