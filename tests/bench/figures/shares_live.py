"""How soon shares change: latencies in real time, the GPU itself simulated at the speed of the wall clock."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agent.kit.tasks import Cell
from agent.model.holding import PairMember, Record
from agent.pairing.pairing import Recorder
from agent.vgpu.compute import Compute, ComputeRequest
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import About, LimitFolders
from agent.vgpu.limits import ContainerLimits, Enforcement
from agent.vgpu.resize import FreeUnits, Resizer
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch
from clib.build_library import NAME, cached
from tests.bench.conditions import BUILD, Conditions
from tests.bench.registry import Figure, Taken, measurement
from tests.component.shares.row import program
from tests.cuda_double.build import build
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.machine import CudaGpu, CudaMachine

ROUNDS = 5
PAUSES = 9
REQUESTS = {"promised": ComputeRequest(), "low": ComputeRequest(low=True)}


class _Node:
    """A GPU on the wall's clock, an agent's room of shares, and containers with the library as it ships."""

    def __init__(self, folder: Path) -> None:
        self.machine = CudaMachine.create(folder / "state", clock=ClockMode.WALL)
        self.driver, self.load, self.library = build(BUILD), program(folder), cached()
        folders = LimitFolders(folder)
        folders.prepare()
        record: Cell[Record | None] = Cell(None)
        self.isolation = Isolation(folders, self.library, folder, Enforcement.LIBRARY, record, compute=True)
        self.compute = Compute(self.isolation, lambda about: REQUESTS[about.pod], soft=False)
        self.keys: dict[str, str] = {}

    def add(self, pod: str, cores: int) -> None:
        """A container."""
        gpu, number = CudaGpu().uuid, len(self.keys)
        ids = tuple(f"{gpu}::m{unit}" for unit in range(number * 8, number * 8 + 8))
        about = About(pod, "bench", pod, "main", gpu, ids, 2 << 30, cores, "library", build="b", compute=True)
        key = self.keys[pod] = self.isolation.folders.create(about)
        shutil.copy(self.library, self.isolation.folders.path(key, NAME))
        known = self.isolation.containers.value
        self.isolation.containers.publish({**known, key: ContainerLimits(about)})

    @contextmanager
    def running(self, pod: str, seconds: float) -> Iterator["subprocess.Popen[bytes]"]:
        """A program that launches and waits for each launch."""
        preload = self.isolation.folders.path(self.keys[pod], NAME)
        process = subprocess.Popen(
            [str(self.load), str(self.driver), "sync", "7", str(seconds)],
            env={**self.machine.environment, "LD_PRELOAD": str(preload)},
            stdout=subprocess.DEVNULL,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def busy(self, process: "subprocess.Popen[bytes]") -> int:
        """For how long it has had the GPU, in nanoseconds."""
        return self.machine.busy_ns(process.pid)


async def _reached(condition: Callable[[], bool], seconds: float = 20) -> float:
    """When it came true."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)
    return time.monotonic()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


async def _in_node(measure: Callable[[_Node], Awaitable[list[float]]]) -> list[float]:
    with _folder() as folder:
        node = await anyio.to_thread.run_sync(_Node, folder)
        async with anyio.create_task_group() as group:
            group.start_soon(node.compute.run)
            taken = await measure(node)
            group.cancel_scope.cancel()
    return taken


async def _pauses(node: _Node) -> list[float]:
    """From the first work of who was promised all of the GPU to the last of who runs on what is left."""
    await anyio.to_thread.run_sync(node.add, "promised", 100)
    await anyio.to_thread.run_sync(node.add, "low", 0)
    taken = []
    with node.running("low", 3600) as low:
        for _ in range(ROUNDS):
            start = node.busy(low)
            await _reached(partial(lambda since: node.busy(low) > since + 100_000_000, start))
            with node.running("promised", 1.0) as promised:
                began = await _reached(partial(lambda who: node.busy(who) > 0, promised))
                last, seen = began, node.busy(low)
                while time.monotonic() < began + 0.5:
                    if (now := node.busy(low)) != seen:
                        last, seen = time.monotonic(), now
                    await anyio.sleep(0.001)
                taken.append((last - began) * 1000)
    return taken


