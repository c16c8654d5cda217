"""The compute mode of a GPU under MPS: EXCLUSIVE_PROCESS while its daemon serves, DEFAULT after.

Without it MPS fails open: a process that cannot reach the daemon would run beside it, without limits. What
the agent has set it notes beside the daemon's folders, in memory as the mode itself is: so a mode that could
not be given back is known as the agent's later, and an administrator's is left alone.
"""

from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit import files
from agent.mps.mps_errors import MpsError
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import ComputeMode, NvmlError, NvmlGpuLost, NvmlNotSupported, NvmlPort, SampleRequest

log = structlog.get_logger()

RECORD = "compute-mode"
NOTE_SECONDS = 60.0  # between two looks whether a note that was there still is
OURS, OTHERS = "set by gpu-node-agent\n", "not set by gpu-node-agent\n"


class ComputeModes:
    """A GPU's driver as a daemon's supervisor needs it. This one leaves it alone, and knows nothing of it."""

    async def get(self, uuid: str) -> ComputeMode | None:  # noqa: ARG002
        """The mode; None: this GPU or driver has none, or the GPU is lost. Raises MpsError."""
        return None

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        """Change it. Raises MpsError with the remedy."""

    async def users(self, uuid: str) -> frozenset[int] | None:  # noqa: ARG002
        """PIDs of the processes that use a GPU now; None: it does not say. Raises MpsError."""
        return None


class NvmlComputeModes(ComputeModes):
    """Compute modes through NVML, in the worker thread."""

    def __init__(self, nvml: NvmlPort, thread: WorkerThread) -> None:
        self._nvml = nvml
        self._thread = thread

    async def get(self, uuid: str) -> ComputeMode | None:
        try:
            return await self._thread.run(self._nvml.compute_mode, uuid)
        except (NvmlNotSupported, NvmlGpuLost):
            return None
        except NvmlError as error:
            raise MpsError(f"the compute mode cannot be read: {error}") from error

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        try:
            await self._thread.run(self._nvml.set_compute_mode, uuid, mode)
        except NvmlError as error:
            raise MpsError(
                f"compute mode {mode.name} cannot be set ({error}); the agent must run as root, privileged"
            ) from error

    async def users(self, uuid: str) -> frozenset[int] | None:
        try:
            sample = await self._thread.run(self._nvml.sample, uuid, SampleRequest(0, counters=False))
        except NvmlError as error:
            raise MpsError(f"who uses the GPU cannot be read: {error}") from error
        return None if sample.processes is None else frozenset(each.pid for each in sample.processes)


class ExclusiveMode:
    """EXCLUSIVE_PROCESS of one GPU, and the note of who set it. Methods raise MpsError."""

    def __init__(self, uuid: str, modes: ComputeModes, folder: Path, wanted: bool = True) -> None:
        """`folder` is the daemon's; not `wanted`: it is never set, and given back where it once was."""
        self._uuid = uuid
        self._modes = modes
        self._record = folder / RECORD
        self._wanted = wanted
        self._looked = -NOTE_SECONDS  # for the note, where the mode is as it should be

    async def hold(self, lost: bool = False, inherited: bool = False) -> None:
        """Have the GPU in it. `lost`: it has been before, and somebody took it away.

        `inherited`: where it stands without a note, an agent that kept none has set it.
        """
        if not self._wanted:
            return
        mode = await self._modes.get(self._uuid)
        if mode is None:
            return
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            if anyio.current_time() - self._looked >= NOTE_SECONDS:
                if await self.ours() is None:
                    await self._note(inherited)
                self._looked = anyio.current_time()
            return
        if lost:
            log.warning("mps_compute_mode_lost", gpu=self._uuid, found=mode.name)
        await self._note(True)  # before: a note that says too much is put right by a look
        await self._modes.set(self._uuid, ComputeMode.EXCLUSIVE_PROCESS)

    async def give_back(self, inherited: bool = False) -> None:
        """Have the GPU out of it, if it was the agent that set it."""
        ours = await self.ours()
        if not (inherited if ours is None else ours):
            return
        mode = await self._modes.get(self._uuid)
        if mode is None:
            return  # lost: it may come back in any mode
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            await self._modes.set(self._uuid, ComputeMode.DEFAULT)
        await self._note(False)

    async def others(self) -> ComputeMode | None:
        """The mode, where somebody else than the agent has set one that keeps processes off the GPU."""
        mode = await self._modes.get(self._uuid)
        return None if mode is ComputeMode.DEFAULT or await self.ours() else mode

    async def ours(self) -> bool | None:
        """Whether the agent has set the mode that stands; None: there is no note."""
        try:
            return await anyio.Path(self._record).read_text(encoding="utf-8", errors="replace") == OURS
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MpsError(f"{self._record}: cannot be read: {error.strerror}") from error

    async def _note(self, ours: bool) -> None:
        content = (OURS if ours else OTHERS).encode()
        try:
            await anyio.to_thread.run_sync(files.write, self._record.parent, self._record.name, content)
        except OSError as error:
            raise MpsError(f"{self._record}: cannot be written: {error.strerror}") from error
