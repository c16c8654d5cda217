"""One GPU under our own supervisor, with the real daemon and the real server, and CUDA processes beside it.

The GPU's settings stay as they are: the compute mode is not touched (`mps.exclusiveProcess: false`), nor is
MIG. What was started is ended by its PID.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.to_thread
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from agent.model.cuda import PIPE_DIRECTORY
from agent.model.gpu import Gpu
from agent.mps import processes
from agent.mps.binary import Program
from agent.mps.compute_mode import ComputeModes
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState, EventReason, Options
from agent.mps.directories import Directories
from tests.gpu.limits import Capped, capped
from tests.gpu.programs import LIBRARY, binding, lay_out, library_in_use, load

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(cgroups=Path("/nonexistent"), probe_seconds=2.0, log_seconds=0.5, quit_seconds=5)
ANSWER_SECONDS = 60.0  # the first context on a cold GPU takes seconds; seven at once take more
SERVING_SECONDS = 60.0
NO_START = "does not start"  # as the supervisor says it of a server
REMEDY = (
    "MPS cannot be shown on this machine. It needs a plain Linux kernel from 5.3 on (no gVisor), and "
    "programs that fit the driver: install the driver's own, or name their folder in GPU_TEST_MPS"
)
NO_MPS = "/nonexistent"  # a pipe folder without a daemon: the process runs without MPS


@dataclass
class Told:
    """Reports of the supervisor."""

    kinds: list[EventReason] = field(default_factory=list)

    def __call__(
        self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()
    ) -> None:
        print(f"{kind.value}: {message} {sorted(pids)}", file=sys.stderr)
        self.kinds.append(kind)


class Client:
    """A process of `tests.gpu.client`."""

    def __init__(self, process: Process) -> None:
        assert process.stdout
        self.process = process
        self._out = BufferedByteReceiveStream(process.stdout)

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    async def said(self, deadline: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Its next line."""
        with anyio.fail_after(deadline):
            line = await self._out.receive_until(b"\n", 1 << 20)
        found: dict[str, Any] = json.loads(line)
        return found

    async def on(self) -> None:
        """Let it go on."""
        assert self.process.stdin
        await self.process.stdin.send(b"\n")

    async def ready(self) -> None:
        """Wait until it has a context."""
        said = await self.said()
        assert said["ready"], said

    async def result(self) -> dict[str, Any]:
        """Let it do its job; the outcome. It keeps its context."""
        await self.on()
        return await self.said()