async def _resizes(node: _Node) -> list[float]:
    """From the annotation, as the pod watch has it, to the first tenth of a second at about the new share."""
    await anyio.to_thread.run_sync(node.add, "promised", 80)
    pods: Cell[object] = Cell(None)
    wanted = {"promised": '{"main": {"cores": 20}}'}
    resizer = _resizer(node.isolation)
    taken = []
    with node.running("promised", 3600) as process:
        async with anyio.create_task_group() as group:
            group.start_soon(resizer.run, pods, lambda: wanted)
            for number in range(ROUNDS):
                target = (80, 20)[number % 2]
                await anyio.sleep(1.5)
                wanted["promised"] = f'{{"main": {{"cores": {target}}}}}'
                began = time.monotonic()
                pods.publish(number)
                reached = False
                while not reached:
                    before, at = node.busy(process), time.monotonic()
                    await anyio.sleep(0.1)
                    percent = (node.busy(process) - before) / (time.monotonic() - at) / 1e7
                    reached = abs(percent - target) < 15
                    if time.monotonic() > began + 20:
                        raise TimeoutError(f"{percent:.0f} % of the GPU 20 s after a resize to {target} %")
                taken.append((time.monotonic() - began) * 1000)
            group.cancel_scope.cancel()
    return taken


async def _resumes(node: _Node) -> list[float]:
    """From the change of the share of a paused container until the GPU works for it."""
    await anyio.to_thread.run_sync(node.add, "low", 50)
    folders, key = node.isolation.folders, node.keys["low"]
    taken = []
    with node.running("low", 3600) as process:
        for number in range(PAUSES):
            since = node.busy(process)
            await _reached(partial(lambda seen: node.busy(process) > seen + 10_000_000, since))
            await anyio.to_thread.run_sync(partial(folders.change, key, share=0))
            # Not in step with the tenth of a second after which the library looks again by itself.
            await anyio.sleep(0.15 + 0.013 * number)
            since, began = node.busy(process), time.monotonic()
            await anyio.to_thread.run_sync(partial(folders.change, key, share=5000))
            resumed = await _reached(partial(lambda seen: node.busy(process) > seen, since))
            taken.append((resumed - began) * 1000)
    return taken


def _resizer(isolation: Isolation) -> Resizer:
    events = LimitEvents(isolation, Recorder())
    return Resizer(isolation, _NoUnits(), events, LimitWatch(isolation, events, Path("/proc")))


class _NoUnits(FreeUnits):
    def __init__(self) -> None:
        """Of no GPU."""

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        """Cores take no units."""
        raise AssertionError(f"{count} units of {gpu}")

    def give_back(self) -> None:
        """Nothing was taken."""


@measurement(
    Figure(
        "opportunistic_pause_ms", "ms", 50, "who was promised all of the simulated GPU comes back; longest"
    ),
)
async def pause(_conditions: Conditions) -> Mapping[str, Taken]:
    """Beside a container of low priority that has the GPU."""
    taken = await _in_node(_pauses)
    return {"opportunistic_pause_ms": Taken(max(taken), len(taken))}


@measurement(
    Figure(
        "resize_cores_effective_ms", "ms", 1000, "an annotation until the simulated GPU shows it; longest"
    ),
)
async def resize_cores(_conditions: Conditions) -> Mapping[str, Taken]:
    """Down to 20 and up to 80 percent."""
    taken = await _in_node(_resizes)
    return {"resize_cores_effective_ms": Taken(max(taken), len(taken))}


@measurement(
    Figure(
        "opportunistic_resume_ms", "ms", 50, "a paused share is raised until the simulated GPU works; longest"
    ),
)
async def resume(_conditions: Conditions) -> Mapping[str, Taken]:
    """Of a container that waits in the library, which the agent wakes."""
    with _folder() as folder:
        taken = await _resumes(await anyio.to_thread.run_sync(_Node, folder))
    return {"opportunistic_resume_ms": Taken(max(taken), len(taken))}
