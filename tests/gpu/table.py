"""`python -m tests.gpu.table FILE`: what 1, 3, 5 and 7 clients get of a GPU, time-sliced and under MPS.

Each client launches one kernel after the other and waits for each, as a service that answers requests does.
"""

import argparse
import datetime as dt
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent.model.cuda import limits
from tests.gpu.rig import Rig, make, remove

CLIENTS = (1, 3, 5, 7)
SECONDS = 3
MODES = ("time slices", "MPS", "MPS, capped")
KERNELS = {
    "work": "arithmetic on a quarter of the multiprocessors, 128 threads each",
    "stream": "read and write 512 MiB with the whole GPU: bound by memory",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; seconds."""

    kernel: str
    clients: int
    mode: str
    per_second: float  # runs of all clients together
    p50: float  # the median client's
    p99: float  # the worst client's


def row(kernel: str, mode: str, results: Sequence[dict[str, Any]]) -> Row:
    """The sum of the clients' figures. Raises ValueError where one failed."""
    for result in results:
        if result.get("code") != 0 or not result.get("runs"):
            raise ValueError(f"{kernel} with {len(results)} clients, {mode}: a client says {result}")
    medians = sorted(float(result["p50"]) for result in results)
    return Row(
        kernel,
        len(results),
        mode,
        sum(result["runs"] / result["seconds"] for result in results),
        medians[len(medians) // 2],
        max(float(result["p99"]) for result in results),
    )


def render(rows: Sequence[Row], machine: str) -> str:
    """The page."""
    parts = [
        "# MPS on hardware\n",
        f"For administrators; three minutes. Written by `make test-gpu TABLE=...` on {machine}.\n",
        f"Each client launches one kernel after the other and waits for it, for {SECONDS} s. Throughput",
        "is that of all clients together, p50 the median client's, p99 the worst client's; changes are",
        "against time slices with as many clients. *Capped*: each client has 100/n percent of the",
        "multiprocessors.",
    ]
    slices = {(each.kernel, each.clients): each for each in rows if each.mode == MODES[0]}
    for kernel, what in KERNELS.items():
        parts += [
            f"\n## {kernel}: {what}\n",
            "| clients | mode | runs/s | change | p50 ms | change | p99 ms |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for each in (one for one in rows if one.kernel == kernel):
            base = slices[kernel, each.clients]
            cells = (
                f"{each.clients}",
                each.mode,
                f"{each.per_second:.1f}",
                _change(each.per_second, base.per_second),
                f"{1000 * each.p50:.2f}",
                _change(each.p50, base.p50),
                f"{1000 * each.p99:.2f}",
            )
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.0f} %"


async def measured(rig: Rig) -> list[Row]:
    """All rows, in the order of the page."""
    async with rig.client("look") as client:
        await client.ready()
        multiprocessors = int((await client.result())["multiprocessors"])
    blocks = {"work": max(1, multiprocessors // 4), "stream": 2 * multiprocessors}
    found: dict[tuple[str, int, str], Row] = {}
    for mode in MODES:
        async with nullcontext() if mode == MODES[0] else rig.serving():
            for kernel in KERNELS:
                for count in CLIENTS:
                    caps = limits(100 // count, 0) if mode == MODES[2] else None
                    results = await _together(rig, count, kernel, blocks[kernel], caps)
                    found[kernel, count, mode] = row(kernel, mode, results)
                    print(found[kernel, count, mode], flush=True)
    return [found[kernel, count, mode] for kernel in KERNELS for count in CLIENTS for mode in MODES]


async def _together(rig: Rig, count: int, kernel: str, blocks: int, caps: Any) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(rig.client(kernel, SECONDS, blocks, caps=caps))
            for _ in range(count)
        ]
        for client in clients:
            await client.ready()
        for client in clients:
            await client.on()
        return [await client.said() for client in clients]


async def _main(file: Path) -> None:
    rig = await anyio.to_thread.run_sync(make)
    try:
        rows = await measured(rig)
    finally:
        await anyio.to_thread.run_sync(remove, rig)
    today = dt.datetime.now(dt.UTC).date()
    machine = f"one {rig.gpu.product}, driver {rig.driver}, {os.cpu_count()} cores, {today}"
    await anyio.Path(file).write_text(render(rows, machine), encoding="utf-8")
    print(f"written to {file}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.table")
    parser.add_argument("file", type=Path, help="the page to write, as docs/mps-on-hardware.md")
    anyio.run(_main, parser.parse_args(arguments).file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
