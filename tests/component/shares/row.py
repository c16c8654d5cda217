"""Containers under load on the simulated GPU, in its own time, through the real library.

`python -m tests.component.shares.row FOLDER ROW` runs one row (JSON) and prints what each container got. It
is a process of its own, since it takes part in the GPU's time itself.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, Final

from agent.vgpu import layout
from agent.vgpu.correction import Second, learned
from clib import toolchain
from clib.build_library import cached
from tests.component.caps.container import make
from tests.cuda_double.build import build
from tests.cuda_double.layout_time import WINDOW_NS, ClockMode
from tests.cuda_double.machine import CudaMachine

ROOT: Final = Path(__file__).parents[3]
CLOCK: Final = ROOT / "tests" / "cuda_double" / "clock" / "device_clock.c"
SECOND: Final = 1_000_000_000
WARM: Final = 3
"""Seconds in which functions are learned, and that no figure counts."""
LOAD_FAILED: Final = 3


@dataclass(frozen=True, slots=True)
class Load:
    """A container; `cap` in percent, 100 for none."""

    cap: int
    load: str
    processes: int = 1
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Containers side by side for so many seconds of the GPU's time."""

    loads: tuple[Load, ...]
    seconds: int
    window: int = 1

    @classmethod
    def read(cls, text: str) -> "Row":
        """From JSON."""
        raw = json.loads(text)
        return cls(tuple(Load(**load) for load in raw["loads"]), raw["seconds"], raw["window"])


@dataclass(frozen=True, slots=True)
class Result:
    """By container: percent of the GPU in each window after the warm-up, and launches in all the time."""

    shares: list[list[float]]
    launches: list[int]


def shares(row: Row, folder: Path) -> list[list[float]]:
    """Percent of the GPU that each container had in each window after the warm-up."""
    return result(row, folder).shares


