"""`python -m tests.gpu.sharing FILE`: how containers share one GPU, with shares of compute and without.

Writes the page FILE (docs/vgpu-on-hardware.md) and the figures beside it as JSON, and prints the page. What a
simulated GPU gives is never taken for hardware: its files get another name, and its page says what it is.
"""

import argparse
import datetime as dt
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tests.gpu import built, programs, sharing_page
from tests.gpu.limits import Capped
from tests.gpu.observer import Held, Observer
from tests.gpu.rig import Client, Rig, make, remove
from tests.gpu.sharing_page import ALONE, CALLS, MPS, Report, Row

WARM, SECONDS = 3.0, 10.0
"""Each measurement: prices are learned and factors found in the former, which do not count."""
CALL_ROUNDS = 200
CAP_MIB = 4096
MARGIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A load of sharing.c, in a container that is held to `share` percent.

    100: it has the enforcement library, and may use all of the GPU. None: it has not even that.
    """

    load: str
    share: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Tenants at once."""

    mode: str
    tenants: tuple[Tenant, ...]


CASES = (
    Case(ALONE, (Tenant("decode"),)),
    Case("time slices", (Tenant("decode"), Tenant("decode"))),
    Case("shares", (Tenant("decode", 50), Tenant("decode", 50))),
    Case("shares", (Tenant("decode", 10), Tenant("decode", 90))),
    Case(MPS, (Tenant("decode"), Tenant("decode"))),
    Case(ALONE, (Tenant("serve"),)),
    Case(ALONE, (Tenant("busy"),)),
    Case("time slices", (Tenant("serve"), Tenant("busy"))),
    Case("shares", (Tenant("serve", 70), Tenant("busy", 30))),
    Case(MPS, (Tenant("serve"), Tenant("busy"))),
    Case("no library", (Tenant(CALLS),)),
    Case("library, no share", (Tenant(CALLS, 100),)),
    Case("library, share of 99", (Tenant(CALLS, 99),)),
)


class Failed(Exception):
    """A load did not do what it was to."""


class Measurement:
    """All cases on one GPU."""

    def __init__(self, rig: Rig, program: Path) -> None:
        self._rig = rig
        self._program = program
        self._numbers: tuple[float, ...] = ()
        self._containers = 0
        self.simulated = True  # until a load has said otherwise

    async def calibrate(self) -> Mapping[str, float]:
        """How long each kernel runs now, in microseconds."""
        async with self._rig.client("calibrate", program=self._program) as client:
            self.simulated = (await self._ready(client))["simulated"]
            found = _checked(await client.result())
        self._numbers = tuple(found["numbers"])
        microseconds: dict[str, float] = found["microseconds"]
        return microseconds

    async def case(self, case: Case) -> list[Row]:
        """The figures of each tenant. Raises Failed."""
        held: list[Held] = []
        async with AsyncExitStack() as stack:
            clients = []
            for tenant in case.tenants:
                container = await self._container(tenant)
                client = await stack.enter_async_context(self._client(tenant, container))
                await self._ready(client)
                if container and tenant.share and tenant.share < 100:
                    held.append(Held(container, tenant.share, (client.pid,)))
                clients.append(client)
            async with anyio.create_task_group() as group:
                if held:
                    group.start_soon(Observer(programs.binding(), self._rig.gpu.uuid, held).run)
                for client in clients:
                    await client.on()
                results = [
                    _checked(await client.said(2 * (WARM + SECONDS) + MARGIN_SECONDS)) for client in clients
                ]
                group.cancel_scope.cancel()
        factors = {each.pids[0]: each.factor for each in held}
        return [
            Row.of(case.mode, tenant.load, tenant.share, result, factors.get(client.pid))
            for tenant, client, result in zip(case.tenants, clients, results, strict=True)
        ]

    async def _container(self, tenant: Tenant) -> Capped | None:
        if tenant.share is None:
            return None
        self._containers += 1
        made = await self._rig.container(CAP_MIB, f"container-{self._containers}")
        if tenant.share < 100:
            await anyio.to_thread.run_sync(made.hold, tenant.share)
        return made

    def _client(self, tenant: Tenant, container: Capped | None) -> AbstractAsyncContextManager[Client]:
        times = (0, CALL_ROUNDS) if tenant.load == CALLS else (WARM, SECONDS)
        numbers = (*times, *self._numbers)
        return self._rig.client(tenant.load, *numbers, limits=container, program=self._program)

    async def _ready(self, client: Client) -> dict[str, Any]:
        said = await client.said()
        if not said.get("ready"):
            raise Failed(f"a load has no context: {said}")
        return said


async def measured(rig: Rig, cases: Sequence[Case] = CASES) -> Report:
    """All cases; of one that fails, why. Raises Failed where no load runs at all."""
    program = await anyio.to_thread.run_sync(built.program, built.SHARING)
    measurement = Measurement(rig, program)
    kernels = await measurement.calibrate()
    rows: dict[Case, list[Row]] = {}
    missing: list[str] = []

    async def take(case: Case) -> None:
        try:
            rows[case] = await measurement.case(case)
            print(*rows[case], sep="\n", file=sys.stderr, flush=True)
        except* (Failed, ValueError, TimeoutError, OSError) as problem:
            missing.append(f"{case.mode}: {_cause(problem)}")

    for case in (each for each in cases if each.mode != MPS):
        await take(case)
    if served := [case for case in cases if case.mode == MPS]:
        try:
            await under_mps(rig, served, take)
        except* Exception as problem:  # noqa: BLE001  whatever keeps MPS from it, the rest stands
            print(problem.exceptions[0], file=sys.stderr)
            missing.append(f"{MPS}: {_cause(problem)}")
            for case in served:
                rows.pop(case, None)
    today = dt.datetime.now(dt.UTC).date()
    name = "a simulated GPU" if measurement.simulated else f"one {rig.gpu.product}, driver {rig.driver}"
    machine = f"{name}, {os.cpu_count()} cores, {today}"
    kept = tuple(tuple(rows[case]) for case in cases if case in rows)
    return Report(machine, measurement.simulated, SECONDS, kernels, kept, tuple(missing))


async def under_mps(rig: Rig, cases: Sequence[Case], take: Callable[[Case], Awaitable[None]]) -> None:
    """Take cases while one MPS server serves. Raises Failed where it is another one in the end, or none.

    Where it falls its clients fail on hardware, or run without it.
    """
    async with rig.serving() as daemon:
        before = daemon.status.value.server
        for case in cases:
            await take(case)
        now = daemon.status.value
        if not now.serving or now.server != before:
            raise Failed(f"the server did not stay: {now.reason or 'another one serves'}")


def _cause(problem: BaseException) -> str:
    """The first line of what was raised first."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return (str(problem) or type(problem).__name__).splitlines()[0]


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    if result.get("code") != 0:
        raise Failed(f"a load says {result}")
    return result


async def _main(file: Path) -> int:
    rig = await anyio.to_thread.run_sync(make)
    try:
        report = await measured(rig)
    finally:
        await anyio.to_thread.run_sync(remove, rig)
    written = await anyio.to_thread.run_sync(sharing_page.write, report, file)
    print(sharing_page.render(report))
    print(f"written to {written} and {written.with_suffix('.json')}")
    return 1 if report.missing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page and print it; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sharing")
    parser.add_argument("file", type=Path, help="the page to write, as docs/vgpu-on-hardware.md")
    return anyio.run(_main, parser.parse_args(arguments).file)


if __name__ == "__main__":
    sys.exit(main())
