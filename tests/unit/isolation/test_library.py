"""The library on the host: versioned, executable there, and never changed under a running container."""

import os
from pathlib import Path

import pytest

from agent.isolation import library
from agent.isolation.isolation_errors import LibraryUnusable

ELF = library.ELF


def source(tmp_path: Path, content: bytes = b"one") -> Path:
    file = tmp_path / "image.so"
    file.write_bytes(ELF + content)
    return file


def test_the_preload_file_names_the_library_of_its_version(tmp_path: Path) -> None:
    found = library.install(source(tmp_path), tmp_path / "state")
    assert found.file.read_bytes() == ELF + b"one"
    assert found.preload.read_text() == f"/usr/lib/gpu-node-agent/{found.file.name}\n"
    assert found.file.stat().st_mode & 0o777 == 0o555
    assert found.preload.stat().st_mode & 0o777 == 0o444


def test_the_same_library_stays_the_same_file(tmp_path: Path) -> None:
    first = library.install(source(tmp_path), tmp_path / "state")
    inode = first.file.stat().st_ino
    assert library.install(source(tmp_path), tmp_path / "state") == first
    assert first.file.stat().st_ino == inode


def test_another_library_gets_another_name(tmp_path: Path) -> None:
    first = library.install(source(tmp_path), tmp_path / "state")
    second = library.install(source(tmp_path, b"two"), tmp_path / "state")
    assert first.file != second.file
    assert first.file.read_bytes() == ELF + b"one"
    library.remove_unused(tmp_path / "state", {first.build, second.build})
    assert first.file.exists()
    (second.folder / ".begun").write_bytes(b"")
    library.remove_unused(tmp_path / "state", {second.build})
    assert sorted(second.folder.iterdir()) == sorted([second.file, second.preload])


def test_a_file_that_somebody_damaged_is_replaced_in_one_step(tmp_path: Path) -> None:
    found = library.install(source(tmp_path), tmp_path / "state")
    found.file.chmod(0o755)
    found.file.write_bytes(b"damaged")
    damaged = os.open(found.file, os.O_RDONLY)
    try:
        library.install(source(tmp_path), tmp_path / "state")
        assert found.file.read_bytes() == ELF + b"one"
        assert os.pread(damaged, 100, 0) == b"damaged"  # processes that have it mapped keep it
    finally:
        os.close(damaged)


def test_a_folder_that_a_runtime_made_in_its_place_gives_way(tmp_path: Path) -> None:
    found = library.install(source(tmp_path), tmp_path / "state")
    for file in (found.file, found.preload):
        file.unlink()
        file.mkdir()
    assert not library.is_there(found)
    assert library.install(source(tmp_path), tmp_path / "state") == found
    assert library.is_there(found)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    found = library.install(source(tmp_path), tmp_path / "state")
    other = tmp_path / "other"
    other.write_bytes(b"other")
    found.file.unlink()
    found.file.symlink_to(other)
    library.install(source(tmp_path), tmp_path / "state")
    assert other.read_bytes() == b"other"
    assert found.file.read_bytes() == ELF + b"one"


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
    with pytest.raises(LibraryUnusable, match=r"SELinux .* cannot be labelled for pods"):
        library.install(source(tmp_path), tmp_path / "state")
