"""Faults of single GPUs, as NVML shows them: what becomes of that GPU, and that the others stay."""

from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from agent.model.health import HealthState, RecoveryAction
from agent.nvml.port import NvmlCode
from tests.component.health.bench import FACE, watching

pytestmark = pytest.mark.usefixtures("face")

HEALTHY, SUSPECT, UNHEALTHY, PROBATION = HealthState

Logs = list[MutableMapping[str, Any]]


async def test_a_gpu_that_is_lost_in_silence_is_found_and_returns() -> None:
    async with watching() as watched:
        watched.machine.lose(3)
        state = await watched.until(3, UNHEALTHY, deadline=5)
        assert "lost" in state.cause
        await watched.listed(3, healthy=False)
        watched.machine.restore(3)
        await watched.until(3, PROBATION)
        assert not watched.state(3).healthy
        await watched.until(3, HEALTHY)
        watched.steady(0, 1, 2, 4, 5, 6, 7)
        assert watched.gpu_monitor.events.watched == frozenset(watched.machine.uuids)


async def test_a_gpu_that_fell_off_the_bus_and_came_back_passes_probation() -> None:
    async with watching() as watched:
        watched.machine.fall_off_bus(5)
        state = await watched.until(5, UNHEALTHY)
        assert state.cause == "Xid 79, GPU has fallen off the bus"
        await watched.settled(lambda now: now.by_uuid[state.uuid].health.away)
        watched.machine.restore(5)
        await watched.until(5, PROBATION)
        await watched.until(5, HEALTHY)
        watched.machine.xid(5, 48)  # the new event set hears it
        await watched.until(5, UNHEALTHY, deadline=2)
        watched.steady(0, 1, 2, 3, 4, 6, 7)


async def test_uncorrectable_memory_errors_by_event_and_by_counter_alone() -> None:
    async with watching() as watched:
        watched.machine.ecc_double(2)
        watched.machine.ecc_double(6, event=False)
        await watched.until(2, UNHEALTHY, deadline=1)
        state = await watched.until(6, UNHEALTHY)
        assert state.cause == "uncorrectable memory errors"
        await watched.until(2, HEALTHY)
        await watched.until(6, HEALTHY)
        watched.steady(0, 1, 3, 4, 5, 7)


async def test_a_row_remap_that_waits_for_a_reset_forbids_recovery() -> None:
    async with watching() as watched:
        watched.machine.recovery_action(1, None)  # a driver before R565
        watched.machine.remap_pending(1)
        watched.machine.ecc_double(1)
        await watched.until(1, UNHEALTHY)
        await watched.settled(lambda _: "row remap" in (watched.state(1).health.obstacle or ""))
        await anyio.sleep(1.2)
        state = watched.state(1)
        assert state.health.state is UNHEALTHY
        assert "row remap" in state.health.obstacle
        watched.machine.restore(1)
        await watched.until(1, HEALTHY)


async def test_a_gpu_first_seen_with_a_failed_remap_is_never_sold() -> None:
    machine = await FACE.machine("l40s-2")
    machine.remap_pending(1, failed=True)
    async with watching(machine) as watched:
        state = await watched.until(1, UNHEALTHY)
        assert "row remap failed" in state.cause
        await watched.listed(1, healthy=False)
        assert {entry.get(state.uuid) for entry in watched.lists if entry} == {False}
        watched.steady(0)


async def test_the_drivers_own_verdict_is_read_at_each_xid_and_followed() -> None:
    # Only an Xid, be it a harmless one, can have it read this soon.
    async with watching("t4-4", keys={"health.probeSeconds": 4}) as watched:
        watched.machine.recovery_action(0, RecoveryAction.DRAIN_AND_RESET)
        watched.machine.xid(0, 31)
        state = await watched.until(0, UNHEALTHY, deadline=2)
        assert state.cause == "the driver asks for a reset of the GPU once its work has ended"
        await watched.listed(0, healthy=False)
        watched.machine.restore(0)
        watched.machine.xid(1, 31)
        await watched.until(0, PROBATION, deadline=2)
        watched.steady(1, 2, 3)