def result(row: Row, folder: Path) -> Result:
    """Run a row."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(folder), json.dumps(asdict(row))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    sys.stderr.write(done.stderr.decode())
    done.check_returncode()
    return Result(**json.loads(done.stdout))


def program(folder: Path) -> Path:
    """The load, compiled."""
    path = folder / "gpu_load"
    if not path.exists():
        source = str(Path(__file__).with_name("gpu_load.c"))
        toolchain.compile_c(
            ["-O2", "-Wno-deprecated-non-prototype", source, "-ldl", "-lm", "-o", str(path)], folder
        )
    return path


class _Conductor:
    """Takes part in the GPU's time, and is the agent: each second it corrects."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self.factors = [1.0] * len(row.loads)
        self.usages = [layout.CountedUsage(0, 0, 0, 0)] * len(row.loads)
        self.written: dict[int, dict[str, Any]] = {}
        self.corrects = False
        self.driver = build(ROOT / "build")
        tasks = 1 + sum(load.processes for load in row.loads)
        self.machine = CudaMachine.create(folder / "state", clock=ClockMode.VIRTUAL, tasks=tasks)
        os.environ.update(self.machine.environment)
        self.double = ctypes.CDLL(str(self.driver))
        self.double.gna_sim_now.restype = ctypes.c_uint64
        library, program_ = cached(clock=CLOCK), program(folder)
        self.containers = [
            make(folder / f"container-{number}", library, (8192,), context=0)
            for number, _ in enumerate(row.loads)
        ]
        self.processes: list[list[subprocess.Popen[bytes]]] = []
        with ExitStack() as stack:
            for number, load in enumerate(row.loads):
                self._limit(number, 1.0)
                started = []
                for index in range(load.processes):
                    command = [
                        program_,
                        self.driver,
                        load.load,
                        number * 10 + index + 1,
                        row.seconds,
                        load.streams,
                    ]
                    process = stack.enter_context(
                        subprocess.Popen(
                            list(map(str, command)),
                            env={**self.machine.environment, **self.containers[number].environment},
                            stdout=subprocess.DEVNULL,
                        )
                    )
                    stack.callback(process.kill)
                    started.append(process)
                self.processes.append(started)
            over = threading.Event()
            threading.Thread(target=self._watch, args=(over,), daemon=True).start()
            stack.callback(over.set)  # before they are killed
            found = self._run()
            launches = [sum(self.machine.launches(each.pid) for each in own) for own in self.processes]
            self.result = Result(found, launches)

    def _limit(self, number: int, factor: float, others: float | None = None) -> None:
        container, cap = self.containers[number], self.row.loads[number].cap
        wanted: dict[str, Any] = {"share": cap * 100, "correction": factor, "rivals": others}
        if cap >= 100 or wanted == self.written.get(number):
            return
        descriptor = os.open(container.limits, os.O_RDWR)
        try:
            now = layout.read_limits(os.pread(descriptor, layout.LIMITS_BYTES, 0))[0]
            layout.write_limits(descriptor, 0, replace(now, compute=True, **wanted))
        finally:
            os.close(descriptor)
        self.written[number] = wanted

    def _wait(self, until: int) -> None:
        self.double.gna_sim_wait(None, ctypes.c_uint32(0), ctypes.c_uint64(until))

    def _busy(self) -> list[int]:
        return [sum(self.machine.busy_ns(each.pid) for each in own) for own in self.processes]

    def _watch(self, over: threading.Event) -> None:
        """A load that fails would count as a share of 0, or be waited for without end."""
        while not over.wait(0.05):
            for load, own in zip(self.row.loads, self.processes, strict=False):
                failed = [each.returncode for each in own if each.poll() not in (None, 0)]
                if failed:
                    print(f"{load} failed with {failed}", file=sys.stderr, flush=True)
                    for each in chain.from_iterable(self.processes):
                        each.kill()
                    os._exit(LOAD_FAILED)

    def _correct(self, totals: Sequence[float], busy: AbstractSet[int]) -> None:
        """The agent's part, once a second; `busy` are the processes that NVML names for it."""
        seconds = []
        for number, load in enumerate(self.row.loads):
            head = self.containers[number].usage.read_bytes()[: layout.usage_head_bytes(1)]
            now, before = layout.read_usage(head)[0], self.usages[number]
            self.usages[number] = now
            seen = sum(each.pid in busy for each in self.processes[number])
            seconds.append(
                Second(
                    self.factors[number],
                    load.cap,
                    working=seen > 0 or (now.next_ns, now.waited_ns) != (before.next_ns, before.waited_ns),
                    throttled=now.waited_ns > before.waited_ns,
                    steady=self.corrects,
                    processes=max(1, seen),
                    listed=any(each.poll() is None for each in self.processes[number]),
                )
            )
        found = learned(seconds, mean(totals) if totals else 0.0, others=False)
        self.factors = list(found.factors)
        for number, others in enumerate(found.rivals):
            self._limit(number, found.factors[number], others)
        self.corrects = True  # the first second is that in which functions are learned

    def _run(self) -> list[list[float]]:
        self._wait(0)
        totals: list[float] = []
        found: list[list[float]] = [[] for _ in self.row.loads]
        mark = self._busy()
        sampled, second = 0, 0
        working: set[int] = set()
        while second < self.row.seconds:
            sampled += 1
            self._wait(min(sampled * WINDOW_NS + 20_000_000, (second + 1) * SECOND))
            now = int(self.double.gna_sim_now())
            if now < (second + 1) * SECOND:
                percents = self.machine.utilization()
                totals.append(sum(percents.values()))
                working.update(pid for pid, percent in percents.items() if percent)
                continue
            sampled -= 1
            second += 1
            self._correct(totals, working)
            totals.clear()
            working.clear()
            if second >= WARM and (second - WARM) % self.row.window == 0:
                busy = self._busy()
                if second > WARM:
                    for number, before in enumerate(mark):
                        found[number].append((busy[number] - before) * 100 / SECOND / self.row.window)
                mark = busy
        if os.environ.get("GNA_TRACE"):
            print(self.factors, file=sys.stderr)
        return found


def main() -> int:
    """Run one row."""
    print(json.dumps(asdict(_Conductor(Row.read(sys.argv[2]), Path(sys.argv[1])).result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
