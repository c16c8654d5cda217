"""Records of the kernel log."""

import os
from pathlib import Path

import pytest

from agent.inventory.verdicts import KernelLog, LogXid, parse


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off",
            (79, "0000:1b:00"),
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", (14, "0000:03:00")),
        ("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0", (154, "0009:01:00")),
        ("NVRM: Xid (PCI:00000000:1B:00.0): 48, DBE", (48, "0000:1b:00")),
        ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", (79, "0000:29:00")),
        ("NVRM: Xid error: xyz", None),
        ("usb 1-1: new device", None),
    ],
)
def test_lines_as_drivers_write_them(message: str, found: tuple[int, str] | None) -> None:
    parsed = parse(f"4,812,5140900,-;{message}".encode())
    assert parsed == (None if found is None else LogXid(812, found[1], found[0]))


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"NVRM: Xid (PCI:0000:1b:00): 79",
        b"x,1,2;NVRM: Xid (PCI:0000:1b:00): 79",
        b"12,812,5140900,-;NVRM: Xid (PCI:0000:1b:00): 79",  # facility 1: a program wrote it
        b" SUBSYSTEM=pci",
        b"\xff\xfe;\xff",
    ],
)
def test_anything_else_is_no_xid(record: bytes) -> None:
    assert parse(record) is None


def test_a_file_is_read_to_its_end_and_goes_on_where_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"4,1,1,-;NVRM: Xid (PCI:0000:1b:00): 79, a\n4,2,1,-;NVRM: Xi")
    log = KernelLog(path)
    try:
        assert not log.lasting
        assert [xid.sequence for xid in log.read()] == [1]
        with path.open("ab") as file:
            file.write(b"d (PCI:0000:1b:00): 31, b\n")
        assert [xid.number for xid in log.read()] == [31]
    finally:
        log.close()


def test_a_pipe_lasts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    log = KernelLog(path)
    try:
        assert log.lasting
        assert not list(log.read())
    finally:
        log.close()


def test_a_missing_log_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KernelLog(tmp_path / "none")
