"""Keeps the folders of running daemons as they should be, whatever pods do to them."""

import math
import os
import time
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.tasks import Cell
from agent.model.holding import Record
from agent.mps import launch, processes, shared_memory
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import DaemonStatus
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError
from agent.mps.pods import share_holders
from agent.mps.shm_sweep import sweep

log = structlog.get_logger()

LOOK_SECONDS = 10.0
REPORT_SECONDS = 60.0
SWEEP_LOOKS = 6  # one in so many looks takes what ended containers left in shared memory


class Upkeep:
    """Looks after all folders in turn."""

    def __init__(
        self,
        manager: DaemonManager,
        run: Path,
        size: int,
        record: Cell[Record | None],
        proc: Path = Path("/proc"),
    ) -> None:
        """`size` of a GPU's shared memory in bytes; `record`: who holds what, None while it is not known."""
        self._manager = manager
        self._run = run
        self._size = size
        self._record = record
        self._proc = proc
        self._problems: dict[str, str] = {}  # that were logged last
        self._opened: dict[str, float] = {}  # when it was last logged that it was open to all again
        self._unswept: dict[str, str | None] = {}  # what the last sweep did not look at

    async def run(self) -> None:
        look = 0
        while True:
            for uuid, status in self._manager.statuses.value.items():
                if status.pid is not None:
                    await self.look(uuid, status, sweeping=look % SWEEP_LOOKS == 0)
            look += 1
            await anyio.sleep(LOOK_SECONDS)

    async def look(self, uuid: str, status: DaemonStatus, sweeping: bool) -> None:
        """Put right what can be put right of one daemon's folders; the log says what cannot, once."""
        folders = Directories.of(self._run, uuid)
        problem = None
        try:
            assert status.pid is not None
            exposed = await anyio.to_thread.run_sync(_exposed, status.pid, folders)
            if exposed and not await self._replaced(uuid, status, folders):
                await anyio.to_thread.run_sync(folders.show)
            if status.private_shm:
                problem = await anyio.to_thread.run_sync(
                    self._keep_memory, uuid, folders, sweeping, abandon_on_cancel=True
                )
        except (MpsError, OSError) as error:
            problem = str(error)
        if problem and problem != self._problems.get(uuid):
            log.warning("mps_folders_not_kept", gpu=uuid, problem=problem)
        self._problems[uuid] = problem or ""

    async def _replaced(self, uuid: str, status: DaemonStatus, folders: Directories) -> bool:
        """End a daemon that works where pods can write, unless it has clients; another is started."""
        daemon = self._manager.daemon(uuid)
        if daemon is None or os.geteuid() != 0:  # without privileges there is no other form
            return False
        survey = await daemon.control.survey(status.server, clients=True)
        if survey.servers and (survey.clients is None or survey.clients):
            return False
        log.info("mps_daemon_of_before_replaced", gpu=uuid, pid=status.pid)
        await processes.end(await anyio.to_thread.run_sync(processes.daemons, folders.pipe))
        await processes.end(await anyio.to_thread.run_sync(processes.servers, folders.pipe))
        return True

    def _keep_memory(self, uuid: str, folders: Directories, sweeping: bool) -> str | None:
        """The problem of the size of a GPU's shared memory, or None."""
        if not folders.shm.is_mount():
            return None  # that was reported when its daemon started
        problem = shared_memory.limit(folders, self._size)
        now = time.monotonic()
        # A pod may close it again and again.
        if shared_memory.restore(folders.shm) and now - self._opened.get(uuid, -math.inf) >= REPORT_SECONDS:
            self._opened[uuid] = now
            log.warning("mps_shared_memory_opened", gpu=uuid, remedy="a pod closed it to the others")
        if sweeping:
            own = {each.pid for find in (processes.daemons, processes.servers) for each in find(folders.pipe)}
            record = self._record.value
            unheld = record is not None and uuid not in share_holders(record)
            swept = sweep(folders.shm, own, unheld, self._proc)
            if swept.files:
                log.info("mps_shared_memory_swept", gpu=uuid, files=swept.files, bytes=swept.bytes)
            self._unswept[uuid] = swept.problem
        return problem or self._unswept.get(uuid)


def _exposed(pid: int, folders: Directories) -> bool:
    """Whether a daemon works where pods can write; the folders of one that does not are shown."""
    exposed = launch.exposed(pid, folders)
    if not exposed:
        folders.show()
    return exposed