@dataclass
class Rig:
    """The GPU, and the supervisor's daemon on it where there is one."""

    gpu: Gpu
    driver: str
    folder: Path
    library: str = LIBRARY
    told: Told = field(default_factory=Told)
    daemon: Daemon | None = None
    library_folder: str = ""

    # Once a server did not start none will: the others say so without a minute's wait each.
    hopeless: ClassVar[dict[str, str]] = {}

    @contextlib.asynccontextmanager
    async def client(
        self,
        job: str,
        *numbers: float,
        caps: Mapping[str, str] | None = None,
        limits: Capped | None = None,
        program: Path | None = None,
    ) -> AsyncIterator[Client]:
        """A CUDA process, MPS client if there is a daemon; ended with the context.

        `caps` are those of MPS, `limits` those of the enforcement library. The job is one of `program`, or of
        `tests.gpu.client`.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        if self.library != LIBRARY:
            # Its own libraries are beside it.
            known = environment.get("LD_LIBRARY_PATH")
            folder = str(Path(self.library).parent)
            environment["LD_LIBRARY_PATH"] = f"{folder}:{known}" if known else folder
        command = [sys.executable, "-m", "tests.gpu.client", "--library", self.library]
        command += ["--program", str(program)] if program else []
        if self.daemon:
            if self.daemon.status.value.private_shm:
                command += ["--shm", str(self.daemon.folders.shm)]
            environment |= {PIPE_DIRECTORY: str(self.daemon.folders.pipe), **(caps or {})}
        else:
            environment |= {PIPE_DIRECTORY: NO_MPS, "CUDA_VISIBLE_DEVICES": self.gpu.uuid}
        environment |= limits.environment if limits else {}
        process = await anyio.open_process(
            [*command, job, *map(str, numbers)], env=environment, cwd=ROOT, stderr=None
        )
        try:
            yield Client(process)
        finally:
            with anyio.CancelScope(shield=True):
                assert process.stdin
                await process.stdin.aclose()  # it ends at the end of its input
                with anyio.move_on_after(20):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                await process.aclose()

    def library_path(self) -> str:
        """The driver's CUDA library by its whole path, as programs without an environment need it. Blocks."""
        return self.library if "/" in self.library else str(library_in_use())

    async def container(self, mebibytes: int, name: str = "container") -> Capped:
        """One with a cap on this GPU's memory. Raises OSError, BuildError."""
        return await anyio.to_thread.run_sync(capped, self.folder / name, self.gpu.uuid, mebibytes)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Daemon]:
        """The daemon under supervision, its server up; stopped with the context."""
        if why := self.hopeless.get(self.gpu.uuid) or processes.kernel_problem():
            raise AssertionError(f"{why}\n{REMEDY}")
        program = await anyio.to_thread.run_sync(self._program)
        folders = Directories.of(self.folder, self.gpu.uuid)
        daemon = Daemon(self.gpu.uuid, program, folders, ComputeModes(), self.told, OPTIONS)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(daemon.run)
                await self._served(daemon)
                self.daemon = daemon
                yield daemon
                group.cancel_scope.cancel()
        finally:
            self.daemon = None
            # Not before the supervisor has let go of its lock.
            with anyio.CancelScope(shield=True):
                await daemon.stop()
        assert not await anyio.to_thread.run_sync(processes.daemons, folders.pipe)
        assert not await anyio.to_thread.run_sync(processes.servers, folders.pipe)

    async def _served(self, daemon: Daemon) -> None:
        """Wait until it serves; the first failure is final, and comes with the logs."""
        with anyio.move_on_after(SERVING_SECONDS):
            status = await daemon.status.wait_for(
                lambda status: status.serving or status.restarts > 0 or NO_START in status.reason
            )
            if status.serving:
                return
        why = daemon.status.value.reason or "it does not serve in time"
        self.hopeless[self.gpu.uuid] = why
        raise AssertionError(f"{why}\n{logs(daemon)}\n{REMEDY}")

    def _program(self) -> Program:
        folder = self.folder / "programs"
        control = folder / "nvidia-cuda-mps-control"
        if not folder.is_dir():
            folder.mkdir()
            self.library_folder = str(library_in_use().parent)
            lay_out(folder, library_in_use())
        # Since driver 580 the control daemon loads the library, too.
        return Program(control, libraries=self.library_folder)


async def reached(daemon: Daemon, state: DaemonState, deadline: float = SERVING_SECONDS) -> None:
    """Wait for a state; what was seen and what the logs say where it does not come."""
    with anyio.move_on_after(deadline):
        await daemon.status.wait_for(lambda status: status.state is state)
        return
    raise AssertionError(
        f"not {state.value} within {deadline:g} s; last seen: {daemon.status.value}\n{logs(daemon)}"
    )


def logs(daemon: Daemon) -> str:
    """The ends of the daemon's logs."""
    found = []
    for name in ("control.log", "server.log"):
        path = daemon.folders.log / name
        text = path.read_text(errors="replace").splitlines()[-30:] if path.exists() else ["(none)"]
        found.append(f"--- {name}\n" + "\n".join(text))
    return "\n".join(found)


def describe() -> tuple[Gpu, str]:
    """The first GPU and the driver's version. Blocks."""
    nvml = binding()
    try:
        driver = nvml.open()
        return nvml.describe(0), driver.version
    finally:
        nvml.close()


def make() -> Rig:
    """A rig in a folder of its own with a short path; give it to `remove`. Blocks."""
    library = load()
    gpu, driver = describe()
    return Rig(gpu, driver, Path(tempfile.mkdtemp(prefix="gg-", dir="/tmp")), library)


def remove(rig: Rig) -> None:
    """Take its folder away. Blocks."""
    shutil.rmtree(rig.folder, ignore_errors=True)
