"""Folders of limits: whole or not there, found again, and nothing that a tenant writes is followed."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.vgpu import folders, layout
from agent.vgpu.folders import ABOUT, LIMITS, USAGE, About, LimitFolders, key_of
from agent.vgpu.isolation_errors import FolderUnusable
from agent.vgpu.layout import DeviceLimits
from tests.unit.vgpu.made_up import GIB, about


@pytest.fixture
def limits(tmp_path: Path) -> LimitFolders:
    made = LimitFolders(tmp_path)
    made.prepare()
    return made


def test_a_folder_is_keyed_by_the_units_in_any_order() -> None:
    ids = about("a").ids
    assert key_of(ids) == key_of(tuple(reversed(ids)))
    assert key_of(ids) != key_of(ids[1:])


def test_a_folder_holds_all_that_a_container_needs(limits: LimitFolders) -> None:
    container = about("a", cores=30)
    key = limits.create(container)
    assert limits.keys() == [key]
    assert limits.about(key) == container
    assert limits.limits(key) == DeviceLimits(container.gpu, container.memory_bytes, 30)
    assert limits.usage(key) == layout.CountedUsage(0, 0, 0, 0)
    modes = {name: stat.S_IMODE(limits.path(key, name).stat().st_mode) for name in (ABOUT, LIMITS, USAGE)}
    assert modes == {ABOUT: 0o600, LIMITS: 0o644, USAGE: 0o666}
    assert stat.S_IMODE(limits.root.stat().st_mode) == 0o700
    usage = limits.path(key, USAGE).stat()
    assert usage.st_size == layout.USAGE_BYTES
    # Its pages are the container's memory, not the agent's.
    assert usage.st_blocks * 512 <= 16 << 10


def test_changed_limits_reach_the_file_that_is_mounted(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    mounted = os.open(limits.path(key, LIMITS), os.O_RDONLY)
    try:
        limits.change(key, memory_bytes=7 * GIB)
        assert layout.read_limits(os.pread(mounted, layout.LIMITS_BYTES, 0))[0].memory_bytes == 7 * GIB
    finally:
        os.close(mounted)


def test_a_folder_that_another_pod_left_gives_way(limits: LimitFolders) -> None:
    key = limits.create(about("before"))
    left = os.open(limits.path(key, USAGE), os.O_RDWR)
    try:
        assert limits.create(about("after")) == key
        os.pwrite(left, b"\xff" * 8192, 0)
        assert limits.about(key).pod == "after"
        assert limits.usage(key) == layout.CountedUsage(0, 0, 0, 0)
    finally:
        os.close(left)


@pytest.mark.parametrize("name", [ABOUT, LIMITS, USAGE])
def test_a_folder_that_cannot_be_made_whole_is_not_there(
    limits: LimitFolders, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = folders._write

    def full(folder: int, what: str, *rest: object) -> None:
        if what == name:
            raise OSError(28, "No space left on device")
        write(folder, what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(folders, "_write", full)
    with pytest.raises(FolderUnusable, match=r"No space left on device; free space"):
        limits.create(about("a"))
    assert not list(limits.root.iterdir())


def test_what_a_killed_agent_had_begun_is_removed_at_the_start(limits: LimitFolders) -> None:
    (limits.root / ".abc").mkdir()
    (limits.root / ".abc" / USAGE).write_bytes(b"x")
    key = limits.create(about("a"))
    limits.prepare()
    assert [each.name for each in limits.root.iterdir()] == [key]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"uid": "u"}', b"null"], ids=repr)
def test_an_unreadable_description_is_refused(limits: LimitFolders, content: bytes) -> None:
    key = limits.create(about("a"))
    limits.path(key, ABOUT).write_bytes(content)
    with pytest.raises(FolderUnusable, match=ABOUT):
        limits.about(key)


def test_a_description_of_other_units_is_refused(limits: LimitFolders) -> None:
    key, other = limits.create(about("a")), limits.create(about("b", first=100))
    limits.path(key, ABOUT).write_bytes(limits.path(other, ABOUT).read_bytes())
    with pytest.raises(FolderUnusable, match="other units"):
        limits.about(key)


@pytest.mark.parametrize("damage", ["garbage", "short", "foreign", "empty"])
def test_a_damaged_limit_file_is_refused_and_mended_in_its_place(limits: LimitFolders, damage: str) -> None:
    key = limits.create(about("a"))
    file = limits.path(key, LIMITS)
    good = file.read_bytes()
    foreign = good[:8] + b"\x63" + good[9:]
    bad = {"garbage": os.urandom(len(good)), "short": good[:600], "foreign": foreign, "empty": b""}[damage]
    inode = file.stat().st_ino
    file.write_bytes(bad)
    with pytest.raises(FolderUnusable, match=LIMITS):
        limits.limits(key)
    limits.mend(key, about("a"))
    assert limits.limits(key).memory_bytes == about("a").memory_bytes
    assert (file.stat().st_ino, file.stat().st_size) == (inode, layout.LIMITS_BYTES)


def test_a_usage_region_that_its_container_rewrote_says_nothing(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    region = limits.path(key, USAGE)
    for content in (b"", b"x" * 100, os.urandom(layout.USAGE_BYTES)):
        region.write_bytes(content)
        assert limits.usage(key) is None


def test_a_usage_region_that_its_container_made_longer_is_cut_back(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    os.truncate(limits.path(key, USAGE), 1 << 40)
    limits.bound(key)
    assert limits.usage(key) == layout.CountedUsage(0, 0, 0, 0)
    assert limits.path(key, USAGE).stat().st_size == layout.USAGE_BYTES


def unprivileged(root: Path, command: str) -> str:
    """The output of a command on the folders in an agent as the chart runs it: root without capabilities."""
    script = (
        "import sys; from pathlib import Path; from agent.vgpu.folders import LimitFolders; "
        f"limits = LimitFolders(Path(sys.argv[1])); key, = limits.keys(); print({command})"
    )
    drop = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    words = (*drop, sys.executable, "-c", script, str(root))
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_an_agent_without_capabilities_changes_limits(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    unprivileged(limits.root.parent, f"limits.change(key, memory_bytes={7 * GIB})")
    assert limits.limits(key).memory_bytes == 7 * GIB
    limits.path(key, LIMITS).chmod(0o444)  # as the file was made at first
    unprivileged(limits.root.parent, f"limits.change(key, memory_bytes={8 * GIB})")
    assert limits.limits(key).memory_bytes == 8 * GIB


def test_an_agent_without_capabilities_cuts_back_a_region_that_was_closed_to_it(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    os.truncate(limits.path(key, USAGE), 1 << 40)
    limits.path(key, USAGE).chmod(0)  # its container's root is the file's owner, too
    assert unprivileged(limits.root.parent, "limits.bound(key), limits.usage(key).total_bytes") == "True 0"
    assert limits.path(key, USAGE).stat().st_size == layout.USAGE_BYTES


def test_no_link_and_no_pipe_is_opened(limits: LimitFolders, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(layout.limit_file("x", [DeviceLimits(about("a").gpu, GIB)]))
    key = limits.create(about("a"))
    for name in (ABOUT, LIMITS, USAGE):
        limits.path(key, name).unlink()
        limits.path(key, name).symlink_to(secret)
    later = LimitFolders(tmp_path)  # this one has both files open
    for read in (later.about, later.limits, later.usage):
        with pytest.raises(FolderUnusable):
            read(key)
    limits.path(key, USAGE).unlink()
    os.mkfifo(limits.path(key, USAGE))
    with pytest.raises(FolderUnusable):
        later.usage(key)
    limits.remove(key)
    assert secret.exists()
    assert limits.keys() == []


def test_a_folder_that_is_a_link_is_not_entered(limits: LimitFolders, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    key = key_of(about("a").ids)
    (limits.root / key).symlink_to(outside)
    with pytest.raises(FolderUnusable):
        limits.about(key)
    limits.create(about("a"))
    assert (outside / "kept").exists()
    assert limits.about(key).pod == "a"


def test_descriptions_keep_what_later_agents_add(limits: LimitFolders) -> None:
    key = limits.create(about("a"))
    file = limits.path(key, ABOUT)
    file.write_bytes(file.read_bytes()[:-1] + b',"later":1}')
    assert limits.about(key) == about("a")
    assert isinstance(limits.about(key), About)
