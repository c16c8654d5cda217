"""The cost of vGPU limits for an admission, and the delay of a resize."""

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio.to_thread

from agent.kit.tasks import Cell
from agent.model.holding import PairMember, Record
from agent.model.pod import VGPU
from agent.pairing.pairing import Recorder
from agent.vgpu import layout
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import LIMITS, About, LimitFolders, key_of
from agent.vgpu.library import ELF
from agent.vgpu.limits import Enforcement
from agent.vgpu.resize import FreeUnits, Resizer
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile

PODS, RESIZES = 200, 50
GPU = "GPU-11111111-2222-3333-4444-555555555555"


@measurement(
    Figure("isolation_files_per_pod_ms", "ms", 1, "all files of a container's limits made; median"),
)
async def files(conditions: Conditions) -> Mapping[str, Taken]:
    """Made one after the other, as the kubelet admits pods."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:  # /run is a tmpfs, too
        isolation = await _started(Path(name))
        taken = []
        for number in range(PODS):
            began = time.perf_counter()
            await isolation.admit(_request(number))
            taken.append((time.perf_counter() - began) * 1000)
    return {"isolation_files_per_pod_ms": Taken(percentile(taken, 0.5), len(taken))}


@measurement(
    Figure(
        "resize_memory_effective_ms",
        "ms",
        1000,
        "the pod watch shows a resize until the limit file has it; 99th percentile",
    ),
)
async def resize(conditions: Conditions) -> Mapping[str, Taken]:
    """Up and down, beside the containers of a full node."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        isolation = await _started(Path(name))
        for number in range(PODS):
            await isolation.admit(_request(number))
        pods: Cell[object] = Cell(None)
        wanted: dict[str, str] = {}
        events = LimitEvents(isolation, Recorder())
        resizer = Resizer(isolation, _Free(), events, LimitWatch(isolation, events, Path("/proc")))
        taken = []
        file = isolation.folders.path(key_of(_request(0).ids), LIMITS)
        async with anyio.create_task_group() as group:
            group.start_soon(resizer.run, pods, lambda: wanted)
            for count in range(RESIZES):
                units = 2 + count % 2
                began = time.perf_counter()
                wanted["uid-0"] = f'{{"main": {units}}}'
                pods.publish(None)
                while await anyio.to_thread.run_sync(_cap, file) != units * VGPU.block_bytes:
                    await anyio.sleep(0.001)
                taken.append((time.perf_counter() - began) * 1000)
            group.cancel_scope.cancel()
    return {"resize_memory_effective_ms": Taken(percentile(taken, 0.99), len(taken))}


class _Free(FreeUnits):
    """A GPU with a free unit."""

    def __init__(self) -> None:
        """Of no node."""

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        await keep(tuple(f"{gpu}::m{100_000 + number}" for number in range(count)))

    def give_back(self) -> None:
        """Nobody else wants it."""


async def _started(root: Path) -> Isolation:
    def library() -> Path:
        (root / "image.so").write_bytes(ELF + os.urandom(160 << 10))  # as large as the library is
        return root / "image.so"

    source = await anyio.to_thread.run_sync(library)
    record: Cell[Record | None] = Cell(None)
    isolation = Isolation(LimitFolders(root / "run"), source, root / "state", Enforcement.LIBRARY, record)
    await isolation.start()
    return isolation


def _request(number: int) -> About:
    ids = (f"{GPU}::m{2 * number}", f"{GPU}::m{2 * number + 1}")
    return About(f"uid-{number}", "bench", f"pod-{number}", "main", GPU, ids, 2 * VGPU.block_bytes, 10)


def _cap(file: Path) -> int:
    return layout.read_limits(file.read_bytes())[0].memory_bytes
