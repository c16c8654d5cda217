"""The library on the host: versioned, executable there, and never changed under a running container."""

import fcntl
import os
from pathlib import Path

import pytest

from agent.vgpu import library
from agent.vgpu.isolation_errors import LibraryUnusable

ELF = library.ELF


def source(tmp_path: Path, content: bytes = b"one") -> Path:
    file = tmp_path / "image.so"
    file.write_bytes(ELF + content)
    return file


def test_the_preload_file_names_the_library_of_its_version(tmp_path: Path) -> None:
    found = library.install(source(tmp_path), tmp_path / "state").copy()
    assert found.file.read_bytes() == ELF + b"one"
    assert found.preload.read_text() == f"/usr/lib/gpu-node-agent/{found.file.name}\n"
    assert found.file.stat().st_mode & 0o777 == 0o555
    assert found.preload.stat().st_mode & 0o777 == 0o444


def test_each_copy_has_inodes_of_its_own_and_none_is_the_original_s(tmp_path: Path) -> None:
    original = library.install(source(tmp_path), tmp_path / "state")
    assert not list((tmp_path / "state" / "lib").iterdir())  # nothing that a container could be given
    copies = [original.copy() for _ in range(3)]
    assert len({file.stat().st_ino for each in copies for file in (each.file, each.preload)}) == 6
    assert len({each.build for each in copies}) == 3


def test_copies_share_their_blocks_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def clone(target: int, request: int, of: int) -> None:
        assert request == library.FICLONE
        os.pwrite(target, os.pread(of, 100, 0), 0)
        cloned.append(of)

    cloned: list[int] = []
    before = descriptors()
    monkeypatch.setattr(fcntl, "ioctl", clone)
    original = library.install(source(tmp_path), tmp_path / "state")
    assert original.copy().file.read_bytes() == ELF + b"one"
    assert len(cloned) == 2
    assert descriptors() == before + 1  # a file without a name
    del original
    assert descriptors() == before


def test_a_copy_that_cannot_be_made_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = library._write

    def full(file: int, content: bytes) -> None:
        if not content.startswith(ELF):
            raise OSError(28, "No space left on device")
        write(file, content)

    original = library.install(source(tmp_path), tmp_path / "state")
    monkeypatch.setattr(library, "_write", full)
    with pytest.raises(LibraryUnusable, match="No space left on device"):
        original.copy()
    assert not list((tmp_path / "state" / "lib").iterdir())


def test_copies_of_another_version_have_another_name(tmp_path: Path) -> None:
    first = library.install(source(tmp_path), tmp_path / "state").copy()
    second = library.install(source(tmp_path, b"two"), tmp_path / "state").copy()
    assert first.file.read_bytes() == ELF + b"one"
    library.remove_unused(tmp_path / "state", {first.build, second.build})
    assert first.file.exists()
    (second.folder / ".begun").write_bytes(b"")
    first.file.unlink()
    first.file.mkdir()  # as a runtime does that starts a container without it
    library.remove_unused(tmp_path / "state", {second.build})
    assert sorted(second.folder.iterdir()) == sorted([second.file, second.preload])


@pytest.mark.parametrize("damage", ["removed", "empty", "a folder", "a link"])
def test_a_copy_that_was_lost_is_mended_and_one_that_is_whole_stays(tmp_path: Path, damage: str) -> None:
    original = library.install(source(tmp_path), tmp_path / "state")
    found = original.copy()
    inode = found.file.stat().st_ino
    assert not original.mend(found.build)
    assert found.file.stat().st_ino == inode
    other = tmp_path / "other"
    other.write_bytes(b"other")
    for file in (found.file, found.preload):
        file.unlink()
        if damage == "empty":  # as a power cut leaves it
            file.write_bytes(b"")
        elif damage == "a folder":  # a runtime makes one in its place
            file.mkdir()
        elif damage == "a link":
            file.symlink_to(other)
    assert original.mend(found.build)
    assert found.file.read_bytes() == ELF + b"one"
    assert found.preload.read_text() == f"/usr/lib/gpu-node-agent/{found.file.name}\n"
    assert other.read_bytes() == b"other"
    later = library.install(source(tmp_path, b"two"), tmp_path / "state")
    found.file.unlink()
    assert not later.mend(found.build)  # it does not have that content
    assert not found.file.exists()


def test_a_missing_library_is_told_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(LibraryUnusable, match=r"nothing\.so cannot be read: No such file.*use an image"):
        library.install(tmp_path / "nothing.so", tmp_path / "state")


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.so").write_text("#!/bin/sh\n")
    with pytest.raises(LibraryUnusable, match="no shared library"):
        library.install(tmp_path / "image.so", tmp_path / "state")


def test_a_folder_that_is_mounted_noexec_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "fstatvfs", lambda _: NoExec())
    with pytest.raises(LibraryUnusable, match="mount it without noexec"):
        library.install(source(tmp_path), tmp_path / "state")
    assert not list((tmp_path / "state" / "lib").iterdir())


@pytest.mark.parametrize("labels", [False, True], ids=["no right to label", "labels"])
def test_the_check_of_a_node_tries_a_label_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: bool
) -> None:
    tried = []

    def label(descriptor: int, *_: object) -> None:
        tried.append(os.fstat(descriptor).st_dev)
        if not labels:
            raise OSError(1, "Operation not permitted")

    assert library.obstacle(tmp_path / "state") is None  # this kernel has no SELinux
    monkeypatch.setattr(os, "getxattr", lambda *_: b"system_u:object_r:var_lib_t:s0\0")
    monkeypatch.setattr(os, "setxattr", label)
    problem = library.obstacle(tmp_path / "state")
    assert tried == [tmp_path.stat().st_dev]
    assert (problem is None) is labels
    if problem:
        assert problem.startswith(f"SELinux would keep pods from files below {tmp_path}: ")
        assert "(Operation not permitted); let the agent relabel" in problem
    assert not list(tmp_path.iterdir())


def test_what_a_label_of_selinux_prevents_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "getxattr", lambda *_: b"system_u:object_r:var_lib_t:s0\0")
    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(LibraryUnusable, match=r"SELinux would keep pods from files .* cannot be labelled"):
        library.install(source(tmp_path), tmp_path / "state")
