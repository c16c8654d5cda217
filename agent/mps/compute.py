"""The compute mode of a GPU under MPS: EXCLUSIVE_PROCESS while its daemon serves, DEFAULT after.

Without it MPS fails open: a process that cannot reach the daemon would run beside it, without limits.
"""

from typing import Protocol

import structlog

from agent.mps.errors import MpsError
from agent.nvml.errors import NvmlError, NvmlNotSupported
from agent.nvml.port import ComputeMode, NvmlPort
from agent.nvml.worker_thread import Lane

log = structlog.get_logger()


class ComputeModes(Protocol):
    """Compute modes as a daemon's supervisor needs them."""

    async def get(self, uuid: str) -> ComputeMode | None:
        """The mode; None: this GPU or driver has none. Raises MpsError."""

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        """Change it. Raises MpsError with the remedy."""


class NvmlComputeModes:
    """Compute modes through NVML, in the worker lane."""

    def __init__(self, nvml: NvmlPort, lane: Lane) -> None:
        self._nvml = nvml
        self._lane = lane

    async def get(self, uuid: str) -> ComputeMode | None:
        """See ComputeModes."""
        try:
            return await self._lane.run(self._nvml.compute_mode, uuid)
        except NvmlNotSupported:
            return None
        except NvmlError as error:
            raise MpsError(f"the compute mode cannot be read: {error}") from error

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        """See ComputeModes."""
        try:
            await self._lane.run(self._nvml.set_compute_mode, uuid, mode)
        except NvmlError as error:
            raise MpsError(
                f"compute mode {mode.name} cannot be set ({error}); the agent must run as root, privileged"
            ) from error


class NoComputeModes:
    """Leaves compute modes alone (`mps.exclusiveProcess: false`)."""

    async def get(self, uuid: str) -> ComputeMode | None:  # noqa: ARG002
        """Nothing to hold."""
        return None

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        """Nothing to do."""


async def hold(modes: ComputeModes, uuid: str, lost: bool = False) -> None:
    """Have a GPU in the mode of MPS; `lost`: it has been before, and somebody took it. Raises MpsError."""
    mode = await modes.get(uuid)
    if mode in (None, ComputeMode.EXCLUSIVE_PROCESS):
        return
    if lost:
        log.warning("mps_compute_mode_lost", gpu=uuid, found=mode.name if mode else None)
    await modes.set(uuid, ComputeMode.EXCLUSIVE_PROCESS)


async def give_back(modes: ComputeModes, uuid: str) -> None:
    """Have a GPU out of the mode of MPS. Raises MpsError where that is known not to be so."""
    try:
        mode = await modes.get(uuid)
    except MpsError as error:
        # A GPU that is lost has no mode, and is not to be waited for.
        log.error("mps_compute_mode_unknown", gpu=uuid, problem=str(error))
        return
    if mode is ComputeMode.EXCLUSIVE_PROCESS:
        await modes.set(uuid, ComputeMode.DEFAULT)