@pytest.mark.parametrize(
    ("xid", "states"),
    [
        pytest.param(31, (), id="application"),
        pytest.param(63, (), id="informational"),
        pytest.param(94, (SUSPECT, HEALTHY), id="contained"),
        pytest.param(48, (UNHEALTHY, PROBATION, HEALTHY), id="needs_reset"),
        pytest.param(79, (UNHEALTHY,), id="needs_reboot"),
        pytest.param(119, (UNHEALTHY,), id="needs_reset_unwitnessed"),
        pytest.param(999, (UNHEALTHY, PROBATION, HEALTHY), id="unknown"),
    ],
)
async def test_each_class_of_xid(xid: int, states: tuple[HealthState, ...]) -> None:
    async with watching("t4-4") as watched:
        seen: list[HealthState] = []
        watched.inventory.counters.listeners.append(lambda change: seen.append(change.after))
        watched.machine.xid(0, xid)
        with anyio.fail_after(10):
            while len(seen) < len(states) or not watched.inventory.counters.xids:
                await anyio.sleep(0.01)
        await anyio.sleep(0.8)  # more than the quiet time and a probe
        assert watched.inventory.counters.xids == {(watched.machine.uuid(0), xid): 1}
        assert tuple(seen) == states
        watched.steady(1, 2, 3)


async def test_a_call_that_never_returns_stops_neither_health_nor_the_others() -> None:
    async with watching() as watched:
        hang = watched.machine.hang("nvmlDeviceGetMemoryInfo", 4)
        await watched.until(4, SUSPECT, deadline=5)
        watched.machine.xid(0, 48)
        await watched.until(0, UNHEALTHY, deadline=1)
        await watched.until(4, UNHEALTHY, deadline=5)
        watched.machine.lose(7)
        await watched.until(7, UNHEALTHY, deadline=5)
        watched.steady(1, 2, 3, 5, 6)
        hang.release()
        await watched.until(4, HEALTHY)


async def test_an_event_wait_that_fails_for_ever_is_told_once_and_probing_goes_on(logs: Logs) -> None:
    async with watching() as watched:
        watched.machine.fail("nvmlEventSetWait", NvmlCode.UNKNOWN)
        with anyio.fail_after(10):  # the wait that is under way does not fail yet
            while not watched.gpu_monitor.events.failures:
                await anyio.sleep(0.05)
        await anyio.sleep(1.5)
        before = watched.gpu_monitor.events.failures
        assert 1 <= before <= 8
        assert sum(entry["event"] == "event_wait_failing" for entry in logs) == 1
        lists = len(watched.lists)
        watched.machine.lose(3)
        await watched.until(3, UNHEALTHY, deadline=5)
        await watched.listed(3, healthy=False)
        assert len(watched.lists) == lists + 1
        watched.steady(0, 1, 2, 4, 5, 6, 7)
        watched.machine.clear_faults()
        with anyio.fail_after(15):
            while len(watched.gpu_monitor.events.watched) < 7:
                await anyio.sleep(0.05)
        watched.machine.xid(0, 48)
        await watched.until(0, UNHEALTHY, deadline=2)


async def test_a_gpu_without_events_is_watched_by_probing_alone(logs: Logs) -> None:
    async with watching("t4-4") as watched:
        assert len(watched.gpu_monitor.events.watched) == 4
    machine = watched.machine
    machine.gpu(2).supported_events = 0
    async with watching(machine, without_events=1) as watched:
        with anyio.fail_after(15):  # a GPU that is lost before it is asked is no GPU without events
            while not any(entry["event"] == "gpu_events_unsupported" for entry in logs):
                await anyio.sleep(0.02)
        assert machine.uuid(2) not in watched.gpu_monitor.events.watched
        machine.lose(2)
        await watched.until(2, UNHEALTHY, deadline=5)
    assert sum(entry["event"] == "gpu_events_unsupported" for entry in logs) == 1


async def test_gpus_come_and_swap_their_numbers_without_a_restart() -> None:
    machine = await FACE.machine("dgx-h200", hidden=[6])
    async with watching(machine) as watched:
        assert len(watched.snapshot.gpus) == 7
        machine.add(6)
        await watched.settled(lambda now: len(now.gpus) == 8 and len(now.topology.gpus) == 8)
        machine.renumber([7, 6, 5, 4, 3, 2, 1, 0], {0: 7, 7: 0})
        await watched.settled(lambda now: now.by_uuid[machine.uuid(0)].gpu.index == 7)
        assert watched.state(7).gpu.minor == 0
        assert all(state.healthy for state in watched.snapshot.gpus)
        watched.steady(0, 1, 2, 3, 4, 5, 7)
        machine.hide(2)
        await watched.until(2, UNHEALTHY)
        await watched.listed(2, healthy=False)
