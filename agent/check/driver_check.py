"""Looks at the driver, its GPUs, and the needs of the modes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.model.compat import dotted, hooked, vgpu_warning
from agent.model.gpu import Driver, Gpu
from agent.model.look import Look
from agent.modes import wing
from agent.mps.wing import MpsWing
from agent.nvml.nvml_errors import NvmlError
from agent.nvml.port import NvmlPort
from agent.settings import Settings


@dataclass(frozen=True, slots=True)
class Machine:
    driver: Driver | None
    gpus: tuple[Gpu, ...]
    looks: tuple[Look, ...]


def look_at_machine(nvml: NvmlPort) -> Machine:
    """Ask NVML once. Blocks."""
    try:
        driver = nvml.open()
    except NvmlError as error:
        return Machine(None, (), (Look.failed("driver", f"{error}"),))
    looks = [Look.ok("driver", f"{driver.version}, serves CUDA {dotted(driver.cuda_version)}")]
    gpus = []
    try:
        for index in range(nvml.count()):
            try:
                gpus.append(nvml.describe(index))
            except NvmlError as error:
                looks.append(Look.warning("GPUs", f"GPU {index} cannot be described: {error}"))
    except NvmlError as error:
        looks.append(Look.failed("GPUs", f"the driver does not say how many there are: {error}"))
        return Machine(driver, (), tuple(looks))
    finally:
        nvml.close()
    if gpus:
        products = ", ".join(sorted({gpu.product for gpu in gpus}))
        looks.append(Look.ok("GPUs", f"{len(gpus)} x {products}"))
    else:
        looks.append(Look.failed("GPUs", "the driver knows no GPU; see dmesg and nvidia-smi"))
    return Machine(driver, tuple(gpus), tuple(looks))


def look_at_modes(settings: Settings, machine: Machine) -> Iterator[Look]:
    """The findings on MIG, mode vgpu and mode mps for these GPUs. Blocks on files."""
    if mig := [str(gpu.index) for gpu in machine.gpus if gpu.mig_enabled]:
        yield Look.warning(
            "MIG",
            f"on for GPU {', '.join(mig)}: such a GPU is not offered; nvidia-smi -i <index> -mig 0 ends it",
        )
    vgpu_hooked = settings.modes.vgpu and hooked(settings.vgpu.enforcement, settings.vgpu.library)
    if vgpu_hooked and machine.driver and machine.gpus and (warning := vgpu_warning(machine.driver)):
        yield Look.warning("mode vgpu", warning)
    found = wing.Machine(machine.driver, machine.gpus, Path(settings.host.state))
    yield from MpsWing.checks(settings, found)
