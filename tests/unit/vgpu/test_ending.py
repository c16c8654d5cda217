"""Containers above their cap: reported by default, ended by option, and nobody else with them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from agent.settings import Settings
from agent.vgpu.limits import Enforcement
from agent.vgpu.watch import CONTEXT_BYTES, END_READINGS, READINGS, REFUSED_READINGS, end, tolerance
from tests.unit.vgpu.test_watch import CAP, Node

POD = "01234567-89ab-cdef-0123-456789abcdef"
MINE, OTHER = "a" * 64, "b" * 64
ABOVE = CAP + tolerance(CAP) + CONTEXT_BYTES + 1


class Processes:
    """Real ones, whose cgroups are made up."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, container: str | None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"])
        self.running.append(process)
        folder = self.proc / str(process.pid)
        folder.mkdir(parents=True)
        path = "/user.slice" if container is None else f"/kubepods/pod{POD}/{container}"
        (folder / "cgroup").write_text(f"0::{path}\n")
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "proc")
    try:
        yield made
    finally:
        for process in made.running:
            process.kill()
            process.wait()


def test_all_processes_of_the_container_end_and_no_others(processes: Processes) -> None:
    mine = [processes.start(MINE) for _ in range(3)]
    others = [processes.start(OTHER), processes.start(None)]
    assert end([mine[0].pid], processes.proc) == 3
    assert [each.wait() for each in mine] == [-9] * 3
    assert [each.poll() for each in others] == [None, None]


def test_a_process_whose_container_cannot_be_told_is_left_alone(processes: Processes) -> None:
    outside = processes.start(None)
    assert end([outside.pid, 2**22 + 1], processes.proc) == 0
    assert outside.poll() is None


def test_a_number_that_is_used_again_ends_nobody(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = processes.start(MINE)
    opened = os.pidfd_open

    def moved(pid: int) -> int:
        (processes.proc / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{POD}/{OTHER}\n")
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", moved)
    assert end([process.pid], processes.proc) == 0
    assert process.poll() is None


async def test_by_default_it_is_reported_within_three_seconds_and_never_ended(
    tmp_path: Path, processes: Processes
) -> None:
    # A reading each second; one that was just taken when the container grew does not count.
    assert Settings().sampling.interval_seconds * (READINGS + 1) <= 3
    node = Node(tmp_path)
    await node.admit()
    process = await anyio.to_thread.run_sync(processes.start, MINE)
    for _ in range(READINGS):
        await node.look(ABOVE, process.pid)
    assert node.owners.events.count(("a", "MemoryCapExceeded", True)) == 1
    for _ in range(2 * END_READINGS):
        await node.look(ABOVE, process.pid)
    assert process.poll() is None
    assert node.events.ends == {"ended": 0, "failed": 0}


async def test_by_option_it_is_ended_after_its_owner_was_told(tmp_path: Path, processes: Processes) -> None:
    node = Node(tmp_path)
    node.ending()
    await node.admit()
    process = await anyio.to_thread.run_sync(processes.start, MINE)
    for _ in range(END_READINGS - 1):
        await node.look(ABOVE, process.pid)
    assert process.poll() is None
    await node.look(ABOVE - 1, process.pid)  # contexts may explain that
    for _ in range(END_READINGS - 1):
        await node.look(ABOVE, process.pid)
    assert process.poll() is None
    await node.look(ABOVE, process.pid)
    assert await anyio.to_thread.run_sync(process.wait) == -9
    reasons = [reason for _, reason, _ in node.owners.events]
    assert reasons.index("MemoryCapExceeded") < reasons.index("ContainerEnded")
    assert node.events.ends == {"ended": 1, "failed": 0}


async def test_namespaces_whose_caps_are_not_enforced_lose_nothing(
    tmp_path: Path, processes: Processes
) -> None:
    node = Node(tmp_path)
    node.ending()
    await node.admit()
    process = await anyio.to_thread.run_sync(processes.start, MINE)
    for policy in (Enforcement.OFF, Enforcement.REPORT):
        node.policies["default"] = policy
        for _ in range(2 * END_READINGS):
            await node.look(ABOVE, process.pid)
    assert process.poll() is None


async def test_one_that_cannot_be_ended_is_reported(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)
    node = Node(tmp_path)
    node.ending()
    await node.admit()
    process = await anyio.to_thread.run_sync(processes.start, MINE)
    for _ in range(END_READINGS):
        await node.look(ABOVE, process.pid)
    assert ("a", "ContainerNotEnded", True) in node.owners.events
    assert node.events.ends == {"ended": 0, "failed": 1}


async def test_by_option_who_keeps_the_agent_from_its_files_is_ended(
    tmp_path: Path, processes: Processes
) -> None:
    node = Node(tmp_path)
    node.ending(MINE)
    key = await node.admit()
    mine, other = [await anyio.to_thread.run_sync(processes.start, each) for each in (MINE, OTHER)]
    for refusing in (REFUSED_READINGS - 1, 0, REFUSED_READINGS - 1):
        node.isolation.refusing = {key: "usage is kept from the agent"} if refusing else {}
        for _ in range(refusing or 1):
            await node.look(0)
    node.isolation.refusing = {key: "usage is kept from the agent"}
    assert mine.poll() is None
    await node.look(0)
    assert await anyio.to_thread.run_sync(mine.wait) == -9
    assert other.poll() is None
    assert node.events.ends == {"ended": 1, "failed": 0}
    assert any("usage is kept from the agent): it was ended" in each for each in node.owners.messages)
