"""Looks at the driver and its GPUs."""

from collections.abc import Sequence
from pathlib import Path

from agent.model.cuda import dotted
from agent.model.look import Look
from agent.modes.wing import Machine
from agent.nvml.nvml_errors import NvmlError
from agent.nvml.port import NvmlPort


def look_at_machine(nvml: NvmlPort, state: Path, root: Path | None = None) -> tuple[Machine, Sequence[Look]]:
    """Ask NVML once. `state`, `root`: see Machine. Blocks."""
    try:
        driver = nvml.open()
    except NvmlError as error:
        return Machine(None, (), state, root), (Look.failed("driver", f"{error}"),)
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
        return Machine(driver, (), state, root), looks
    finally:
        nvml.close()
    if gpus:
        products = ", ".join(sorted({gpu.product for gpu in gpus}))
        looks.append(Look.ok("GPUs", f"{len(gpus)} x {products}"))
    else:
        looks.append(Look.failed("GPUs", "the driver knows no GPU; see dmesg and nvidia-smi"))
    return Machine(driver, tuple(gpus), state, root), looks
