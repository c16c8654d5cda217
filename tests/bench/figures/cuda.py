"""The cost of the enforcement library for CUDA programs: calls with and without it, on the double."""

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import anyio
import anyio.to_thread

from agent.vgpu import layout
from clib import toolchain
from clib.build_library import cached
from tests.bench.conditions import BUILD, Conditions, short_folder
from tests.bench.registry import Figure, Taken, measurement
from tests.component.caps.container import Container, make
from tests.cuda_double.build import build
from tests.cuda_double.machine import CudaGpu, CudaMachine

SOURCE = Path(__file__).parents[1] / "cuda_calls.c"
ROUNDS = 5
ALLOCATIONS, LAUNCHES, STARTS = 6_400, 200_000, 300


class _Bench:
    """The program, the driver's double and one container with room for everything."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "cuda_calls"
        warnings = "-Wno-deprecated-non-prototype"
        toolchain.compile_c(["-O2", warnings, str(SOURCE), "-ldl", "-o", str(self.program)], folder)
        self.driver = build(BUILD)
        gpu = CudaGpu(total=1 << 40)
        self.machine = CudaMachine.create(folder / "cuda-state", [gpu])
        self.container: Container = make(folder / "container", cached(), (1 << 19,), gpus=[gpu])

    def started(self, mode: str, count: int, *, capped: bool) -> "subprocess.Popen[str]":
        """The program, running."""
        extra = self.container.environment if capped else {}
        return subprocess.Popen(
            [str(self.program), str(self.driver), mode, str(count)],
            env={**self.machine.environment, **extra},
            stdout=subprocess.PIPE,
            text=True,
        )

    def nanoseconds(self, mode: str, count: int, *, capped: bool) -> float:
        """Of one call."""
        with self.started(mode, count, capped=capped) as process:
            told, _ = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"{self.program} {mode} ended with {process.returncode}")
        return float(told)

    def hold(self) -> None:
        """Hold the container to a share that its launches never have to wait for."""
        descriptor = os.open(self.container.limits, os.O_RDWR)
        try:
            now = layout.read_limits(os.pread(descriptor, layout.LIMITS_BYTES, 0))[0]
            layout.write_limits(descriptor, 0, replace(now, compute=True, share=9900, correction=1000))
        finally:
            os.close(descriptor)

    def difference(self, mode: str, count: int) -> float:
        """The library's part of a call, in nanoseconds; both sides in turn, the median."""
        return median(
            self.nanoseconds(mode, count, capped=True) - self.nanoseconds(mode, count, capped=False)
            for _ in range(ROUNDS)
        )

    def start_all(self) -> float:
        """Seconds until that many programs, begun at once, have run to their end with context and memory."""
        began = time.monotonic()
        processes = [self.started("start", 0, capped=True) for _ in range(STARTS)]
        codes = []
        for process in processes:
            with process:
                codes.append(process.wait(timeout=120))
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {STARTS} programs failed")
        return time.monotonic() - began


@measurement(
    Figure("cuda_alloc_overhead_us", "us", 1, "added to cuMemAlloc of 2 MiB by the enforcement library"),
    Figure("cuda_launch_overhead_uncapped_ns", "ns", 20, "added to cuLaunchKernel"),
    Figure("cuda_launch_overhead_capped_ns", "ns", 100, "the same in a container held to a share of compute"),
    Figure("cuda_start_300_processes_s", "s", 2, "300 CUDA programs at once, from exec to their end"),
)
async def cuda_calls(_conditions: Conditions) -> Mapping[str, Taken]:
    """One container, one GPU, on the CUDA double."""
    folder = await anyio.to_thread.run_sync(short_folder)
    bench = await anyio.to_thread.run_sync(_Bench, folder)
    alloc = await anyio.to_thread.run_sync(bench.difference, "alloc", ALLOCATIONS)
    launch = await anyio.to_thread.run_sync(bench.difference, "launch", LAUNCHES)
    start = await anyio.to_thread.run_sync(bench.start_all)
    await anyio.to_thread.run_sync(bench.hold)
    capped = await anyio.to_thread.run_sync(bench.difference, "launch", LAUNCHES)
    return {
        "cuda_launch_overhead_capped_ns": Taken(capped, ROUNDS * LAUNCHES),
        "cuda_alloc_overhead_us": Taken(alloc / 1000, ROUNDS * ALLOCATIONS),
        "cuda_launch_overhead_uncapped_ns": Taken(launch, ROUNDS * LAUNCHES),
        "cuda_start_300_processes_s": Taken(start, STARTS),
    }
