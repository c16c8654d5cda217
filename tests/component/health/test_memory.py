"""A restart heals nothing: verdicts and kernel log lines over the agent's life, and over a reboot."""

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.inventory import verdicts
from agent.model.health import HealthState
from agent.simulator.machine import SimulatedMachine
from tests.component.health.bench import watching

HEALTHY, SUSPECT, UNHEALTHY, PROBATION = HealthState

Logs = list[MutableMapping[str, Any]]


@pytest.fixture
def reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives the machine a boot id of the test's own; a call gives it another one."""
    file = tmp_path / "boot_id"
    file.write_text("first\n")
    monkeypatch.setattr(verdicts.VerdictFile.__init__, "__defaults__", (file,))

    def change() -> None:
        file.write_text("second\n")

    return change


async def written(folder: Path, text: str) -> None:
    """Wait until the verdict file holds `text`."""
    with anyio.fail_after(30):
        while not (file := folder / verdicts.NAME).exists() or text not in file.read_text():
            await anyio.sleep(0.01)


async def test_an_unhealthy_gpu_is_so_on_the_first_list_after_a_restart(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    async with watching(machine, state=tmp_path) as watched:
        machine.xid(3, 119)
        await watched.until(3, UNHEALTHY)
        await written(tmp_path, machine.uuid(3))
    async with watching(machine, state=tmp_path) as watched:
        await anyio.sleep(1)
        full = [entry for entry in watched.lists if entry]
        assert all(entry[machine.uuid(3)] is False for entry in full)
        assert watched.state(3).cause == "Xid 119, GSP RPC timeout"
        watched.steady(0, 1, 2, 4, 5, 6, 7)


async def test_a_gpu_that_does_not_answer_stays_listed_over_a_restart(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    async with watching(machine, state=tmp_path) as watched:
        machine.fall_off_bus(6)
        await watched.until(6, UNHEALTHY)
        await written(tmp_path, machine.uuid(6))
    async with watching(machine, state=tmp_path, without_events=1) as watched:
        await watched.until(6, UNHEALTHY)
        await watched.listed(6, healthy=False)
        machine.restore(6)
        await watched.until(6, HEALTHY)
        watched.steady(0, 1, 2, 3, 4, 5, 7)


async def test_a_reboot_leads_through_checks_and_quiet_time(
    tmp_path: Path, reboot: Callable[[], None]
) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    async with watching(machine, state=tmp_path) as watched:
        machine.xid(3, 119)
        machine.fall_off_bus(6)
        await watched.until(3, UNHEALTHY)
        await watched.until(6, UNHEALTHY)
        await written(tmp_path, machine.uuid(3))
        await written(tmp_path, machine.uuid(6))
    reboot()
    machine.hide(6)  # taken out while the power was off
    async with watching(machine, state=tmp_path, keys={"health.quiet.needsReset": 1.0}) as watched:
        assert machine.uuid(6) not in watched.snapshot.by_uuid
        first = next(entry for entry in watched.lists if entry)
        assert first[machine.uuid(3)] is False
        await watched.until(3, HEALTHY)


def kernel_line(sequence: int, bus: str, xid: int, facility: int = 0) -> str:
    return f"{facility * 8 + 3},{sequence},1000000,-;NVRM: Xid (PCI:{bus}): {xid}, pid=77, name=python3\n"


async def test_xids_that_fell_while_the_agent_was_away_are_found(
    tmp_path: Path, reboot: Callable[[], None]
) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    log = tmp_path / "kmsg"
    log.write_text(kernel_line(10, "0000:1b:00", 119) + "6,11,1,-;eth0: link up\n SUBSYSTEM=net\n")
    keys = {"health.kernelLog": str(log)}
    async with watching(machine, state=tmp_path, keys=keys) as watched:
        # Nobody knows what was done about this one since: checks and quiet time decide.
        await watched.until(0, HEALTHY)
        await written(tmp_path, '"log_sequence": 10')
    with log.open("a") as file:
        file.write(kernel_line(12, "0000:43:00", 119))
        file.write(kernel_line(13, "0000:52:00", 31))
        file.write(kernel_line(14, "0000:61:00", 119, facility=1))  # a program wrote it
    async with watching(machine, state=tmp_path, keys=keys) as watched:
        assert watched.state(1).health.state is UNHEALTHY
        await anyio.sleep(1)
        assert watched.state(1).health.state is UNHEALTHY
        watched.steady(0, 2, 3, 4, 5, 6, 7)
    log.write_text(kernel_line(3, "0000:9d:00", 95))
    reboot()
    async with watching(machine, state=tmp_path, keys=keys) as watched:
        assert watched.state(4).health.state is UNHEALTHY


async def test_a_file_that_cannot_be_read_is_kept_aside(tmp_path: Path, logs: Logs) -> None:
    for bad in (b"\xff{", b"{}", b'{"version": 9, "boot_id": "x"}', b'{"version": 1, "boot_id": 3}'):
        (tmp_path / verdicts.NAME).write_bytes(bad)
        logs.clear()
        async with watching("l40s-2", state=tmp_path) as watched:
            assert all(state.healthy for state in watched.snapshot.gpus)
        assert [entry["event"] for entry in logs].count("verdict_file_unusable") == 1
        assert (tmp_path / f"{verdicts.NAME}.bad").read_bytes() == bad


async def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, logs: Logs) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    async with watching("l40s-2", state=tmp_path / "state") as watched:
        watched.machine.xid(0, 48)
        await watched.until(0, UNHEALTHY)
        await watched.until(0, HEALTHY)
        assert watched.gpu_monitor.persistence.problem
    assert [entry["event"] for entry in logs].count("verdicts_not_kept") == 1


async def test_the_kernel_log_tells_of_gpus_that_send_no_events(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("t4-4")
    machine.gpu(2).supported_events = 0
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    keep = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        async with watching(machine, keys={"health.kernelLog": str(fifo)}, without_events=1) as watched:
            os.write(keep, kernel_line(5, "0000:00:1d", 48).encode())
            await watched.until(2, UNHEALTHY)
            os.write(keep, kernel_line(6, "0000:00:1b", 48).encode())  # NVML itself reports this one
            await anyio.sleep(0.3)
            watched.steady(0, 1, 3)
    finally:
        os.close(keep)


async def test_the_kernel_log_says_of_an_nvlink_xid_what_its_number_does_not(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("t4-4")
    for slot in range(4):
        machine.recovery_action(slot, None)
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    keep = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def told(sequence: int, bus: str, rest: str) -> bytes:
        return kernel_line(sequence, bus, 145).replace("\n", f"{rest}\n").encode()

    try:
        keys = {"health.kernelLog": str(fifo), "health.quiet.needsReset": 60}
        async with watching(machine, keys=keys) as watched:
            for slot in (0, 1, 2):
                machine.xid(slot, 145)
                await watched.until(slot, UNHEALTHY)
            bus = [watched.state(slot).gpu.pci_bus_id.rpartition(".")[0] for slot in range(3)]
            os.write(keep, told(5, bus[0], ", RLW_RXPIPE Nonfatal XC0 i0 Link 9 (0x6 0x1)"))
            os.write(keep, told(6, bus[1], ", RLW_REMAP Nonfatal XC1 i0 Link 9 (0x4 0x1)"))
            os.write(keep, told(7, bus[2], ", RLW_REMAP Fatal XC0 i0 Link 9 (0x4 0x40)"))
            await watched.until(0, HealthState.HEALTHY, deadline=3)
            await watched.until(1, HealthState.SUSPECT, deadline=3)
            await watched.settled(lambda now: now.by_uuid[machine.uuid(2)].health.fault.xid_class is not None)
            assert watched.state(2).health.state is UNHEALTHY
            assert watched.inventory.counters.xids[machine.uuid(0), 145] == 1  # and not once more by its line
            watched.steady(3)
    finally:
        os.close(keep)
