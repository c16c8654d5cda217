"""Looking for users of a shared memory in a made-up /proc: what a tenant can put there."""

import os
import platform
import stat
import threading
import time
from pathlib import Path

import pytest

from agent.kit import bounded, files
from agent.mps import shm_sweep
from tests.pace import scaled


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A process whose mount 40 of this file system is its /dev/shm."""
    folder = tmp_path / "proc" / "7"
    for name in ("ns", "fd", "fdinfo"):
        (folder / name).mkdir(parents=True)
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (folder / "ns" / "mnt").symlink_to("mnt:[4026532000]")
    (folder / "mountinfo").write_text(f"40 30 {number} / /dev/shm rw - tmpfs gpu-node-agent rw\n")
    (folder / "maps").write_text("")
    (folder / "stat").write_text("7 (python3) " + " ".join("0" * 50))
    (folder / "status").write_text("Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\n")
    return folder


@pytest.mark.parametrize(("mount", "looked_at"), [(40, True), (99, False)])
def test_files_of_other_mounts_are_not_looked_at(
    process: Path, tmp_path: Path, mount: int, looked_at: bool
) -> None:
    """A tenant's NFS server that does not answer would hold the agent for ever."""
    file = tmp_path / "dev" / "shm" / "open"
    file.parent.mkdir(parents=True)
    file.touch()
    (process / "fd" / "3").symlink_to(file)
    (process / "fdinfo" / "3").write_text(f"pos:\t0\nflags:\t0100000\nmnt_id:\t{mount}\nino:\t5\n")
    seen = shm_sweep.look(tmp_path.stat().st_dev, (), process.parent)
    assert len(seen.users) == 1
    assert seen.inodes == ({file.stat().st_ino} if looked_at else set())


def test_folders_in_folders_take_no_more_looks_than_one(tmp_path: Path) -> None:
    """Each folder could have as many names as a look may take: they are held in memory meanwhile."""
    folder = tmp_path
    for _ in range(8):
        for number in range(20):
            (folder / f"file{number}").touch()
        folder = folder / "folder"
        folder.mkdir()
    seen: list[str] = []

    def visit(_folder: int, name: str, status: os.stat_result) -> None:
        assert stat.S_ISDIR(status.st_mode) == (name == "folder")
        seen.append(name)

    with files.opened(tmp_path) as descriptor:
        left = shm_sweep._walk(descriptor, visit, 50)
    assert left == 0
    assert len(seen) == 50


def test_names_with_ends_of_lines_end_no_look(process: Path, tmp_path: Path) -> None:
    """A tenant names its mounts and mapped files as it likes, but for line feeds."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    with (process / "mountinfo").open("ab") as file:
        file.write(b"41 40 0:99 / /a\rb rw - nfs server rw\n")
    (process / "maps").write_bytes(
        f"1000-2000 rw-s 00000000 {number} 77 /dev/shm/x\r1000-2000 rw-s 0 {number} none y\n".encode()
    )
    with (process / "status").open("rb+") as file:
        file.write(b"Name:\tx\rUid:\tx\nUid:\t1000\t1000\t1000\t1000\n")
    seen = shm_sweep.look(device, (), process.parent)
    assert seen.inodes == {77}
    assert [user.users for user in seen.users] == [{1000}]


def test_who_keeps_the_reader_of_its_map_waiting_costs_its_own_container(
    process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = min(scaled(0.05), 0.5)
    monkeypatch.setattr(bounded, "SECONDS", seconds)
    monkeypatch.setattr(shm_sweep, "WAITED_SECONDS", seconds)
    for file, users in (process / "maps", 1), (process / "stat", 0):
        file.unlink()
        os.mkfifo(file)
        # One that is late for the first time may only be slow, and nothing is removed then.
        with pytest.raises(shm_sweep.Exhausted, match="stays until the next look"):
            shm_sweep.look(tmp_path.stat().st_dev, (), process.parent)
        seen = shm_sweep.look(tmp_path.stat().st_dev, (), process.parent)
        assert (len(seen.cut_short), len(seen.users)) == (1, users)
    for file in process / "maps", process / "stat":
        os.close(os.open(file, os.O_WRONLY))


def test_a_kcmp_that_does_not_return_leaves_each_process_for_itself(
    process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(shm_sweep, "PROC", process.parent)
    monkeypatch.setattr(shm_sweep, "_KCMP", {platform.machine(): 1})
    monkeypatch.setattr(shm_sweep, "ALL_SECONDS", 2.0)
    monkeypatch.setattr(shm_sweep, "_by_table", lambda *_: go_on.wait(10))
    try:
        seen = shm_sweep.look(tmp_path.stat().st_dev, (), process.parent)
        assert (len(seen.users), seen.cut_short) == (1, set())
    finally:
        go_on.set()


def test_grouping_processes_by_their_tables_ends_in_time() -> None:
    having = [Path("/proc/1"), Path("/proc/2")]
    with pytest.raises(shm_sweep.Exhausted):
        shm_sweep._by_table(having, shm_sweep._KCMP.get(platform.machine(), 0), time.monotonic() - 1)
